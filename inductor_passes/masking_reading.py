"""What is known about the nodes below a sort, and what may be asked about an operand."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import same_shape
from inductor_passes.calls import arguments_of, is_call_to
from inductor_passes.masking_terms import Ids, Logits, Pair, Probs, TopIds, TopValues
from inductor_passes.segments import at_most, equal

aten = torch.ops.aten
prims = torch.ops.prims

CONVERTS = (prims.convert_element_type.default, aten._to_copy.default)
SAME_ENTRIES = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
)
SOFTMAX_PARTS = (aten.amax.default, aten.sub.Tensor, aten.exp.default, aten.sum.dim_IntList)


class Reading:
    """What is known about the nodes that are computed from ``sort``, a sort or topk of ``logits``.

    terms: by node. helpers: nodes of a softmax that stand between two terms. results: nodes that
    hold the masked logits, with what they mean.
    """

    def __init__(self, sort: Node, logits: Node, of_probs: bool) -> None:
        arguments = arguments_of(sort)
        self.sort = sort
        self.logits = logits
        self.num_rows, self.vocab = logits.meta["val"].shape
        self.descending = bool(arguments.get("descending", True))
        self.helpers: list[Node] = []
        self.results: dict[Node, Logits] = {}
        if "k" in arguments:
            k = arguments["k"]
            pair = Pair(None if of_probs else TopValues(k), TopIds(k))
        else:
            values = Logits(in_place=False)
            pair = Pair(Probs(values) if of_probs else values, Ids(0, self.vocab))
        self.terms: dict[Node, Any] = {sort: pair}

    def meaning(self, x: Any) -> Any:
        """Of an operand, the logits among them."""
        if isinstance(x, Node):
            if x in self.terms:
                return self.terms[x]
            if is_same_tensor(x, self.logits):
                return Logits(in_place=True)
        return None

    def is_whole(self, x: Any) -> bool:
        """Whether ``x`` is [B, V]."""
        value = x.meta.get("val") if isinstance(x, Node) else None
        return isinstance(value, torch.Tensor) and same_shape(
            value.shape, (self.num_rows, self.vocab)
        )


Rule = Callable[[Node, Reading], Any]


def is_same_tensor(x: Any, logits: Node) -> bool:
    while is_call_to(x, aten.clone.default) and x is not logits:
        x = x.args[0]
    return x is logits


def number_of(x: Any) -> Any:
    """An int, float or SymInt; None if ``x`` is none."""
    value = x.meta.get("val") if isinstance(x, Node) else x
    if isinstance(value, bool | int | float | torch.SymInt):
        return value
    return None


def constant_of(x: Any) -> Any:
    """The one number that ``x`` is or holds everywhere, or None."""
    while isinstance(x, Node):
        if is_call_to(x, aten.full.default):
            is_bool = x.meta["val"].dtype == torch.bool
            x = arguments_of(x)["fill_value"]
            if is_bool and isinstance(x, int | float):
                return bool(x)
        elif is_call_to(x, aten.copy.default):
            x = arguments_of(x)["src"]
        elif is_call_to(x, *SAME_ENTRIES):
            x = x.args[0]
        else:
            return None
    return x if isinstance(x, bool | int | float) else None


def last_dim(dim: Any) -> bool:
    """Of a [B, V] tensor."""
    if isinstance(dim, list | tuple):
        return len(dim) == 1 and last_dim(dim[0])
    return type(dim) is int and dim in (1, -1)


def ends_in(node: Node, length: Any) -> bool:
    """Whether ``node`` has ``length`` entries in its last dimension."""
    shape = node.meta["val"].shape
    return len(shape) > 0 and equal(shape[-1], length)


def is_counting(node: Any, length: Any) -> bool:
    """Whether ``node``, [V], [1, V] or [B, V], holds 0, 1, 2, ... in each row."""
    while is_call_to(node, *SAME_ENTRIES):
        if not ends_in(node, length):
            return False
        node = node.args[0]
    if not is_call_to(node, prims.iota.default):
        return False
    counted = arguments_of(node)
    return (
        counted["start"] == 0
        and counted["step"] == 1
        and equal(number_of(counted["length"]), length)
    )


def bounds(size: Any, start: Any, end: Any) -> tuple[Any, Any] | None:
    """The entries that ``[start:end]`` takes of ``size``; None where that is not known."""
    found = []
    for bound, default in ((number_of(start), 0), (number_of(end), size)):
        if bound is None or (isinstance(bound, int) and bound >= sys.maxsize):
            bound = default if bound is None else size
        if at_most(bound, -1):
            bound = bound + size
            if not at_most(0, bound):
                return None
        elif not at_most(0, bound):
            return None
        if not at_most(bound, size):
            if not at_most(size, bound):
                return None
            bound = size
        found.append(bound)
    return found[0], found[1]


def taken(arguments: dict[str, Any], size: Any) -> tuple[Any, Any] | None:
    if "index" in arguments:
        index = number_of(arguments["index"])
        if index is None:
            return None
        index = index + size if at_most(index, -1) else index
        return index, index + 1
    if arguments["step"] != 1:
        return None
    return bounds(size, arguments["start"], arguments["end"])
