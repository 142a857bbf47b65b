"""markov_step: one draft step of a Markov head: bias, sum, cache, noise, argmax.

    sum[b, v] = round(scaled(base[b, v]) + scaled(bias[b, v]))        # as torch.add rounds it
    token[b]  = argmax_t(sum[b, t] / temperature[s] + gumbel(...)),   s = idx_mapping[b]
    logits_cache[s, cache_col, :Vt] = sum[b];  draft_tokens[b] = token[b]

``bias`` is the head's for ``prev`` (``markov_head.py``: vanilla, gated, rnn; W2 also in fp8 or
int8), ``scaled(x) = round(softcap * tanh(x * scale / softcap))``. With ``d2t`` the draft's
vocabulary V is a part of the target's Vt: draft token v stands at target id ``v + d2t[v]``, ids,
noise and cache are those of the target, and a target id that no draft token has holds -inf.
Contract of the sampler: ``gumbel_block_argmax.py``.

There is no fused kernel yet. On a GPU this runs as separate ops, an embedding, torch's GEMM and
``gumbel_sample``, and with a gate, scales, ``d2t`` or a quantised W2 as several more, which make
copies of [B, V] and [B, Vt]: right, and slow.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._library import register
from dspark_ops._sampler_call import CACHE_ARGS, cache_arguments, check_sampler, checked_offset
from dspark_ops._serving import Call, Serving
from dspark_ops._triton import require_triton
from dspark_ops._vector_checks import check_vector
from dspark_ops.gumbel_block_argmax import sampler_state
from dspark_ops.gumbel_sample import _cpu as gumbel_sample_cpu
from dspark_ops.gumbel_sample import _gumbel_sample_launch, gumbel_sample_ref
from dspark_ops.markov_head import (
    check_head,
    check_scales,
    gate_arguments,
    markov_bias_ref,
    on_target_ids_ref,
    scaled_ref,
)

# 1 reference


def markov_step_ref(
    prev: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
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
    sample: Callable[..., Tensor] = gumbel_sample_ref,
) -> Tensor:
    """``sample`` is an implementation of ``gumbel_sample``."""
    logits = scaled_ref(base, base_scale, base_softcap)
    bias = markov_bias_ref(prev, w1, w2, w2_scale, gate_weight, gate_bias, hidden, state)
    bias = scaled_ref(bias, bias_scale, bias_softcap)
    if d2t is not None:
        logits = on_target_ids_ref(logits + bias, d2t, w1.shape[0])
    return sample(
        logits=logits,
        idx_mapping=idx_mapping,
        temperature=temperature,
        seeds=seeds,
        pos=pos,
        bias=bias if d2t is None else None,
        logits_cache=logits_cache,
        cache_col=cache_col,
        cache_cols=cache_cols,
        draft_tokens=draft_tokens,
        pos_offset=pos_offset,
        is_drafting=is_drafting,
        use_fp64=use_fp64,
    )


# 3 launcher


def _check(
    prev: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
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
    _checks.check_logits(base, "base")
    num_rows, vocab = base.shape
    device = base.device
    check_vector("prev", prev, (torch.int64,), "[B]", num_rows, "base", device)
    head = (w1, w2, w2_scale, gate_weight, gate_bias, hidden, state)
    check_head(*head, (num_rows,), "B", vocab, device)
    check_sampling(
        *(base, w1, idx_mapping, temperature, seeds, pos, logits_cache, cache_col, cache_cols),
        *(base_scale, base_softcap, bias_scale, bias_softcap, d2t),
    )
    if draft_tokens is not None:
        check_vector(
            "draft_tokens", draft_tokens, _checks.ID_DTYPES, "[B]", num_rows, "base", device
        )


def check_sampling(
    base: Tensor,
    w1: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None,
    cache_col: int,
    cache_cols: Tensor | None,
    base_scale: float,
    base_softcap: float | None,
    bias_scale: float,
    bias_softcap: float | None,
    d2t: Tensor | None,
) -> None:
    """What is left to check of a step whose rows are those of ``base`` [B, V]."""
    num_columns = base.shape[1]
    if d2t is not None:
        check_vector("d2t", d2t, (torch.int64,), "[V]", num_columns, "base", base.device)
        num_columns = w1.shape[0]
    check_scales(
        base_scale=base_scale,
        base_softcap=base_softcap,
        bias_scale=bias_scale,
        bias_softcap=bias_softcap,
    )
    state = (idx_mapping, temperature, seeds, pos)
    cache = (logits_cache, cache_col, cache_cols)
    dtype = torch.promote_types(base.dtype, w1.dtype)
    check_sampler(base, *state, *cache, dtype, num_columns)


@torch.no_grad()
def _markov_step_launch(
    prev: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
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
    require_triton("markov_step")
    _check(**arguments)
    return markov_step_ref(**arguments, sample=_gumbel_sample_launch)


# 4 op


def markov_step(
    prev: Tensor,
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
    cache_col: int | Tensor | None = None,
    draft_tokens: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = True,
    use_fp64: bool = False,
) -> Tensor:
    """Sample the token that follows ``prev``: base logits and Markov bias, one draft step.

    On a GPU this runs as separate ops for now: embedding, GEMM, ``gumbel_sample``.

    Args:
        prev: i64 [B], any stride: target ids. One outside [0, Vt) has the embedding 0.
        base: [B, V] bf16, f16 or f32; rows may be strided, columns contiguous.
        w1: [Vt, R] bf16, f16 or f32, Vt >= V, any R: embedding of the previous token. Its dtype is
            the head dtype.
        w2: [V, R] of the head dtype, or float8_e4m3fn or int8 with ``w2_scale``.
        idx_mapping, temperature, seeds, pos: as in ``gumbel_block_argmax``.
        w2_scale: f32 [V], what each row of a quantised ``w2`` is multiplied by.
        gate: the weight of the head's Linear, or (weight, bias), of the head dtype. Without
            ``state`` the gated head: [R, H + R] over [hidden; embedding]. With ``state`` the rnn
            head: [3 R, 2 R + H] over [state; embedding; hidden], giving gate, candidate, output.
        hidden: [B, H] of the head dtype, with ``gate``.
        state: [B, R] of the head dtype, zeros before a block's first step; written in every row.
        base_scale, base_softcap: ``softcap * tanh(base * scale / softcap)`` in fp32, rounded once
            to the dtype of ``base``. A soft-cap takes -inf to -softcap.
        bias_scale, bias_softcap: the same of the bias, after it was rounded to the head dtype.
        d2t: i64 [V], the target id of draft token v less v, no two alike. Ids, noise and cache are
            then the target's; a target id that no draft token has is never drawn and is cached as
            -inf; a draft token whose target id is outside [0, Vt) is dropped.
        logits_cache: [S, C, >= V], with ``d2t`` [S, C, >= Vt], of the dtype of base + bias, which
            is written to it before temperature. Must not overlap another argument.
        cache_col: as in ``gumbel_block_argmax``.
        draft_tokens: i32 or i64 [B], any stride, written in place with the id of every row.
        pos_offset, is_drafting, use_fp64: as there, but that a step drafts unless told otherwise.

    Returns:
        i64 [B], ids in [0, V), with ``d2t`` in [0, Vt).

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    rows, options = call_arguments(
        *("prev", prev, base, w1, w2, idx_mapping, temperature, seeds, pos),
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
    cache = cache_arguments(logits_cache, cache_col)
    result: Tensor = op_of("markov_step", options, bool(cache))(*rows, *cache, **options)
    return result


def op_of(name: str, options: dict[str, Any], has_cache: bool) -> Any:
    """The op for these optional mutated arguments; in ``options`` are those that it takes."""
    name += "_rnn" if "state" in options else ""
    name += "_cache" if has_cache else ""
    name += "_draft" if "draft_tokens" in options else ""
    return getattr(torch.ops.dspark, name).default


def call_arguments(
    first: str,
    prev: Tensor,
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    gate: Any,
    **options: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """An op's first arguments and its keywords; refuses what the dispatcher would in its words."""
    names = ("base", "w1", "w2", "idx_mapping", "temperature", "seeds", "pos")
    rows = (prev, base, w1, w2, idx_mapping, temperature, seeds, pos)
    for name, x in zip((first, *names), rows, strict=True):
        _checks.check_is_tensor(name, x)
    for name in ("w2_scale", "hidden", "state", "d2t", "draft_tokens"):
        if options[name] is not None:
            _checks.check_is_tensor(name, options[name])
    options["gate_weight"], options["gate_bias"] = gate_arguments(gate)
    scales = ("base_scale", "base_softcap", "bias_scale", "bias_softcap")
    check_scales(**{name: options[name] for name in scales})
    flags = (options["is_drafting"], True, options["use_fp64"])
    options["pos_offset"] = checked_offset(options["pos_offset"], *flags)
    if options["state"] is not None and gate is None:
        raise ValueError(
            "state must be given only with gate, the weights of a gated or rnn head; got gate=None"
        )
    return rows, {name: value for name, value in options.items() if value is not None}


# 5 CPU


def _cpu(**arguments: Any) -> Tensor:
    _check(**arguments)
    return markov_step_ref(**arguments, sample=gumbel_sample_cpu)


# 6 fake


def _fake(base: Tensor, **arguments: Any) -> Tensor:
    _check(base=base, **arguments)
    return base.new_empty(base.shape[0], dtype=torch.int64)


STEP_ARGS = (
    "Tensor base, Tensor w1, Tensor w2, Tensor idx_mapping, Tensor temperature, Tensor seeds"
    ", Tensor pos"
)
OPTION_ARGS = (
    ", Tensor? w2_scale=None, Tensor? gate_weight=None, Tensor? gate_bias=None"
    ", Tensor? hidden=None, float base_scale=1.0, float? base_softcap=None, float bias_scale=1.0"
    ", float? bias_softcap=None, Tensor? d2t=None, SymInt pos_offset=0, bool is_drafting=True"
    ", bool use_fp64=False"
)

# An optional mutated argument crashes the compiler, so each combination is an op of its own.
for _rnn in ("", "_rnn"):
    for _cache in ("", "_cache"):
        for _draft in ("", "_draft"):
            register(
                f"markov_step{_rnn}{_cache}{_draft}(Tensor prev, {STEP_ARGS}"
                f"{CACHE_ARGS if _cache else ''}"
                f"{', Tensor(b!) draft_tokens' if _draft else ''}"
                f"{', Tensor(c!) state' if _rnn else ''}{OPTION_ARGS}) -> Tensor",
                cpu=_cpu,
                cuda=_markov_step_launch,
                fake=_fake,
            )


# 7 samples and serving calls


def sample_head(
    device: torch.device | str,
    case: int,
    num_rows: int,
    vocab: int,
    num_targets: int,
    rank: int,
    dtype: torch.dtype,
    hidden_rows: tuple[int, ...],
    has_state: bool,
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """(w1, w2) and keywords of a head: by ``case`` a quantised w2, a gate, scales, caps, d2t."""
    generator = torch.Generator(device).manual_seed(case)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    w1, w2 = randn(num_targets, rank), randn(vocab, rank)
    options: dict[str, Any] = {}
    if case % 3 == 1:
        options["w2_scale"] = torch.rand(vocab, device=device, generator=generator) / 50 + 0.01
        # Not fp8: opcheck compares arguments by operations that it lacks.
        w2 = (w2.float() * 40).round().clamp(-127, 127).to(torch.int8)
    if has_state or case % 2:
        options["hidden"] = randn(*hidden_rows, 6)[..., 1:]
        parts = 3 if has_state else 1
        inputs = 5 + (2 * rank if has_state else rank)
        options["gate_weight"] = randn(parts * rank, inputs) / 4
        options["gate_bias"] = randn(parts * rank) if case % 4 == 1 else None
    if has_state:
        options["state"] = randn(num_rows, rank)
    if case % 2:
        options |= {"base_scale": 0.5, "base_softcap": 20.0, "bias_scale": 2, "bias_softcap": 9.5}
        options |= {"use_fp64": True, "is_drafting": False, "pos_offset": -1}
        step = num_targets // vocab
        options["d2t"] = torch.arange(vocab, device=device) * (step - 1)
    return (w1, w2), options


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): every head and option, strided rows, B = 0, odd V and R."""
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []
    temperature, seeds = sampler_state(device, 5)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    case = -1
    for rnn in ("", "_rnn"):
        for cache in ("", "_cache"):
            for draft in ("", "_draft"):
                for num_rows, vocab, rank in ((3, 61, 7), (2, 40, 8), (0, 16, 4)):
                    case += 1
                    dtype = dtypes[case % 3]
                    num_targets = 3 * vocab + 1
                    head, options = sample_head(
                        *(device, case, num_rows, vocab, num_targets, rank, dtype),
                        *((num_rows,), bool(rnn)),
                    )
                    base = torch.ones(num_rows, 2, vocab, device=device).cumsum(-1).to(dtype)
                    ids = torch.arange(2 * num_rows, device=device)
                    if cache:
                        shape = (5, 2, num_targets + 3)
                        room = torch.full(shape, 7.0, device=device, dtype=dtype)
                        cols = None if case % 2 else ids[:num_rows]
                        options |= {"logits_cache": room, "cache_col": 1, "cache_cols": cols}
                    if draft:
                        tokens = torch.full((num_rows, 3), -1, device=device, dtype=torch.int32)
                        options["draft_tokens"] = tokens[:, 1]
                    prev = ids[::2] if case % 2 else ids[:num_rows] - 1
                    rows = (ids[:num_rows].int(), temperature, seeds, ids[:num_rows] * 7)
                    args = (prev, base[:, 1], *head, *rows)
                    samples.append((f"markov_step{rnn}{cache}{draft}", args, options))
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    """None of its own: what is compiled is ``gumbel_sample``, which has them."""
    return iter(())
