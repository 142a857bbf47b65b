"""Rules of what moves entries between the order of the sort and that of the tokens, or masks them.

mask   = scatter(_, 1, ids, mask); masked = where(mask, -inf, logits)
values = where(mask, -inf, values); masked = scatter(_, 1, ids, values)
masked = scatter(full(-inf), 1, top_ids, top_values)
masked = scatter(logits, 1, ids[:, k:], -inf)
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import LeftAlone
from inductor_passes.calls import arguments_of
from inductor_passes.masking_masks import cut_of, mask_of
from inductor_passes.masking_operands import count_of
from inductor_passes.masking_reading import (
    Reading,
    constant_of,
    is_counting,
    last_dim,
    number_of,
)
from inductor_passes.masking_terms import (
    Ids,
    KeptValue,
    Logits,
    Mask,
    MassTest,
    Probs,
    Ranks,
    RankTest,
    TopIds,
    TopK,
    TopValues,
)
from inductor_passes.segments import at_most, equal
from inductor_passes.source_lines import described


def gather(node: Node, reading: Reading) -> Any:
    arguments = arguments_of(node)
    source, index = reading.meaning(arguments["self"]), reading.meaning(arguments["index"])
    if not last_dim(arguments["dim"]):
        return None
    in_order = Logits(in_place=False)
    if source == Logits(in_place=True):
        if isinstance(index, TopIds):
            return TopValues(index.k)
        return in_order if isinstance(index, Ids) and reading.is_whole(arguments["index"]) else None
    if isinstance(index, Ranks) and reading.is_whole(node):
        return _put_back(source)
    one = equal(node.meta["val"].shape[-1], 1)
    return KeptValue() if one and isinstance(source, Logits | Probs | TopValues) else None


def _put_back(term: Any) -> Any:
    """``term``, which stands in sorted order, with every entry at its token."""
    if isinstance(term, Logits) and not term.in_place and term.cuts:
        return Logits(True, term.cuts)
    if isinstance(term, Mask) and not term.in_place:
        return replace(term, in_place=True)
    return None


def scatter(node: Node, reading: Reading) -> Any:
    arguments = arguments_of(node)
    base, index = arguments["self"], arguments["index"]
    ids = reading.meaning(index)
    if not last_dim(arguments["dim"]) or not reading.is_whole(node):
        return None
    src = arguments["src"] if "src" in arguments else arguments["value"]
    term = reading.meaning(src)
    if isinstance(ids, Ids) and reading.is_whole(index):
        if isinstance(src, Node) and is_counting(src, reading.vocab) and reading.is_whole(src):
            return Ranks()
        return _put_back(term) if isinstance(src, Node) and reading.is_whole(src) else None
    kept = _kept_by(ids, reading)
    if kept is None:
        return None
    k, are_kept = kept
    if isinstance(ids, TopIds) and term == TopValues(k):
        _check_value(node, constant_of(base))
        return Logits(True, (TopK(k),))
    value, others = constant_of(src), constant_of(base)
    if value is None:
        return None
    if reading.meaning(base) == Logits(in_place=True):
        if are_kept:
            raise LeftAlone(f"{described(node)} masks the largest logits, not the others")
        _check_value(node, value)
        return Logits(True, (TopK(k),))
    if others is None or bool(value) == bool(others):
        return None
    count = count_of(k, reading.num_rows)
    if count is None:
        return None
    is_bool = node.meta["val"].dtype == torch.bool
    removes = bool(value) != are_kept
    return Mask(RankTest(count), removes, in_place=True, is_bool=is_bool)


def _kept_by(ids: Any, reading: Reading) -> tuple[Any, bool] | None:
    """(k, whether ``ids`` are those of the k largest logits or all others)."""
    if isinstance(ids, TopIds):
        found = ids.k, True
    elif not isinstance(ids, Ids):
        return None
    elif equal(ids.low, 0):
        found = (ids.high, True) if reading.descending else (reading.vocab - ids.high, False)
    elif equal(ids.high, reading.vocab):
        found = (ids.low, False) if reading.descending else (reading.vocab - ids.low, True)
    else:
        return None
    k, are_kept = found
    if not isinstance(k, Node):
        k = _static_int(k)
    if k is None:
        return None
    if not at_most(1, number_of(k)):
        raise LeftAlone(f"k = {number_of(k)} is not known to be 1 at least")
    return k, are_kept


def _static_int(number: Any) -> int | None:
    """``number`` as an int where it does not depend on a size."""
    if isinstance(number, torch.SymInt) and number.node.expr.is_Integer:
        return int(number.node.expr)
    return number if isinstance(number, int) else None


# The masking itself


def choose(node: Node, reading: Reading) -> Any:
    """``where``: the masking."""
    arguments = arguments_of(node)
    return _masked(node, arguments["condition"], arguments["self"], arguments["other"], reading)


def put(node: Node, reading: Reading) -> Any:
    """``x[mask] = value``"""
    arguments = arguments_of(node)
    indices = arguments["indices"]
    if len(indices) != 1 or indices[0] is None or arguments["accumulate"]:
        return None
    if indices[0].meta["val"].dtype != torch.bool or not reading.is_whole(indices[0]):
        return None
    return _masked(node, indices[0], arguments["values"], arguments["self"], reading)


def _masked(node: Node, condition: Any, yes: Any, no: Any, reading: Reading) -> Any:
    for x in (yes, no):
        if isinstance(reading.meaning(x), KeptValue):
            return KeptValue()
    mask = mask_of(condition, reading)
    if not isinstance(mask, Mask) or not mask.is_bool or not reading.is_whole(node):
        return None
    removed, kept = (yes, no) if mask.removes else (no, yes)
    value = constant_of(removed)
    if constant_of(kept) is not None:
        if value is not None:
            return None
        raise LeftAlone(f"{described(node)} masks the tokens that the test keeps, not the others")
    logits = reading.meaning(kept)
    if isinstance(logits, Probs):
        raise LeftAlone(f"{described(node)} masks probabilities, not logits")
    if not isinstance(logits, Logits):
        name = described(kept) if isinstance(kept, Node) else kept
        raise LeftAlone(f"{described(node)} masks {name}, which is not the tensor that was sorted")
    _check_value(node, value)
    if node.meta["val"].dtype != torch.float32:
        raise LeftAlone(f"{described(node)} makes {node.meta['val'].dtype} of the logits")
    if logits.in_place != mask.in_place:
        raise LeftAlone(
            f"{described(node)} masks logits in the order of the "
            f"{'tokens' if logits.in_place else 'sort'} by a mask in the other order"
        )
    test = mask.test
    if isinstance(test, MassTest) and test.mass.of.cuts != logits.cuts:
        raise LeftAlone(f"{described(node)} masks other logits than those whose mass is cumulated")
    return Logits(logits.in_place, (*logits.cuts, cut_of(mask, reading.descending)))


def _check_value(node: Node, value: Any) -> None:
    if value is None:
        raise LeftAlone(f"what {described(node)} writes where a token is removed is not a constant")
    if value != -torch.inf:
        raise LeftAlone(
            f"{described(node)} writes {value} where a token is removed, which differs from "
            "dspark::top_k_top_p where a logit is -inf already"
        )
