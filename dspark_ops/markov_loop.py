"""markov_loop: N draft steps of a Markov head, each from the token of the one before.

    for i in 0..N-1:  prev = tokens[:, i] = markov_step(prev, base[:, i], ..., cache_col=i)

The first ``prev`` is ``anchor``; ``pos`` advances by 1 a step, or is given for each. See
``markov_step.py`` for a step, its heads and its contract. With ``d2t`` tokens are target ids, so
they are what W1 takes. There is no fused kernel yet: on a GPU every step runs as its separate ops.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._library import register
from dspark_ops._serving import Call, Serving
from dspark_ops._triton import require_triton
from dspark_ops._vector_checks import check_vector
from dspark_ops.gumbel_block_argmax import sampler_state
from dspark_ops.gumbel_sample import _cpu as gumbel_sample_cpu
from dspark_ops.gumbel_sample import _gumbel_sample_launch, gumbel_sample_ref
from dspark_ops.markov_head import check_head
from dspark_ops.markov_step import (
    OPTION_ARGS,
    STEP_ARGS,
    call_arguments,
    check_sampling,
    markov_step_ref,
    op_of,
    sample_head,
)

# 1 reference


def markov_loop_ref(
    anchor: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    draft_tokens: Tensor | None = None,
    hidden: Tensor | None = None,
    pos_offset: int = 0,
    sample: Callable[..., Tensor] = gumbel_sample_ref,
    **options: Any,
) -> Tensor:
    """``options`` are keywords of ``markov_step_ref``, ``sample`` is its."""
    prev, tokens = anchor, []
    for i in range(base.shape[1]):
        prev = markov_step_ref(
            prev,
            base[:, i],
            w1,
            w2,
            idx_mapping if idx_mapping.dim() == 1 else idx_mapping[:, i],
            temperature,
            seeds,
            pos if pos.dim() == 1 else pos[:, i],
            draft_tokens=None if draft_tokens is None else draft_tokens[:, i],
            hidden=None if hidden is None else hidden[:, i],
            cache_col=i,
            pos_offset=pos_offset + i if pos.dim() == 1 else pos_offset,
            sample=sample,
            **options,
        )
        tokens.append(prev)
    return torch.stack(tokens, -1)


# 3 launcher


def _check(
    anchor: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    state: Tensor | None = None,
    w2_scale: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    hidden: Tensor | None = None,
    base_scale: float = 1.0,
    base_softcap: float | None = None,
    bias_scale: float = 1.0,
    bias_softcap: float | None = None,
    d2t: Tensor | None = None,
    **_flags: Any,
) -> None:
    """Raise for metadata that does not fit."""
    _checks.check_dtype("base", base, _checks.LOGITS_DTYPES)
    if base.dim() != 3 or base.shape[1] < 1:
        raise ValueError(f"base must have shape [B, N, V], N >= 1; got {tuple(base.shape)}")
    num_rows, num_steps, vocab = base.shape
    device = base.device
    first = base[:, 0]
    _checks.check_logits(first, "base")
    check_vector("anchor", anchor, (torch.int64,), "[B]", num_rows, "base", device)
    rows = (num_rows, num_steps)
    head = (w1, w2, w2_scale, gate_weight, gate_bias, hidden, state)
    check_head(*head, rows, "B, N", vocab, device)
    for name, x in (("idx_mapping", idx_mapping), ("pos", pos)):
        _check_steps(name, x, _checks.INDEX_DTYPES, "[B] or [B, N]", rows, device)
    check_sampling(
        *(first, w1, _first(idx_mapping), temperature, seeds, _first(pos), logits_cache, 0, None),
        *(base_scale, base_softcap, bias_scale, bias_softcap, d2t),
    )
    if logits_cache is not None and logits_cache.shape[1] < num_steps:
        raise ValueError(
            f"logits_cache must have a column for each of N = {num_steps} steps; "
            f"got {tuple(logits_cache.shape)}"
        )
    if draft_tokens is not None:
        _check_steps("draft_tokens", draft_tokens, _checks.ID_DTYPES, "[B, N]", rows, device)


def _first(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x[:, 0]


def _check_steps(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    letters: str,
    rows: tuple[Any, Any],
    device: torch.device,
) -> None:
    """``x`` is int [B, N], or [B] too if the ``letters`` say so."""
    _checks.check_dtype(name, x, dtypes)
    may_be_vector = letters.startswith("[B] ")
    if tuple(x.shape) != rows and not (may_be_vector and tuple(x.shape) == rows[:1]):
        raise ValueError(
            f"{name} must have shape {letters} with [B, N] = [{rows[0]}, {rows[1]}]; "
            f"got {tuple(x.shape)}"
        )
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where base is; got {x.device}")


@torch.no_grad()
def _markov_loop_launch(
    anchor: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    state: Tensor | None = None,
    w2_scale: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    hidden: Tensor | None = None,
    base_scale: float = 1.0,
    base_softcap: float | None = None,
    bias_scale: float = 1.0,
    bias_softcap: float | None = None,
    d2t: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = True,
    use_fp64: bool = False,
) -> Tensor:
    arguments = dict(locals())
    require_triton("markov_loop")
    _check(**arguments)
    return markov_loop_ref(**arguments, sample=_gumbel_sample_launch)


# 4 op


def markov_loop(
    anchor: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    w2_scale: Tensor | None = None,
    gate: Tensor | tuple[Tensor, Tensor | None] | None = None,
    hidden: Tensor | None = None,
    state: Tensor | None = None,
    base_scale: float = 1.0,
    base_softcap: float | None = None,
    bias_scale: float = 1.0,
    bias_softcap: float | None = None,
    d2t: Tensor | None = None,
    logits_cache: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = True,
    use_fp64: bool = False,
) -> Tensor:
    """Draft N tokens a row, ``markov_step`` by ``markov_step``.

    On a GPU each step runs as separate ops for now: embedding, GEMM, ``gumbel_sample``.

    Args:
        anchor: i64 [B], any stride: the token before the first step, a target id.
        base: [B, N, V] bf16, f16 or f32, N >= 1; rows may be strided, columns contiguous.
        w1, w2, temperature, seeds: as in ``markov_step``.
        idx_mapping: int [B], or [B, N] with the slot of each step.
        pos: int [B], the position that keys the noise of the first step, 1 more at each later one;
            or [B, N], that of each step.
        hidden: [B, N, H] of the head dtype, with ``gate``.
        state: [B, R] as in ``markov_step``: zeros before, what the last step left after.
        logits_cache: as in ``markov_step``, with at least N columns: step i writes column i.
        draft_tokens: i32 or i64 [B, N], any strides, written in place.
        w2_scale, gate, base_scale, base_softcap, bias_scale, bias_softcap, d2t: as there.
        pos_offset, is_drafting, use_fp64: as there.

    Returns:
        i64 [B, N], ids in [0, V), with ``d2t`` in [0, Vt).

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    rows, options = call_arguments(
        *("anchor", anchor, base, w1, w2, idx_mapping, temperature, seeds, pos),
        w2_scale=w2_scale,
        gate=gate,
        hidden=hidden,
        state=state,
        base_scale=base_scale,
        base_softcap=base_softcap,
        bias_scale=bias_scale,
        bias_softcap=bias_softcap,
        d2t=d2t,
        draft_tokens=draft_tokens,
        pos_offset=pos_offset,
        is_drafting=is_drafting,
        use_fp64=use_fp64,
    )
    if logits_cache is not None:
        _checks.check_is_tensor("logits_cache", logits_cache)
        rows += (logits_cache,)
    op = op_of("markov_loop", options, logits_cache is not None)
    result: Tensor = op(*rows, **options)
    return result


