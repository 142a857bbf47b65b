"""What constants, views and writes hold: rules of `contents`.

A rule gets the node, its arguments by name and the contents of what it reads, all of one dim or
none; None is for what it can't describe.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.segments import Contents, Counting, Unknown, at_most, equal, joined, window

Known = dict[Node, Contents]
Rule = Callable[[Node, dict[str, Any], Known], Contents | None]


def length_in(value: torch.Tensor) -> Any:
    return value.shape[0] if value.dim() else 1


def length_of(node: Node) -> Any:
    return length_in(node.meta["val"])


def number_of(x: Any) -> Any:
    """An int or ``SymInt`` that is an argument, or None."""
    if isinstance(x, Node):
        x = x.meta.get("val")
    return x if type(x) is int or isinstance(x, torch.SymInt) else None


# Constants


def full(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    value = a["fill_value"]
    # Any other number may be rounded to one of these, or be out of the range of the dtype.
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        return None
    return Contents.of(bool(value), length_of(node))


def iota(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    first = number_of(a["start"])
    if first is None or a["step"] != 1:
        return None
    length, dtype = length_of(node), node.meta["val"].dtype
    return Contents.of(Counting(first), length) if fits(first, first + length, dtype) else None


def fits(least: Any, most: Any, dtype: torch.dtype) -> bool:
    """Whether numbers from ``least`` to ``most`` are what they are in ``dtype``, too."""
    if dtype is torch.int64:
        return True  # what a ``SymInt`` is itself
    if dtype not in (torch.int32, torch.int16, torch.int8, torch.uint8):
        return False
    limits = torch.iinfo(dtype)
    return at_most(limits.min, least) and at_most(most, limits.max)


# Views and writes


def unchanged(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    """The one rule for tensors of any dims: their elements in order."""
    return known.get(next(iter(a.values())))


def slice_(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    source = known.get(a["self"])
    taken = None if source is None else _window(source, a, length_of(node))
    return None if source is None or taken is None else source.part(*taken)


def slice_scatter(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    target, source = known.get(a["self"]), known.get(a["src"])
    if target is None or source is None:
        return None
    put = _window(target, a, source.length)
    return None if put is None else target.with_part(*put, source)


def _window(contents: Contents, a: dict[str, Any], count: Any) -> tuple[Any, Any] | None:
    start, end = number_of(a["start"]), number_of(a["end"])
    if a["step"] != 1 or (start is None and a["start"] is not None):
        return None
    if end is None and a["end"] is not None:
        return None
    return window(contents.length, start, end, count)


def select(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    source = known.get(a["self"])
    index = None if source is None else _index(source, a)
    return None if source is None or index is None else source.part(index, index + 1)


def select_scatter(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    target, source = known.get(a["self"]), known.get(a["src"])
    index = None if target is None else _index(target, a)
    if target is None or source is None or index is None:
        return None
    return target.with_part(index, index + 1, source)


def _index(contents: Contents, a: dict[str, Any]) -> Any:
    index = number_of(a["index"])
    if index is None or at_most(0, index):
        return index
    return index + contents.length if at_most(index, -1) else None


def expand(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    return as_long(known.get(a["self"]), length_of(node))


def copy(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    return _converted(known.get(a["src"]), a["src"], node)


def convert(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    source = next(iter(a.values()))
    return _converted(known.get(source), source, node)


def _converted(contents: Contents | None, source: Node, node: Node) -> Contents | None:
    """``contents`` of ``source`` in the length and dtype of ``node``."""
    if contents is None:
        return None
    if source.meta["val"].dtype is not node.meta["val"].dtype:
        values = [run.value for run in contents.runs]
        if not all(isinstance(value, (bool, Unknown)) for value in values):
            return None
    return as_long(contents, length_of(node))


def as_long(contents: Contents | None, length: Any) -> Contents | None:
    """``contents``, or its only element ``length`` times."""
    if contents is None or equal(contents.length, length):
        return contents
    if not equal(contents.length, 1) or not contents.runs:
        return None
    value = contents.runs[0].value
    return Contents.of(value, length) if isinstance(value, (bool, Unknown)) else None


def cat(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    parts = [known.get(source) for source in a["tensors"]]
    dtypes = {source.meta["val"].dtype for source in a["tensors"]}
    complete = [part for part in parts if part is not None]
    return joined(complete) if len(complete) == len(parts) and len(dtypes) == 1 else None
