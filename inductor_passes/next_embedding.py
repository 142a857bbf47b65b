"""Recognise that the sampled token is looked up in the next step's embedding table.

    embedding = embedding(W1, token)            # or W1[token]; W1 [>= V, R], token [B]

The kernel that finishes a row then copies the table's row as well, which saves a launch a step.
``padding_idx`` and the like matter only for gradients.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_passes.base import same_shape, stream_of
from inductor_passes.calls import Call, arguments_of, is_call_to
from inductor_passes.storage import hoistable, storage_root, write_between

aten = torch.ops.aten


@dataclass(frozen=True)
class NextEmbedding:
    weight: Node
    nodes: list[Node]  # the lookups of the token in it
    hoist: list[Node]
    value: torch.Tensor  # fake, [B, R]


def _weight(lookup: Node, token: Node) -> Node | None:
    arguments = arguments_of(lookup)
    if is_call_to(lookup, aten.embedding.default):
        return arguments["weight"] if arguments["indices"] is token else None
    # A token is never negative, so indexing wraps nothing.
    return arguments["self"] if list(arguments["indices"]) == [token] else None


def find_next_embedding(call: Call, tokens: list[Node], base: Node) -> NextEmbedding | None:
    lookups = [
        (lookup, weight)
        for token in tokens
        for lookup in token.users
        if is_call_to(lookup, aten.embedding.default, aten.index.Tensor)
        and (weight := _weight(lookup, token)) is not None
    ]
    for first, weight in lookups:
        value = weight.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            continue
        logits = base.meta["val"]
        hoist = hoistable(weight, call.node)
        fits = (
            statically_known_true(value.shape[0] >= logits.shape[1])
            and statically_known_true(value.stride(1) == 1)
            and value.device == logits.device
            and stream_of(first) == stream_of(call.node)
        )
        root = storage_root(weight)
        written = {storage_root(written_base) for written_base in call.bases}
        if not fits or hoist is None or root in written:
            continue
        if write_between(call.node, first, {root}):
            continue
        nodes = [lookup for lookup, table in lookups if table is weight]
        embedding = first.meta.get("val")
        if not isinstance(embedding, torch.Tensor):
            continue
        if not same_shape(embedding.stride(), (value.shape[1], 1)):
            with value.fake_mode:  # type: ignore[attr-defined]
                embedding = value.new_empty(logits.shape[0], value.shape[1])
        return NextEmbedding(weight, nodes, hoist, embedding)
    return None