# 5 CPU


def _cpu(**arguments: Any) -> Tensor:
    _check(**arguments)
    return markov_loop_ref(**arguments, sample=gumbel_sample_cpu)


# 6 fake


def _fake(base: Tensor, **arguments: Any) -> Tensor:
    _check(base=base, **arguments)
    return base.new_empty(base.shape[:2], dtype=torch.int64)


# An optional mutated argument crashes the compiler, so each combination is an op of its own.
for _rnn in ("", "_rnn"):
    for _cache in ("", "_cache"):
        for _draft in ("", "_draft"):
            register(
                f"markov_loop{_rnn}{_cache}{_draft}(Tensor anchor, {STEP_ARGS}"
                f"{', Tensor(a!) logits_cache' if _cache else ''}"
                f"{', Tensor(b!) draft_tokens' if _draft else ''}"
                f"{', Tensor(c!) state' if _rnn else ''}{OPTION_ARGS}) -> Tensor",
                cpu=_cpu,
                cuda=_markov_loop_launch,
                fake=_fake,
            )


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): every head and option, both forms of rows, B = 0, odd V."""
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []
    temperature, seeds = sampler_state(device, 5)
    case = -1
    for rnn in ("", "_rnn"):
        for cache in ("", "_cache"):
            for draft in ("", "_draft"):
                for num_rows, steps, vocab, rank in ((3, 2, 31, 7), (0, 3, 16, 4), (2, 1, 8, 8)):
                    case += 1
                    dtype = (torch.float32, torch.bfloat16, torch.float16)[case % 3]
                    num_targets = 3 * vocab + 1
                    head, options = sample_head(
                        *(device, case, num_rows, vocab, num_targets, rank, dtype),
                        *((num_rows, steps), bool(rnn)),
                    )
                    base = torch.ones(num_rows, steps + 1, vocab, device=device).cumsum(-1)
                    ids = torch.arange(2 * num_rows, device=device)
                    if cache:
                        shape = (5, steps + 1, num_targets + 3)
                        options["logits_cache"] = torch.full(shape, 7.0, device=device, dtype=dtype)
                    if draft:
                        options["draft_tokens"] = torch.full((num_rows, steps), -1, device=device)
                    anchor = ids[::2] if case % 2 else ids[:num_rows] - 1
                    idx_mapping, pos = ids[:num_rows].int(), ids[:num_rows] * 7
                    if case % 2:
                        each = torch.arange(steps, device=device)
                        idx_mapping = idx_mapping[:, None].expand(-1, steps)
                        pos = pos[:, None] + each
                    args = (
                        *(anchor, base.to(dtype)[:, 1:], *head),
                        *(idx_mapping, temperature, seeds, pos),
                    )
                    samples.append((f"markov_loop{rnn}{cache}{draft}", args, options))
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    """None of its own: what is compiled is ``gumbel_sample``, which has them."""
    return iter(())
