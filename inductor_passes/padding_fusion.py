"""Fuse the fill of a padding buffer into dspark::prepare_positions_padding.

Why: two fills beside the positions kernel are two launches more; the op writes the padding in its
own. Hook: post-grad pre, where a fill is a chain of functional scatters and the op is wrapped.

    Before                                                  After
    head  = full([n], False)                                positions', seq_lens', is_padding' =
    m_1   = slice_scatter(is_padding, head, 0, 0, n)          prepare_positions_padding(
    tail  = full([16 - n], True)                              idx_mapping, query_start_loc,
    m_2   = slice_scatter(m_1, tail, 0, n)                    num_computed_tokens, positions,
    positions', seq_lens' = prepare_positions(                seq_lens, is_padding=is_padding,
        idx_mapping, ..., positions, seq_lens)                num_tokens=n)
    copy_(is_padding, m_2)                                  copy_(is_padding, is_padding')

The fill may stand before or after the op and be spelled in any way that `padding_fill` proves. A
call of the op in a graph that fills no buffer is no candidate. Not matched: other contents, a part
of a buffer under the first version of functionalization, several buffers, an argument that depends
on the fill, a buffer that is read at a moment when the op would have written it too early or late.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.arithmetic import Number, emit_number, find_number
from inductor_passes.base import Fusion, LeftAlone, erase_unread, stream_of
from inductor_passes.calls import (
    V1,
    Call,
    Mutated,
    arguments_of,
    emit,
    find_call_nodes,
    is_call_to,
)
from inductor_passes.contents import COMPUTED
from inductor_passes.padding_fill import SCATTERS, WRITES, Fill, Mask, find_fills, find_mask
from inductor_passes.padding_memory import (
    check_memory,
    check_readers,
    dead_nodes,
    is_redirected,
    unread_without,
)
from inductor_passes.segments import at_least, equal
from inductor_passes.source_lines import described

aten = torch.ops.aten

_CONSTANTS = (aten.full.default, aten.expand.default)


@dataclass(frozen=True)
class Plan:
    call: Call
    fill: Fill
    mask: Mask
    num_tokens: Number
    part: tuple[Number, Number] | None  # of the buffer, from and up to where
    gone: set[Node]
    launches: int


class PaddingFusion(Fusion):
    name = "padding_fusion"

    def candidates(self, graph: Graph) -> list[Node]:
        calls = find_call_nodes(graph, [torch.ops.dspark.prepare_positions.default])
        try:
            return calls if calls and find_fills(graph) else []
        except Exception:
            return calls  # `decide` meets the same error, where it is reported

    def decide(self, call: Call) -> Plan:
        if not call.is_functional:
            raise LeftAlone("the op writes in place: the graph is not functional here")
        plans, reasons = [], []
        for fill in find_fills(call.node.graph):
            try:
                plans.append(_plan(call, fill))
            except LeftAlone as reason:
                reasons.append(str(reason))
        if not plans:
            raise LeftAlone(
                "; ".join(reasons) or "another prepare_positions already writes the padding"
            )
        # Beside a buffer that is False and then True, one that is all the same is no padding.
        plans = [plan for plan in plans if not plan.mask.is_constant] or plans
        if len(plans) > 1:
            names = ", ".join(plan.fill.name for plan in plans)
            raise LeftAlone(f"several buffers are filled as padding is: {names}")
        return plans[0]

    def edit(self, plan: Plan) -> int:
        call, fill = plan.call, plan.fill
        assert fill.buffer is not None
        view: dict[str, Any] = {}
        if plan.part is not None:
            start, end = (emit_number(number, call.node) for number in plan.part)
            view = {"_slice_dim": 0, "_slice_start": start, "_slice_end": end}
        arguments = {**call.arguments, "num_tokens": emit_number(plan.num_tokens, call.node)}
        mutated = {**call.mutated, "is_padding": Mutated(len(call.bases), view)}
        op = torch.ops.dspark.prepare_positions_padding.default
        new = emit(call, op, arguments, mutated, [*call.bases, fill.buffer], [None])

        gone = [*plan.gone, call.node, *new.returns, *call.results(0)]
        for index in range(len(call.bases)):
            for old in call.new_bases(index):
                old.replace_all_uses_with(new.new_bases[index])
                gone.append(old)
        fill.value.replace_all_uses_with(
            new.new_bases[-1], delete_user_cb=lambda user: is_redirected(user, call, fill)
        )
        erase_unread(gone)
        return plan.launches


def _plan(call: Call, fill: Fill) -> Plan:
    mask = find_mask(fill)
    check_memory(call, fill, mask)
    num_tokens = _number(at_least(mask.boundary - mask.start, 0), call, fill)
    part = None
    if not mask.is_whole:
        if call.form == V1:
            raise LeftAlone(
                f"{fill.name} is filled in part, and the first version of functionalization can't "
                "pass a part without a copy"
            )
        part = _number(mask.start, call, fill), _number(mask.end, call, fill)
    dead = dead_nodes(call.node.graph)
    gone = unread_without(call, fill, mask.known, dead)
    for node in sorted(gone):
        if stream_of(node) != stream_of(call.node):
            raise LeftAlone(f"{described(node)} runs on another stream than the op")
        if node.meta.get("unbacked_bindings"):
            raise LeftAlone(f"how much {described(node)} takes is only known when the graph runs")
    check_readers(call, fill, gone | dead)
    return Plan(call, fill, mask, num_tokens, part, gone, _launches(fill, mask, gone))


def _number(number: Any, call: Call, fill: Fill) -> Number:
    found = find_number(number, call.node)
    if found is None:
        raise LeftAlone(f"where the padding in {fill.name} starts is not known before the op")
    return found


def _launches(fill: Fill, mask: Mask, gone: set[Node]) -> int:
    """How many launches of the eager program are gone at least.

    A write is, also where a kernel that reads the buffer before the op computes what was written.
    """
    first = fill.value
    while is_call_to(first, *SCATTERS):
        first = arguments_of(first)["self"]
    launches = 0
    for node in mask.known:
        if equal(node.meta["val"].numel(), 0):
            continue
        if is_call_to(node, *SCATTERS):
            # One that takes a scatter puts a view back where it belongs; what computes is counted.
            source = arguments_of(node)["src"]
            is_empty = equal(source.meta["val"].numel(), 0)
            launches += not is_empty and not is_call_to(source, *SCATTERS, *COMPUTED)
        elif is_call_to(node, *COMPUTED):
            # If it is still needed then the write of it is gone at least.
            launches += node in gone or node is fill.value
        elif is_call_to(node, *_CONSTANTS, aten.copy.default) and node.meta["val"].dim() == 1:
            taken = [user for user in node.users if is_call_to(user, *WRITES)]
            is_source = any(arguments_of(user)["src"] is node for user in taken)
            launches += node is first or (node in gone and not is_source)
    return launches
