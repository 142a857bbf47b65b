"""Draft, verify, append: speculative decoding of a batch until each request has its text.

Three ways to draft differ in one step of the loop: ``gumbel_sample``, the unfused chain, and the
unfused loop compiled by ``backend="dspark"``.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dspark_ops
from dspark_ops.selftest.toys import NEVER, Toy

FIRST_POSITION = 11


class Record(NamedTuple):
    """What became of requests, on the CPU; -1 in rounds that a request did not need."""

    temperature: Tensor  # f32 [n]
    tokens: Tensor  # i64 [n, M] the text
    anchors: Tensor  # i64 [n, M] the token before each round
    lengths: Tensor  # i64 [n, M] how many draft tokens each round accepted


def join(records: list[Record]) -> Record:
    return Record(*(torch.cat(x) for x in zip(*records, strict=True)))


Rows = tuple[Tensor, ...]  # idx_mapping, temperature, seeds, pos


def fused_step(
    logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
) -> Tensor:
    return dspark_ops.gumbel_sample(
        logits, *rows, bias=bias, logits_cache=cache, cache_col=column, is_drafting=True
    )


def unfused_step(
    logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
) -> Tensor:
    if bias is not None:
        logits = logits + bias
    block_max, block_argmax = dspark_ops.gumbel_block_argmax(
        logits, *rows, logits_cache=cache, cache_col=column, is_drafting=True
    )
    best = block_max.argmax(-1, keepdim=True)
    return block_argmax.gather(-1, best).view(-1)


def draft_loop(
    step: Callable[..., Tensor],
    base: Tensor,
    prev: Tensor,
    w1: Tensor,
    w2: Tensor,
    d2t: Tensor | None,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    cache: Tensor,
    draft_tokens: Tensor,
    filtering: Callable[[Tensor], Tensor] | None,
) -> None:
    """Fill ``draft_tokens`` [B, N], at ``pos`` [B, N], and ``cache`` [S, N, D].

    With ``filtering`` the sums are filtered in place, sampled and cached as they are then.
    """
    for i in range(base.shape[1]):
        bias = F.linear(F.embedding(prev, w1), w2)
        rows = (idx_mapping, temperature, seeds, pos[:, i] - 1)
        if filtering is None:
            prev = step(base[:, i], bias, rows, cache, i)
        else:
            prev = step(filtering(base[:, i] + bias), None, rows, cache, i)
        if d2t is not None:
            prev = prev + d2t[prev]
        draft_tokens[:, i] = prev


class Decoder:
    """Speculative decoding of a toy. A planted fault overrides one of the first four methods."""

    def __init__(self, toy: Toy, method: str, device: str) -> None:
        self.toy, self.method, self.device = toy, method, device
        self.base = toy.sampled_base.to(device)
        self.w1 = torch.eye(toy.vocab, dtype=toy.bias.dtype, device=device)
        self.w2 = toy.bias.T.contiguous().to(device)
        self.target = toy.target.float().to(device)
        self.target_ids = toy.target_ids.to(device)
        self.d2t = None
        if toy.draft_ids is not None:
            self.d2t = self.target_ids - torch.arange(len(toy.draft_ids), device=device)

    def step(
        self, logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
    ) -> Tensor:
        return fused_step(logits, bias, rows, cache, column)

    def draft(self, *args: Any) -> None:
        draft_loop(self.step, *args)

    def verify(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dspark_ops.rejection_sample(*args, num_steps=self.toy.num_steps, method=self.method)

    def keys(self, seeds: Tensor) -> Tensor:
        """The seeds that both ops get."""
        return seeds

    def decode(self, seeds: Tensor, temperature: Tensor) -> Record:
        """The text of a request for each of ``seeds`` i64 [B], at ``temperature`` f32 [B]."""
        toy, device, num_rows = self.toy, self.device, len(seeds)
        slot = torch.arange(num_rows, device=device).flip(0)  # in another order than rows
        state = (temperature.to(device)[slot], self.keys(seeds.to(device)[slot]))
        divisor = torch.where(temperature > 0, temperature, 1.0).to(device)[:, None, None]
        ahead = torch.arange(toy.num_steps + 1, device=device)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device) * len(ahead)
        base = self.base.expand(num_rows, -1, -1).contiguous()
        cache = torch.empty_like(base)
        draft_logits = base.new_full((num_rows, toy.num_steps, toy.vocab), NEVER)

        anchor = torch.full((num_rows,), toy.anchor, device=device)
        count = torch.zeros_like(anchor)
        text = anchor.new_full((num_rows, toy.num_tokens + toy.num_steps), -1)
        rounds = []
        for _ in range(toy.num_tokens):  # each round gives a token or more
            live = count < toy.num_tokens
            idx_mapping = torch.where(live, slot, -1)
            pos = FIRST_POSITION + count[:, None] + ahead  # of the logit rows, [B, N + 1]
            ids = anchor[:, None].repeat(1, len(ahead))
            cache.fill_(torch.nan)  # what is read was written in this round
            tables = (base, anchor, self.w1, self.w2, self.d2t)
            filtering = None if toy.top_k_top_p is None else toy.filter
            self.draft(*tables, idx_mapping, *state, pos[:, 1:], cache, ids[:, 1:], filtering)
            draft_logits[..., self.target_ids] = cache
            target_logits = toy.filter((self.target[ids] / divisor).flatten(0, 1))
            drafted = (target_logits, draft_logits, ids.flatten(), starts, pos.flatten())
            tokens, num_sampled, _ = self.verify(*drafted, idx_mapping, *state)
            accepted = num_sampled.long() - 1
            rounds.append((torch.where(live, anchor, -1), accepted))
            row = live.nonzero()
            text[row, count[row] + ahead] = tokens[live]
            last = tokens.gather(1, accepted.clamp(min=0)[:, None])[:, 0]
            anchor = torch.where(live, last, anchor)
            count = count + num_sampled
        anchors, lengths = (torch.stack(x, 1).cpu() for x in zip(*rounds, strict=True))
        return Record(temperature, text[:, : toy.num_tokens].cpu(), anchors, lengths)


class UnfusedDecoder(Decoder):
    def draft(self, *args: Any) -> None:
        draft_loop(unfused_step, *args)


class CompiledDecoder(Decoder):
    """``num_fused``: steps that the passes took into ``gumbel_sample``, known after a draft."""

    num_fused: int | None = None
    reasons = ""

    def draft(self, *args: Any) -> None:
        import inductor_passes

        if self.num_fused is None:
            with contextlib.redirect_stdout(io.StringIO()):
                report = inductor_passes.explain(draft_loop, unfused_step, *args)
            sites = [site for site in report.sites if site.pass_name == "sampler_fusion"]
            self.num_fused = sum(site.fused for site in sites)
            self.reasons = "; ".join({str(site.reason) for site in sites if not site.fused})
        # Every toy is a variant of one function; past the limit torch would run it uncompiled.
        with torch._dynamo.config.patch(recompile_limit=64):
            compiled = torch.compile(draft_loop, backend="dspark", dynamic=False, fullgraph=True)
            compiled(unfused_step, *args)


def why_not_compiled(device: str) -> str:
    """Why nothing can be compiled here, or nothing."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        import inductor_passes  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    if device == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "Inductor finds no C++ compiler; install g++ or set CXX"
    elif not torch.utils._triton.has_triton():  # type: ignore[attr-defined]
        return "Inductor finds no Triton for this GPU"
    return ""
