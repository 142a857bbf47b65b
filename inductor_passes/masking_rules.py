"""What each op makes of what `masking_terms` says about its inputs: one rule an op.

A rule returns what its node means, or None if it has no part in a masking that is known; it raises
`LeftAlone` where the node is part of one that removes other tokens than the op does. Rules of masks
are in `masking_masks`, of the masking itself and of what moves entries in `masking_places`.
"""

import heapq
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from inductor_passes import masking_masks as masks
from inductor_passes import masking_places as places
from inductor_passes.base import same_shape
from inductor_passes.calls import arguments_of, is_call_to
from inductor_passes.masking_reading import (
    CONVERTS,
    SAME_ENTRIES,
    SOFTMAX_PARTS,
    Reading,
    Rule,
    last_dim,
)
from inductor_passes.masking_terms import (
    Ids,
    KeptValue,
    Logits,
    Mask,
    Mass,
    Pair,
    Probs,
    Ranks,
    TopIds,
    TopValues,
)

aten = torch.ops.aten


def read(sort: Node, logits: Node, of_probs: bool) -> Reading:
    """In the order of the graph, through what has a meaning and what may be a softmax's."""
    reading = Reading(sort, logits, of_probs)
    pending, seen = [sort], {sort}
    while pending:
        node = heapq.heappop(pending)
        if node is not sort:
            rule = RULES.get(node.target)  # type: ignore[arg-type]
            term = rule(node, reading) if rule is not None else None
            if isinstance(term, Logits) and term.in_place:
                reading.results[node] = term
                continue
            if term is not None:
                reading.terms[node] = term
            elif not is_call_to(node, *SOFTMAX_PARTS):
                continue
        for user in node.users:
            if user not in seen:
                seen.add(user)
                heapq.heappush(pending, user)
    return reading


def getitem(node: Node, reading: Reading) -> Any:
    pair = reading.meaning(node.args[0])
    if not isinstance(pair, Pair):
        return None
    return pair.indices if node.args[1] == 1 else pair.values


def same_entries(node: Node, reading: Reading) -> Any:
    source = node.args[0]
    term = reading.meaning(source)
    if isinstance(term, KeptValue):
        return term
    assert isinstance(source, Node)
    return term if same_shape(node.meta["val"].shape, source.meta["val"].shape) else None


def convert(node: Node, reading: Reading) -> Any:
    term = reading.meaning(node.args[0])
    dtype = node.meta["val"].dtype
    if isinstance(term, Mask):
        return replace(term, is_bool=True) if dtype == torch.bool else None
    if isinstance(term, Ids | Ranks | TopIds) and dtype == torch.int64:
        return term
    return term if isinstance(term, KeptValue) else None


def sort(node: Node, reading: Reading) -> Any:
    """The ranks of the tokens: the ids sorted."""
    arguments = arguments_of(node)
    if not isinstance(reading.meaning(arguments["self"]), Ids) or not reading.is_whole(
        node.args[0]
    ):
        return None
    if arguments["descending"] or not last_dim(arguments["dim"]):
        return None
    return Pair(None, Ranks())


def least(node: Node, reading: Reading) -> Any:
    """The smallest of the k largest logits."""
    arguments = arguments_of(node)
    if not isinstance(reading.meaning(arguments["self"]), TopValues):
        return None
    if not last_dim(arguments["dim"]):
        return None
    return KeptValue() if is_call_to(node, aten.amin.default) else Pair(KeptValue(), None)


# Probabilities and their mass


def softmax_of(div: Node) -> tuple[Node, list[Node]] | None:
    """The x of ``exp(x - amax(x)) / sum(exp(x - amax(x)))`` and the nodes in between."""
    exp, total = div.args[:2]
    if div.kwargs or not (is_call_to(exp, aten.exp.default) and isinstance(exp, Node)):
        return None
    if not (is_call_to(total, aten.sum.dim_IntList) and isinstance(total, Node)):
        return None
    summed = arguments_of(total)
    if summed["self"] is not exp or not last_dim(summed["dim"]) or not summed["keepdim"]:
        return None
    if summed["dtype"] not in (None, torch.float32):
        return None
    shifted = exp.args[0]
    if not (is_call_to(shifted, aten.sub.Tensor) and isinstance(shifted, Node)):
        return None
    difference = arguments_of(shifted)
    source, largest = difference["self"], difference["other"]
    if difference["alpha"] != 1 or not isinstance(source, Node):
        return None
    if not is_call_to(largest, aten.amax.default):
        return None
    maximum = arguments_of(largest)
    if maximum["self"] is not source or not last_dim(maximum["dim"]) or not maximum["keepdim"]:
        return None
    if source.meta["val"].dim() != 2:
        return None
    return source, [largest, shifted, exp, total]


def divide(node: Node, reading: Reading) -> Any:
    found = softmax_of(node)
    term = reading.meaning(found[0]) if found is not None else None
    if found is None or not isinstance(term, Logits) or term.in_place:
        return None
    reading.helpers += found[1]
    return Probs(term)


def cumsum(node: Node, reading: Reading) -> Any:
    arguments = arguments_of(node)
    term = reading.meaning(arguments["self"])
    if not isinstance(term, Probs) or not last_dim(arguments["dim"]):
        return None
    return Mass(term.of) if arguments["dtype"] in (None, torch.float32) else None


def subtract(node: Node, reading: Reading) -> Any:
    arguments = arguments_of(node)
    mass, probs = reading.meaning(arguments["self"]), reading.meaning(arguments["other"])
    if not isinstance(mass, Mass) or mass.before or arguments["alpha"] != 1:
        return None
    return Mass(mass.of, before=True) if probs == Probs(mass.of) else None


RULES: dict[Any, Rule] = {
    operator.getitem: getitem,
    **dict.fromkeys(SAME_ENTRIES, same_entries),
    **dict.fromkeys(CONVERTS, convert),
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.div.Tensor: divide,
    aten.cumsum.default: cumsum,
    aten.sub.Tensor: subtract,
    **dict.fromkeys(masks.COMPARES, masks.compare),
    aten.logical_not.default: masks.negate,
    aten.bitwise_not.default: masks.negate,
    aten.eq.Scalar: masks.compare_with_zero(True),
    aten.ne.Scalar: masks.compare_with_zero(False),
    aten.slice.Tensor: masks.take,
    aten.select.int: masks.take,
    aten.copy.default: masks.copy,
    aten.slice_scatter.default: masks.write,
    aten.select_scatter.default: masks.write,
    aten.cat.default: masks.cat,
    aten.constant_pad_nd.default: masks.pad,
    aten.gather.default: places.gather,
    aten.scatter.src: places.scatter,
    aten.scatter.value: places.scatter,
    aten.where.self: places.choose,
    aten.index_put.default: places.put,
    aten.amin.default: least,
    aten.min.dim: least,
}
