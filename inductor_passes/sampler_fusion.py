"""Fuse add, noise, argmax, gather and what surrounds them into dspark::gumbel_sample.

Why: nine launches of a draft step become the bias GEMM and two; the biased logits are written once
and never read again. Hook: post-grad pre, as later the add has become ``addmm``, which rounds once.

    Before                                                  After
    logits  = add(base, bias)                               token, embedding, cache', tokens' =
    pos'    = sub(pos, 1)                                     gumbel_sample_embed_cache_draft(
    max, id, cache' = gumbel_block_argmax_cache(              base, idx_mapping, temperature,
        logits, idx_mapping, temperature, seeds, pos',        seeds, pos, bias=bias,
        logits_cache=cache)                                   logits_cache=cache,
    best    = argmax(max, -1, True)                           draft_tokens=tokens[:, i],
    token   = reshape(gather(id, -1, best), [-1])             embed_weight=W1,
    tokens' = select_scatter(tokens, token, 1, i)             pos_offset=-1)
    embedding = embedding(W1, token)

The last two and the ``sub`` join where they are there. Not matched: another reader of the sum or of
the block maxima, alpha, scalars, anything between add and sampler, an operand that shares memory
with the cache; `biased_logits` and `block_choice` have the guards.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, Node

from inductor_passes.base import Fusion, LeftAlone, erase_unread, readers, stream_of, value_of
from inductor_passes.biased_logits import BiasedLogits, find_biased_logits
from inductor_passes.block_choice import BLOCK_OPS, Choice, find_choice
from inductor_passes.calls import V1, Call, Mutated, arguments_of, emit, find_call_nodes, is_call_to
from inductor_passes.column_write import ColumnWrite, find_column_write
from inductor_passes.next_embedding import NextEmbedding, find_next_embedding
from inductor_passes.source_lines import described
from inductor_passes.storage import storage_root, write_between
from inductor_passes.symbols import SizeReaders, emit_sizes, find_size_readers

aten = torch.ops.aten


@dataclass(frozen=True)
class Plan:
    call: Call
    choice: Choice
    logits: BiasedLogits
    token: torch.Tensor  # fake
    pos: Node
    pos_offset: Any
    shift: list[Node]  # the adds of a number to the position that the op takes over
    sizes: SizeReaders
    write: ColumnWrite | None
    embedding: NextEmbedding | None


class SamplerFusion(Fusion):
    name = "sampler_fusion"

    def candidates(self, graph: Graph) -> list[Node]:
        return find_call_nodes(graph, BLOCK_OPS)

    def decide(self, call: Call) -> Plan:
        if not call.is_functional:
            raise LeftAlone(
                "the op writes into its cache in place: the graph is not functional here"
            )
        logits = find_biased_logits(call)
        choice = find_choice(call, block_max_readers=False)
        pos, pos_offset, shift = _shifted_position(call)
        _check_memory(call, logits, pos, shift)
        tokens = choice.token_nodes()
        embedding = find_next_embedding(call, tokens, logits.base)
        arguments = [*call.node.all_input_nodes, logits.base, logits.bias, pos]
        if embedding is not None:
            arguments.append(embedding.weight)
        write = None
        if call.form != V1 and inductor_config.enable_auto_functionalized_v2:
            write = find_column_write(call, tokens, arguments)
        for base in call.bases:
            value_of(base, "the logits cache")
        token = _token_value(logits.base, tokens)
        erased = [*logits.nodes, *shift, *choice.nodes, choice.gather, *tokens]
        sizes = find_size_readers(erased, [logits.base, logits.bias, pos])
        return Plan(call, choice, logits, token, pos, pos_offset, shift, sizes, write, embedding)

    def edit(self, plan: Plan) -> int:
        call, embedding, write = plan.call, plan.embedding, plan.write
        for part in (embedding, write):
            for node in part.hoist if part is not None else ():
                if call.node < node:
                    call.node.prepend(node)

        name = "gumbel_sample"
        base, bias = plan.logits.base, plan.logits.bias
        arguments = {**call.arguments, "logits": base, "bias": bias}
        arguments.update(pos=plan.pos, pos_offset=plan.pos_offset)
        returns = [plan.token]
        if embedding is not None:
            name += "_embed"
            arguments["embed_weight"] = embedding.weight
            returns.append(embedding.value)
        if call.mutated:
            name += "_cache"
        mutated, bases = dict(call.mutated), list(call.bases)
        if write is not None:
            name += "_draft"
            view = {key: emit_sizes(value, call.node) for key, value in write.view.items()}
            mutated["draft_tokens"] = Mutated(len(bases), view)
            bases.append(write.base)
        op = getattr(torch.ops.dspark, name).default
        written = write.value if write is not None else None
        new = emit(call, op, arguments, mutated, bases, returns, written)

        gone = [*plan.logits.nodes, *plan.shift, call.node, *plan.sizes.replace(new.node)]
        for index in range(len(call.bases)):
            for old in call.new_bases(index):
                old.replace_all_uses_with(new.new_bases[index])
                gone.append(old)
        if write is not None:
            gone += write.redirect(new.new_bases[-1])
        if embedding is not None:
            for node in embedding.nodes:
                node.replace_all_uses_with(new.returns[1])
            gone += embedding.nodes
        launches = len(plan.logits.nodes) + len(plan.shift) + plan.choice.launches
        launches += (write.launches if write else 0) + (len(embedding.nodes) if embedding else 0)
        erase_unread(gone + plan.choice.replace(new.returns[0]))
        return launches - 1  # the block op was one launch, the sampler is two


def _token_value(base: Node, tokens: list[Node]) -> torch.Tensor:
    """The fake value of the token, i64 [B]."""
    value = value_of(base, "the base logits")
    if tokens and tokens[0].meta["val"].stride() == (1,):
        return tokens[0].meta["val"]
    with value.fake_mode:
        return value.new_empty(value.shape[0], dtype=torch.int64)


def _shifted_position(call: Call) -> tuple[Node, Any, list[Node]]:
    """(position, offset, adds): numbers added to the position join the op's offset.

    Only the low 32 bits of a position count, so any wrap of 32 or 64 bits is the same there.
    """
    pos, offset = call.arguments["pos"], call.arguments["pos_offset"]
    shift: list[Node] = []
    reader = call.node
    while is_call_to(pos, aten.add.Tensor, aten.sub.Tensor) and isinstance(offset, int):
        arguments = arguments_of(pos)
        source, number = arguments["self"], arguments["other"]
        if type(number) is not int or arguments["alpha"] != 1 or readers(pos) != [reader]:
            break
        value, shifted = source.meta.get("val"), pos.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(shifted, torch.Tensor):
            break
        if value.dtype not in (torch.int32, torch.int64) or value.dtype != shifted.dtype:
            break
        if stream_of(pos) != stream_of(call.node):
            break
        total = offset + (number if pos.target is aten.add.Tensor else -number)
        if not -(2**63) <= total < 2**63:
            break  # more than an argument of an op holds
        shift.append(pos)
        offset, reader, pos = total, pos, source
    return pos, offset, shift


def _check_memory(call: Call, logits: BiasedLogits, pos: Node, shift: list[Node]) -> None:
    """Reads move from the add down to the op, so nothing may have been written in between."""
    moved = {"base": logits.base, "bias": logits.bias}
    if shift:
        moved["position"] = pos
    written = {storage_root(base) for base in call.bases}
    for what, node in moved.items():
        root = storage_root(node)
        if root in written:
            raise LeftAlone(
                f"the {what} ({described(node)}) shares memory with the logits cache that the "
                "sampler writes"
            )
        first = shift[-1] if what == "position" else logits.nodes[0]
        write = write_between(first, call.node, {root})
        if write is not None:
            raise LeftAlone(
                f"{described(write)} writes into the {what} before the sampler reads it"
            )
