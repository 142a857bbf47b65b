"""Where a sampler stays unfused, keep the adds above it apart from their GEMMs.

Why: Inductor turns ``add(base, mm(...))`` into ``addmm``. That may round once where eager rounds
twice, and it drops ``alpha`` (seen on torch 2.13), so the cache would hold other bits than eager's,
or other logits. The fused op needs no such care: it does the add itself.

    Before                          After
    bias   = mm(embedding, W2)      bias   = mm(embedding, W2)
    logits = add(base, bias)        logits = add(base, squeeze(unsqueeze(bias, 0), 0))

The two views cost nothing and match no pattern of Inductor's. Not a rewrite of a site, so nothing
is reported.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.block_choice import BLOCK_OPS
from inductor_passes.calls import Call, find_call_nodes, is_call_to

aten = torch.ops.aten

_FURTHEST = 64  # nodes looked at above a sampler


def keep_adds_apart(graph: Graph) -> None:
    for node in find_call_nodes(graph, BLOCK_OPS):
        call = Call.of(node)
        if call is not None:
            for add in _adds_above(call.arguments["logits"]):
                for gemm in [x for x in add.all_input_nodes if is_call_to(x, aten.mm.default)]:
                    add.replace_input_with(gemm, _same_through_views(gemm, add))


def _adds_above(logits: Any) -> list[Node]:
    """The adds that ``logits`` are computed from without a GEMM in between."""
    above = [logits] if isinstance(logits, Node) else []
    for node in above:
        if not is_call_to(node, aten.mm.default) and len(above) < _FURTHEST:
            above += [source for source in node.all_input_nodes if source not in above]
    return [node for node in above if is_call_to(node, aten.add.Tensor)]


def _same_through_views(gemm: Node, reader: Node) -> Node:
    graph, value = gemm.graph, gemm.meta["val"]
    handed_on = {key: item for key, item in reader.meta.items() if key != "val"}
    with graph.inserting_before(reader):
        inner = graph.call_function(aten.unsqueeze.default, (gemm, 0))
        outer = graph.call_function(aten.squeeze.dim, (inner, 0))
    with value.fake_mode:
        inner.meta.update(handed_on, val=value.unsqueeze(0))
        outer.meta.update(handed_on, val=inner.meta["val"].squeeze(0))
    return outer
