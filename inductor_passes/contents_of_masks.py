"""What comparisons of indices with a number hold, and choices by such a mask: rules of `contents`.

arange(T) >= n       False up to n, then True
where(mask, x, y)    parts of x and of y
"""

from typing import Any

import torch
from torch.fx import Node

from inductor_passes.contents_of_writes import Known, Rule, as_long, fits, length_of, number_of
from inductor_passes.segments import Contents, Counting, at_least, at_most, chosen, equal, joined


def compare(below: bool, shift: int) -> Rule:
    """``below`` up to ``number + shift``, the opposite from there on."""

    def rule(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
        contents, number = known.get(a["self"]), number_of(a["other"])
        if contents is None or number is None or len(contents.runs) > 1:
            return None
        if not fits(number, number, a["self"].meta["val"].dtype):
            return None
        for run in contents.runs:
            if not isinstance(run.value, Counting):
                return None
            bound = at_least(number + shift - run.value.first, 0)
            bound = run.end if at_most(run.end, bound) else bound
            rest = Contents.of(not below, run.end - bound)
            return joined([Contents.of(below, bound), rest])
        return contents

    return rule


def not_(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    contents = known.get(a["self"])
    if contents is None or node.meta["val"].dtype is not torch.bool:
        return None
    true, false = (Contents.of(value, contents.length) for value in (True, False))
    return chosen(contents, false, true, node)


def where(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    return _chosen(node, a["condition"], a["self"], a["other"], known)


def or_(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    return _chosen(node, a["self"], True, a["other"], known)


def and_(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    return _chosen(node, a["self"], a["other"], False, known)


def index_put(node: Node, a: dict[str, Any], known: Known) -> Contents | None:
    if a["accumulate"] or len(a["indices"]) != 1 or not equal(a["values"].meta["val"].numel(), 1):
        return None
    (mask,) = a["indices"]
    if not isinstance(mask, Node) or mask.meta["val"].dtype is not torch.bool:
        return None
    return _chosen(node, mask, a["values"], a["self"], known)


def _chosen(node: Node, condition: Node, yes: Any, no: Any, known: Known) -> Contents | None:
    """``where(condition, yes, no)``; the last two are nodes or constants."""
    length = length_of(node)
    dtype = node.meta["val"].dtype
    if condition.meta["val"].dtype is not torch.bool:
        return None
    parts = []
    for choice in (condition, yes, no):
        if isinstance(choice, bool):
            part: Contents | None = Contents.of(choice, length)
        elif choice is not condition and choice.meta["val"].dtype is not dtype:
            return None
        else:
            part = as_long(known.get(choice), length)
        if part is None:
            return None
        parts.append(part)
    return chosen(parts[0], parts[1], parts[2], node)
