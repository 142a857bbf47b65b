"""What each op makes of what `masking_terms` says about its inputs: one rule an op.

A rule returns what its node means, or None if it has no part in a masking that is known; it raises
`LeftAlone` where the node is part of one that removes other tokens than the op does.
"""

import heapq
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import LeftAlone, same_shape
from inductor_passes.calls import arguments_of, is_call_to
from inductor_passes.masking_terms import (
    CONVERTS,
    SAME_ENTRIES,
    SOFTMAX_PARTS,
    Constant,
    Ids,
    KeptValue,
    Logits,
    Mask,
    Mass,
    MassTest,
    Pair,
    Part,
    Probs,
    Ranks,
    RankTest,
    TopIds,
    TopK,
    TopValues,
    bounds,
    constant_of,
    count_of,
    cut_of,
    ends_in,
    is_counting,
    last_dim,
    number_of,
    rate_of,
    softmax_of,
    static_int,
)
from inductor_passes.segments import at_most, equal
from inductor_passes.source_lines import described

aten = torch.ops.aten


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
        self._follow()

    def _follow(self) -> None:
        """In the order of the graph, through what has a meaning and what may be a softmax's."""
        pending, seen = [self.sort], {self.sort}
        while pending:
            node = heapq.heappop(pending)
            if node is not self.sort:
                rule = RULES.get(node.target)  # type: ignore[arg-type]
                term = rule(node, self) if rule is not None else None
                if isinstance(term, Logits) and term.in_place:
                    self.results[node] = term
                    continue
                if term is not None:
                    self.terms[node] = term
                elif not is_call_to(node, *SOFTMAX_PARTS):
                    continue
            for user in node.users:
                if user not in seen:
                    seen.add(user)
                    heapq.heappush(pending, user)

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


# Probabilities and their mass


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


# Masks


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


def _mask_of(x: Any, reading: Reading) -> Any:
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
    taken = _taken(arguments, size)
    if taken is None:
        return None
    low, high = taken
    if isinstance(term, Ids):
        return Ids(term.low + low, term.low + high)
    if isinstance(term, TopValues | Logits | Probs):
        return KeptValue() if equal(high - low, 1) else None
    return Part(term, low, high)


def _taken(arguments: dict[str, Any], size: Any) -> tuple[Any, Any] | None:
    if "index" in arguments:
        index = number_of(arguments["index"])
        if index is None:
            return None
        index = index + size if at_most(index, -1) else index
        return index, index + 1
    if arguments["step"] != 1:
        return None
    return bounds(size, arguments["start"], arguments["end"])


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
    taken = _taken(arguments, reading.vocab)
    if taken is None:
        return None
    low, high = taken
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


# Between the order and the tokens, and the masking itself


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
        k = static_int(k)
    if k is None:
        return None
    if not at_most(1, number_of(k)):
        raise LeftAlone(f"k = {number_of(k)} is not known to be 1 at least")
    return k, are_kept


def _check_value(node: Node, value: Any) -> None:
    if value is None:
        raise LeftAlone(f"what {described(node)} writes where a token is removed is not a constant")
    if value != -torch.inf:
        raise LeftAlone(
            f"{described(node)} writes {value} where a token is removed, which differs from "
            "dspark::top_k_top_p where a logit is -inf already"
        )


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
    mask = _mask_of(condition, reading)
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


def least(node: Node, reading: Reading) -> Any:
    """The smallest of the k largest logits."""
    arguments = arguments_of(node)
    if not isinstance(reading.meaning(arguments["self"]), TopValues):
        return None
    if not last_dim(arguments["dim"]):
        return None
    return KeptValue() if is_call_to(node, aten.amin.default) else Pair(KeptValue(), None)


RULES: dict[Any, Rule] = {
    operator.getitem: getitem,
    **dict.fromkeys(SAME_ENTRIES, same_entries),
    **dict.fromkeys(CONVERTS, convert),
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.div.Tensor: divide,
    aten.cumsum.default: cumsum,
    aten.sub.Tensor: subtract,
    **dict.fromkeys(COMPARES, compare),
    aten.logical_not.default: negate,
    aten.bitwise_not.default: negate,
    aten.eq.Scalar: compare_with_zero(True),
    aten.ne.Scalar: compare_with_zero(False),
    aten.slice.Tensor: take,
    aten.select.int: take,
    aten.copy.default: copy,
    aten.slice_scatter.default: write,
    aten.select_scatter.default: write,
    aten.cat.default: cat,
    aten.constant_pad_nd.default: pad,
    aten.gather.default: gather,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.where.self: choose,
    aten.index_put.default: put,
    aten.amin.default: least,
    aten.min.dim: least,
}
