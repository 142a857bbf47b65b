"""What the nodes between a sort and the masked logits mean, each said by one small record.

    values, ids = sort(logits)            Logits(in_place=False)  Ids(0, V)
    probs       = softmax(values)         Probs(of the values)
    mass        = cumsum(probs)           Mass(of the values)
    mask        = mass > p                Mask(MassTest(mass, p))
    mask'       = scatter(_, ids, mask)   Mask(MassTest(mass, p), in_place=True)
    masked      = where(mask', -inf, x)   Logits(cuts=(Nucleus(p),), in_place=True)

``in_place``: entry i is token i; otherwise it is the i-th of the order that the sort made.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import LeftAlone, same_shape
from inductor_passes.calls import arguments_of, is_call_to
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


@dataclass(frozen=True)
class Rate:
    """The p of each row: a number, a tensor of one entry or one for each row, or 1 minus that."""

    source: float | Node
    complement: bool = False

    @property
    def number(self) -> float | None:
        if isinstance(self.source, Node):
            return None
        return 1 - self.source if self.complement else self.source


@dataclass(frozen=True)
class Count:
    """The k of each row: a number, or a tensor as in `Rate`."""

    source: Any  # int, SymInt or Node
    is_positive: bool


@dataclass(frozen=True)
class Nucleus:
    p: Rate


@dataclass(frozen=True)
class TopK:
    k: Any  # as Count's


Cut = Nucleus | TopK


@dataclass(frozen=True)
class Logits:
    """[B, V], -inf where ``cuts`` removed a token."""

    in_place: bool
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Probs:
    of: Logits


@dataclass(frozen=True)
class Mass:
    """Of all entries up to each; ``before``: without itself."""

    of: Logits
    before: bool = False


@dataclass(frozen=True)
class Ids:
    """Token ids at places [low, high) of the order."""

    low: Any
    high: Any


@dataclass(frozen=True)
class Ranks:
    """The place of each token in the order."""


@dataclass(frozen=True)
class TopIds:
    k: Any


@dataclass(frozen=True)
class TopValues:
    k: Any


@dataclass(frozen=True)
class KeptValue:
    """[B] or [B, 1]: one of the largest logits of each row."""


@dataclass(frozen=True)
class Pair:
    """What a sort or topk returns."""

    values: Any
    indices: Any


@dataclass(frozen=True)
class MassTest:
    mass: Mass
    threshold: Rate
    equal_is_removed: bool


@dataclass(frozen=True)
class RankTest:
    k: Count


@dataclass(frozen=True)
class Mask:
    """``removes``: what True means. ``shifted``: entry i + 1 has the outcome of the test at i.

    ``guarded``: the first of the descending order is kept whatever the test says.
    """

    test: MassTest | RankTest
    removes: bool
    in_place: bool = False
    shifted: bool = False
    guarded: bool = False
    is_bool: bool = True


@dataclass(frozen=True)
class Part:
    """Entries [low, high) of ``whole`` in the vocabulary dimension."""

    whole: Any
    low: Any
    high: Any


@dataclass(frozen=True)
class Constant:
    value: Any


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


def static_int(number: Any) -> int | None:
    """``number`` as an int where it does not depend on a size."""
    if isinstance(number, torch.SymInt) and number.node.expr.is_Integer:
        return int(number.node.expr)
    return number if isinstance(number, int) else None


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


def one_a_row(node: Node, num_rows: Any) -> bool:
    """Whether ``node`` broadcasts against [B, V] as one entry, or as one for each row."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return equal(value.numel(), 1) or same_shape(value.shape, (num_rows, 1))


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


def rate_of(threshold: Any, num_rows: Any) -> Rate | None:
    """``threshold``, a number or a tensor, as one for each row."""
    number = number_of(threshold)
    if isinstance(number, int | float):
        return Rate(float(number))
    if isinstance(threshold, Node) and one_a_row(threshold, num_rows):
        return Rate(threshold)
    return None


def without_views(node: Node) -> Node:
    """Where the entries of ``node``, in their order, come from."""
    count = node.meta["val"].numel()
    while is_call_to(node, *SAME_ENTRIES):
        source = node.args[0]
        if not isinstance(source, Node) or not equal(source.meta["val"].numel(), count):
            break
        node = source
    return node


def complement_of(rate: Rate) -> Rate:
    """1 minus ``rate``, without a subtraction where ``rate`` is itself 1 minus a tensor."""
    node = rate.source
    if not isinstance(node, Node):
        return Rate(1 - node)
    count = node.meta["val"].numel()
    node = without_views(node)
    if is_call_to(node, aten.sub.Tensor, aten.rsub.Scalar):
        arguments = arguments_of(node)  # type: ignore[arg-type]
        one, other = arguments["self"], arguments["other"]
        if is_call_to(node, aten.rsub.Scalar):
            one, other = other, one
        if constant_of(one) == 1 and arguments["alpha"] == 1 and isinstance(other, Node):
            value = other.meta["val"]
            # A narrower float rounds 1 - p too far.
            is_fine = value.dtype in (torch.float32, torch.float64)
            if is_fine and equal(value.numel(), count):
                return Rate(other)
    return Rate(rate.source, complement=True)


def count_of(k: Any, num_rows: Any) -> Count | None:
    """``k`` as one for each row; whether every one is known to be 1 at least."""
    number = number_of(k)
    if number is not None and not isinstance(number, float):
        return Count(k, at_most(1, number))
    if not isinstance(k, Node) or not one_a_row(k, num_rows):
        return None
    if k.meta["val"].is_floating_point() or k.meta["val"].dtype == torch.bool:
        return None
    return Count(k, _is_positive(k))


def _is_positive(node: Any) -> bool:
    while is_call_to(node, *SAME_ENTRIES, *CONVERTS, aten.clamp_max.default):
        if is_call_to(node, *CONVERTS) and node.meta["val"].dtype != torch.int64:
            return False  # a narrower one wraps
        most = number_of(node.args[1]) if is_call_to(node, aten.clamp_max.default) else 1
        if most is None or not at_most(1, most):
            return False
        node = node.args[0]
    if is_call_to(node, aten.clamp_min.default, aten.clamp.default):
        arguments = arguments_of(node)
        least, most = arguments["min"], number_of(arguments.get("max"))
        if arguments.get("max") is not None and (most is None or not at_most(1, most)):
            return False
        return type(least) is int and least >= 1
    if is_call_to(node, aten.maximum.default):
        return any(type(c) is int and c >= 1 for c in map(constant_of, node.args))
    return False


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
