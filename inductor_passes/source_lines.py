"""Where a node comes from in the user's program, and what to call it in a sentence."""

import re
from pathlib import Path

from torch._ops import OpOverload
from torch.fx import Node

import dspark_ops

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
# The public functions of the op package stand between the user's line and the op.
_OURS = str(Path(dspark_ops.__file__).parent)


def source_line(node: Node) -> tuple[str | None, int | None]:
    """File and line of the innermost frame of the user."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.startswith(_OURS):
            return file, int(line)
    return None, None


def where(node: Node) -> str:
    file, line = source_line(node)
    return "" if file is None else f" at {Path(file).name}:{line}"


def name_of(node: Node) -> str:
    if node.op == "output":
        return "the output of the graph"
    if node.op == "placeholder":
        return f"the input {node.name}"
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[1]
    if node.op == "get_attr":
        return f"the attribute {node.target}"
    if node.args and isinstance(node.args[0], OpOverload):
        return node.args[0]._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def described(node: Node) -> str:
    """``mul at model.py:31``"""
    return name_of(node) + where(node)
