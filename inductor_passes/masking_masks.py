"""Rules of masks: tests of a mass or of a rank, and what people do to them before they mask.

mask = mass > p; mask[:, 1:] = mask[:, :-1]; mask[:, 0] = False       # descending
mask = mass <= 1 - p; mask[:, -1] = False                             # ascending
mask = arange(V) >= k
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import LeftAlone, same_shape
from inductor_passes.calls import arguments_of, is_call_to
from inductor_passes.masking_operands import complement_of, count_of, rate_of
from inductor_passes.masking_reading import (
    SAME_ENTRIES,
    Reading,
    Rule,
    constant_of,
    ends_in,
    is_counting,
    last_dim,
    taken,
)
from inductor_passes.masking_terms import (
    Constant,
    Cut,
    Ids,
    KeptValue,
    Logits,
    Mask,
    Mass,
    MassTest,
    Nucleus,
    Pair,
    Part,
    Probs,
    Ranks,
    RankTest,
    TopK,
    TopValues,
)
from inductor_passes.segments import equal
from inductor_passes.source_lines import described

aten = torch.ops.aten

COMPARES = tuple(
    getattr(getattr(aten, name), overload)
    for name in ("lt", "le", "gt", "ge")
    for overload in ("Scalar", "Tensor")
)
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def compare(node: Node, reading: Reading) -> Any:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    arguments = arguments_of(node)
    left, right = arguments["self"], arguments["other"]
    term = reading.meaning(left)
    other = reading.meaning(right)
    if other is not None and not isinstance(other, KeptValue):
        term, other, right, name = other, term, left, _MIRRORED[name]
    if isinstance(other, KeptValue) and isinstance(term, Logits | Probs):
        raise LeftAlone(
            f"{described(node)} compares with the smallest value that is kept, so all that tie "
            "with it stay, where dspark::top_k_top_p keeps exactly k, of equal ones the lowest ids"
        )
    if isinstance(term, Mass) and reading.is_whole(node):
        threshold = rate_of(right, reading.num_rows)
        if threshold is None or other is not None:
            return None
        removes = name in ("gt", "ge") if reading.descending else name in ("lt", "le")
        # What is kept where the mass is below the threshold is removed where it reaches it.
        includes_equal = (name in ("ge", "le")) == removes
        return Mask(MassTest(term, threshold, includes_equal), removes)
    if isinstance(term, Ranks):
        return _rank_mask(name, right, reading, in_place=True)
    return None


def _rank_mask(name: str, k: Any, reading: Reading, in_place: bool) -> Mask | None:
    count = count_of(k, reading.num_rows)
    if count is None or name not in ("ge", "lt") or not reading.descending:
        return None
    return Mask(RankTest(count), removes=name == "ge", in_place=in_place)


def mask_of(x: Any, reading: Reading) -> Any:
    """The meaning of a condition; ``arange(V) >= k`` is not computed from the sort."""
    term = reading.meaning(x)
    if term is not None:
        return term
    flips = False
    while is_call_to(x, *SAME_ENTRIES, aten.logical_not.default, aten.bitwise_not.default):
        flips ^= not is_call_to(x, *SAME_ENTRIES)
        if not ends_in(x, reading.vocab):
            return None
        x = x.args[0]
    if not (is_call_to(x, *COMPARES) and ends_in(x, reading.vocab)):
        return None
    name = x.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    arguments = arguments_of(x)
    left, right = arguments["self"], arguments["other"]
    if is_counting(right, reading.vocab):
        left, right, name = right, left, _MIRRORED[name]
    if not is_counting(left, reading.vocab):
        return None
    mask = _rank_mask(name, right, reading, in_place=False)
    return replace(mask, removes=mask.removes != flips) if mask is not None else None


def negate(node: Node, reading: Reading) -> Any:
    term = reading.meaning(node.args[0])
    if not isinstance(term, Mask) or not term.is_bool:
        return None
    return replace(term, removes=not term.removes)


def compare_with_zero(is_zero: bool) -> Rule:
    def rule(node: Node, reading: Reading) -> Any:
        arguments = arguments_of(node)
        term = reading.meaning(arguments["self"])
        if not isinstance(term, Mask) or constant_of(arguments["other"]) != 0:
            return None
        return replace(term, removes=term.removes != is_zero, is_bool=True)

    return rule


# Parts of masks, and writes into them


def take(node: Node, reading: Reading) -> Any:
    """``slice`` and ``select``."""
    arguments = arguments_of(node)
    term = reading.meaning(arguments["self"])
    if isinstance(term, Constant | Part | Pair) or term is None:
        return None
    if equal(arguments["dim"], 0) or equal(arguments["dim"], -2):
        return None
    if isinstance(term, KeptValue):
        return term
    size = arguments["self"].meta["val"].shape[-1]
    found = taken(arguments, size)
    if found is None:
        return None
    low, high = found
    if isinstance(term, Ids):
        return Ids(term.low + low, term.low + high)
    if isinstance(term, TopValues | Logits | Probs):
        return KeptValue() if equal(high - low, 1) else None
    return Part(term, low, high)


def copy(node: Node, reading: Reading) -> Any:
    """What a write puts into the view that is its first argument."""
    arguments = arguments_of(node)
    if constant_of(arguments["src"]) is not None:
        return Constant(constant_of(arguments["src"]))
    term = reading.meaning(arguments["src"])
    shapes = [arguments[name].meta["val"].shape for name in ("self", "src")]
    return term if isinstance(term, Part) and same_shape(*shapes) else None


def write(node: Node, reading: Reading) -> Any:
    """``slice_scatter`` and ``select_scatter`` into a mask: its first entry, or a shift."""
    arguments = arguments_of(node)
    mask, src = reading.meaning(arguments["self"]), reading.meaning(arguments["src"])
    if not isinstance(mask, Mask) or mask.in_place or arguments["dim"] not in (1, -1):
        return None
    found = taken(arguments, reading.vocab)
    if found is None:
        return None
    low, high = found
    if isinstance(src, Part):
        is_shift = equal(low, 1) and equal(high, reading.vocab) and _is_all_but_last(src, reading)
        if is_shift and src.whole == mask and not (mask.shifted or mask.guarded):
            return replace(mask, shifted=True)
        return None
    value = src.value if isinstance(src, Constant) else constant_of(arguments["src"])
    if value is None or bool(value) == mask.removes:
        return None
    first = (0, 1) if reading.descending else (reading.vocab - 1, reading.vocab)
    if equal(low, first[0]) and equal(high, first[1]):
        return replace(mask, guarded=True)
    if equal(low if reading.descending else high, 0 if reading.descending else reading.vocab):
        raise LeftAlone(
            f"{described(node)} keeps at least {high - low} tokens, where dspark::top_k_top_p "
            "keeps at least 1"
        )
    return None


def _is_all_but_last(part: Part, reading: Reading) -> bool:
    return equal(part.low, 0) and equal(part.high, reading.vocab - 1)


def _moved_right(part: Any, first: Any, reading: Reading) -> Any:
    """All but the last entries of a mask or mass behind the constant ``first``."""
    if not isinstance(part, Part) or not _is_all_but_last(part, reading) or first is None:
        return None
    whole = part.whole
    if isinstance(whole, Mass):
        return Mass(whole.of, before=True) if first == 0 and not whole.before else None
    if not isinstance(whole, Mask) or whole.shifted or whole.guarded or whole.in_place:
        return None
    if bool(first) == whole.removes:
        return None
    return replace(whole, shifted=True, guarded=True)


def cat(node: Node, reading: Reading) -> Any:
    arguments = arguments_of(node)
    tensors = arguments["tensors"]
    if not last_dim(arguments["dim"]) or len(tensors) != 2 or not reading.is_whole(node):
        return None
    return _moved_right(reading.meaning(tensors[1]), constant_of(tensors[0]), reading)


def pad(node: Node, reading: Reading) -> Any:
    arguments = arguments_of(node)
    if list(arguments["pad"]) != [1, 0]:
        return None
    return _moved_right(reading.meaning(arguments["self"]), arguments["value"], reading)


# What a finished mask removes


def cut_of(mask: Mask, descending: bool) -> Cut:
    """What the finished ``mask`` removes, or why the op removes something else."""
    test = mask.test
    if isinstance(test, RankTest):
        if mask.shifted:
            raise LeftAlone("the mask by rank is shifted")
        if not (mask.guarded or test.k.is_positive):
            raise LeftAlone(
                "a row whose k is 0 would lose all its tokens here, where dspark::top_k_top_p "
                "keeps them all; k.clamp(min=1) rules that out"
            )
        return TopK(test.k.source)
    p = test.threshold if descending else complement_of(test.threshold)
    before = test.mass.before or mask.shifted
    if test.mass.before and mask.shifted:
        raise LeftAlone("the mask is shifted though the mass does not count the token itself")
    if descending and not before:
        raise LeftAlone(
            "the token that reaches the mass p is removed, where dspark::top_k_top_p keeps it"
        )
    if not descending and before:
        raise LeftAlone("in ascending order the mass must count the token itself")
    if not mask.guarded:
        if mask.shifted:
            raise LeftAlone("the mask is shifted, but its first entry is not set to keep")
        # With p above 0 the test itself keeps the largest.
        least_is_kept = descending and not test.equal_is_removed
        if p.number is None and not least_is_kept:
            raise LeftAlone(
                "a row whose p is 0 would lose all its tokens here, where dspark::top_k_top_p "
                "keeps one; to set the largest token's entry of the mask to keep rules that out"
            )
        if p.number is not None and p.number <= 0 and not (least_is_kept and p.number == 0):
            raise LeftAlone(
                f"p = {p.number} removes all tokens, where dspark::top_k_top_p keeps one"
            )
    return Nucleus(p)
