"""Fuse the masking of logits by a sort into dspark::top_k_top_p.

Why: a sort of [B, V] and about eight kernels over [B, V] become one op. Hook: post-grad pre, where
softmax and masked_fill are spelled in one way, but nothing is fused yet.

    Before                                                      After
    values, ids = sort(logits)                                  p = full([B], 0.9)
    probs  = softmax(values)    # amax, sub, exp, sum, div      masked = top_k_top_p(
    mass   = cumsum(probs, -1)                                      logits, None, p, -inf)
    remove = le(mass, 0.1)
    remove = slice_scatter(remove, False, 1, -1)
    remove = scatter(remove, 1, ids, remove)
    masked = where(remove, -inf, logits)

Only under ``numerics="lossless"``: the kept set is the user's, except that
- a float cumsum rounds, which matters where the mass of a prefix is that close to p. ``mass > p``
  counts as ``mass >= p``, and p = 1 keeps tokens whose probability rounds to 0;
- of tied tokens as many stay, those with the lowest ids;
- a row with NaN keeps its first NaN alone, and under p one with +inf the first of these, where a
  softmax that is all NaN keeps everything or nothing; a negative p keeps one token, a NaN p all.

Not matched: a compare of logits with the k-th largest or the last kept one, which keeps all that
tie with it; more than one token kept whatever p is; a row that may lose all its tokens; another
value than -inf; another dtype than float32, or not two dimensions; masked probabilities; logits
that stay sorted; another reader of what is in between. `masking_rules` has the spellings.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.base import Fusion, LeftAlone, readers, stream_of, value_of
from inductor_passes.calls import Call, arguments_of, is_call_to, is_getitem
from inductor_passes.masking_candidates import MASKINGS, SORTS, masks_what_it_sorts
from inductor_passes.masking_masks import COMPARES
from inductor_passes.masking_operands import Operands
from inductor_passes.masking_reading import CONVERTS, Reading, last_dim
from inductor_passes.masking_rules import read, softmax_of
from inductor_passes.masking_terms import (
    Cut,
    Ids,
    KeptValue,
    Logits,
    Mask,
    Mass,
    Probs,
    Rate,
    TopIds,
    TopK,
    TopValues,
)
from inductor_passes.padding_memory import dead_nodes, is_pure
from inductor_passes.segments import at_most, equal
from inductor_passes.source_lines import described
from inductor_passes.storage import storage_root, write_between
from inductor_passes.symbols import SizeReaders, find_size_readers, size_read

aten = torch.ops.aten

OP = torch.ops.dspark.top_k_top_p.default
# Kernels of the eager program; a softmax is one, its division.
_LAUNCHING = (
    *SORTS,
    *MASKINGS,
    *CONVERTS,
    *(aten.div.Tensor, aten.cumsum.default, aten.gather.default, aten.clone.default),
    *(aten.slice_scatter.default, aten.select_scatter.default),
    *(aten.cat.default, aten.constant_pad_nd.default),
    *(aten.logical_not.default, aten.bitwise_not.default, aten.eq.Scalar, aten.ne.Scalar),
    *COMPARES,
)


@dataclass(frozen=True)
class Masking:
    """One call of the op; None: that filter is off. ``k_is_ready``: it is an operand of the op."""

    k: Any
    p: Rate | None
    k_is_ready: bool = False


@dataclass(frozen=True)
class Plan:
    result: Node
    logits: Node
    maskings: list[Masking]
    num_rows: Any
    gone: list[Node]
    sizes: SizeReaders


class MaskingFusion(Fusion):
    name = "masking_fusion"
    lossless_only = "dspark::top_k_top_p"

    def candidates(self, graph: Graph) -> list[Node]:
        sorts = [node for op in SORTS for node in graph.find_nodes(op="call_function", target=op)]
        try:
            return [node for node in sorted(sorts) if masks_what_it_sorts(node)]
        except Exception:
            return sorted(sorts)  # `decide` meets the same error, where it is reported

    def decide(self, call: Call) -> Plan:
        logits, of_probs = _logits_of(call)
        reading = read(call.node, logits, of_probs)
        result = _only_result(reading)
        gone = [*reading.terms, *reading.helpers, result]
        maskings = _maskings(reading.results[result].cuts)
        earlier = _masking_before(logits, gone) if maskings[0].k is None else None
        if earlier is not None:
            gone.append(logits)
            logits, k = earlier
            maskings[0] = Masking(k, maskings[0].p, k_is_ready=True)
        for node in gone:
            if stream_of(node) != stream_of(result):
                raise LeftAlone(
                    f"{described(node)} runs on another stream than {described(result)}"
                )
        sources = [logits]
        for masking in maskings:
            for source in (masking.k, masking.p.source if masking.p is not None else None):
                if isinstance(source, Node) and isinstance(source.meta["val"], torch.Tensor):
                    sources.append(source)
        for source in sources[1:]:
            _check_device(source, logits)
        write = write_between(min(gone), result, {storage_root(source) for source in sources})
        if write is not None:
            raise LeftAlone(f"{described(write)} writes into what the masking reads")
        num_rows = size_read(logits.meta["val"].shape[0], [logits])
        if num_rows is None:
            raise LeftAlone("how many rows the logits have is not known as a size of theirs")
        sizes = find_size_readers(gone, [logits])
        return Plan(result, logits, maskings, num_rows, gone, sizes)

    def edit(self, plan: Plan) -> int:
        result = plan.result
        operands = Operands(result, plan.logits, plan.num_rows)
        masked = plan.logits
        for masking in plan.maskings:
            k = masking.k if masking.k_is_ready else operands.count(masking.k)
            p = operands.rate(masking.p)
            masked = operands.call(OP, masked, k, p, -torch.inf)
            operands.launches += 1
        # A write in place becomes a copy of what the op returns.
        copies = sum(is_call_to(user, aten.copy_.default) for user in result.users)
        result.replace_all_uses_with(masked)
        erased = _erase_unread_above([*plan.gone, *plan.sizes.replace(masked)])
        return sum(map(_is_launch, erased)) - operands.launches - copies


def _logits_of(call: Call) -> tuple[Node, bool]:
    """(the logits, whether they are sorted as their softmax)."""
    source, dim = call.arguments["self"], call.arguments["dim"]
    value = value_of(source, "what is sorted")
    of_probs = is_call_to(source, aten.div.Tensor) and softmax_of(source) is not None
    if of_probs:
        source = softmax_of(source)[0]  # type: ignore[index]
    while is_call_to(source, aten.clone.default):
        source = source.args[0]
    value = value_of(source, "the logits")
    if value.dtype != torch.float32:
        raise LeftAlone(f"the logits ({described(source)}) are {value.dtype}, not torch.float32")
    if value.dim() != 2:
        raise LeftAlone(f"the logits ({described(source)}) have {value.dim()} dimensions, not 2")
    if not last_dim(dim):
        raise LeftAlone(f"{described(call.node)} runs over dim {dim}, not over the vocabulary")
    if value.device.type not in ("cpu", "cuda"):
        raise LeftAlone(f"the logits are on {value.device}")
    if not at_most(1, value.shape[1]):
        raise LeftAlone(f"the vocabulary, of size {value.shape[1]}, is not known to have a token")
    if not equal(value.shape[1], 1) and not equal(value.stride(1), 1):
        raise LeftAlone(
            f"the logits ({described(source)}) are not contiguous in the vocabulary dimension"
        )
    if not call.arguments.get("largest", True):
        raise LeftAlone(f"{described(call.node)} takes the smallest")
    return source, of_probs


_LABELS = {
    Ids: "the sorted ids",
    KeptValue: "the smallest kept value",
    Logits: "the sorted logits",
    Mask: "the mask",
    Mass: "the cumulated mass",
    Probs: "the sorted probabilities",
    TopIds: "the ids of the largest",
    TopValues: "the largest logits",
}


def _only_result(reading: Reading) -> Node:
    """The masked logits, where nobody else reads what they are made of."""
    known = {*reading.terms, *reading.helpers, *reading.results}
    dead = dead_nodes(reading.sort.graph)
    others = [
        (reader, node)
        for node in [*reading.terms, *reading.helpers]
        for reader in readers(node)
        if reader not in known and reader not in dead
    ]
    if others:
        reader, node = min(others)
        what = _LABELS.get(type(reading.terms.get(node)), "an intermediate result")
        if reading.results:
            raise LeftAlone(f"{described(reader)} reads {what} ({described(node)}) as well")
        raise LeftAlone(
            f"{described(reader)}, which reads {what}, is no step of a masking that "
            "dspark::top_k_top_p does"
        )
    if not reading.results:
        raise LeftAlone("what is sorted is not put back as masked logits")
    if len(reading.results) > 1:
        names = " and ".join(map(described, reading.results))
        raise LeftAlone(f"several masked logits come from one sort: {names}")
    return next(iter(reading.results))


def _maskings(cuts: tuple[Cut, ...]) -> list[Masking]:
    """As few calls of the op as do these one after the other."""
    maskings: list[Masking] = []
    for cut in cuts:
        if isinstance(cut, TopK):
            maskings.append(Masking(cut.k, None))
        elif maskings and maskings[-1].p is None:
            maskings[-1] = Masking(maskings[-1].k, cut.p)
        else:
            maskings.append(Masking(None, cut.p))
    return maskings


def _masking_before(logits: Node, gone: list[Node]) -> tuple[Node, Node] | None:
    """(logits, k) of a call of the op that only keeps the k largest, read by ``gone`` alone."""
    if not is_call_to(logits, OP) or any(user not in gone for user in readers(logits)):
        return None
    arguments = arguments_of(logits)
    if arguments["p"] is not None or arguments["mask_value"] != -torch.inf:
        return None
    return arguments["logits"], arguments["k"]


def _check_device(source: Node, logits: Node) -> None:
    value, device = source.meta["val"], logits.meta["val"].device
    if value.device != device and not (value.dim() == 0 and value.is_floating_point()):
        raise LeftAlone(f"{described(source)} is on {value.device}, the logits are on {device}")


def _erase_unread_above(nodes: list[Node]) -> list[Node]:
    """Erase ``nodes`` and what only they have read: constants, indices, 1 - p."""
    erased = []
    pending = sorted(set(nodes))
    while pending:
        node = pending.pop()
        if node.users or node in erased or not (is_pure(node) or is_getitem(node) or node in nodes):
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
        erased.append(node)
    return erased


def _is_launch(node: Node) -> bool:
    """Whether ``node`` is a kernel of the eager program."""
    return is_call_to(node, *_LAUNCHING) or (
        is_call_to(node, aten.full.default) and node.meta["val"].dim() > 0
    )
