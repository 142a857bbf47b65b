"""gumbel_sample: add, round, cache, noise, argmax, draft column, next embedding: two launches.

    sum[b, v] = round(logits[b, v] + bias[b, v])                      # as torch.add rounds it
    token[b]  = argmax_v(sum[b, v] / temperature[s] + gumbel(...)),   s = idx_mapping[b]
    logits_cache[s, cache_col, :V] = sum[b]
    draft_tokens[b] = token[b];  embedding[b] = weight[token[b]]

Equal, bit for bit, to ``torch.add`` + ``gumbel_block_argmax`` + argmax + gather on the same
device; see there for the contract. ``draft_tokens`` gets the id of every row, inert ones too.
Bytes that must move: logits, bias and cache once each.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import empty_ids, is_aligned, launch, launch_options
from dspark_ops._library import is_plain_gpu_call, register
from dspark_ops._sampler_call import (
    CACHE_ARGS,
    FLAG_ARGS,
    SAMPLER_ARGS,
    cache_arguments,
    check_sampler,
    checked_offset,
    key_offset,
    row_arguments,
    rows_and_cache_ref,
)
from dspark_ops._serving import Call, Serving, sampler_arguments
from dspark_ops._triton import require_triton, tl
from dspark_ops.gumbel_block_argmax import sample_inputs as block_sample_inputs
from dspark_ops.gumbel_sample_kernel import (
    _gumbel_sample_finish_kernel,
    _gumbel_sample_finish_unaligned_kernel,
    _gumbel_sample_kernel,
    _gumbel_sample_unaligned_kernel,
)
from dspark_ops.health import ACTIVE, count_rows, count_rows_ref
from dspark_ops.noised import noised_logits_ref

# 1 reference


def gumbel_sample_ref(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> Tensor:
    if bias is not None:
        logits = logits + bias
    arguments = (logits, idx_mapping, temperature, seeds, pos, logits_cache, cache_col, cache_cols)
    rows = rows_and_cache_ref(*arguments, key_offset(pos_offset, is_drafting))
    token = noised_logits_ref(logits, rows, apply_temperature, use_fp64).argmax(-1)
    if draft_tokens is not None:
        draft_tokens.copy_(token)
    return token


# 2 kernel: gumbel_sample_kernel.py

# 3 launcher

# One tile for every batch, so that a new batch size compiles nothing; how many tiles a program
# walks is a run-time argument. H200, V 151936, bf16, loop of 7 steps in graph replay, us, by tiles
# a chunk:
#   B   1:  1: 203
#   B   8:  1: 261   3: 243   4: 243   5: 241   8: 243  12: 247  24: 287
#   B  32:  1: 429   4: 347   8: 332  12: 338  16: 333  20: 330  24: 346
#   B 128:  1: 1062  4: 725   8: 640  12: 611  16: 605  20: 595  24: 628
# Tiles of 1024 with 4 warps are at best 243 / 332 / 604 at B 8 / 32 / 128.
TILE_V = 512
NUM_WARPS = 4
MIN_PROGRAMS = 528  # four for each multiprocessor
MAX_TILES = 20
FINISH_WARPS = 1
BLOCK_K = 256
BLOCK_R = 256
_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _tiles_per_chunk(num_rows: int, vocab: int) -> int:
    """Few tiles leave the GPU filled, many need fewer logarithms."""
    tiles = num_rows * ((vocab + TILE_V - 1) // TILE_V)
    return min(max(1, tiles // MIN_PROGRAMS), MAX_TILES)


def _check(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    embed_weight: Tensor | None = None,
    bias: Tensor | None = None,
    **_flags: Any,
) -> torch.dtype:
    """Raise for metadata that does not fit; return the dtype of the sum."""
    _checks.check_logits(logits)
    num_rows, vocab = logits.shape
    device = logits.device
    dtype = logits.dtype
    if bias is not None:
        _checks.check_dtype("bias", bias, _checks.LOGITS_DTYPES)
        dtype = torch.promote_types(dtype, bias.dtype)
        if (
            bias.dim() not in (1, 2)
            or bias.shape[-1] != vocab
            or (bias.dim() == 2 and bias.shape[0] != num_rows and bias.shape[0] != 1)
        ):
            raise ValueError(
                f"bias must have shape [B, V], [1, V] or [V] with [B, V] = [{num_rows}, {vocab}]; "
                f"got {tuple(bias.shape)}"
            )
        _checks.check_device("bias", bias, device)
        _checks.check_last_stride("bias", bias)
    cache = (logits_cache, cache_col, cache_cols)
    check_sampler(logits, idx_mapping, temperature, seeds, pos, *cache, dtype)
    if draft_tokens is not None:
        _checks.check_dtype("draft_tokens", draft_tokens, _checks.ID_DTYPES)
        _checks.check_row_ints("draft_tokens", draft_tokens, num_rows, device)
    if embed_weight is not None:
        if embed_weight.dim() != 2 or embed_weight.shape[0] < vocab:
            raise ValueError(
                f"embed_weight must have shape [>= V, R] with V = {vocab}; "
                f"got {tuple(embed_weight.shape)}"
            )
        _checks.check_device("embed_weight", embed_weight, device)
        _checks.check_last_stride("embed_weight", embed_weight)
    return dtype


class _Plan(NamedTuple):
    """What a call's metadata decides: arguments of both kernels, positional, and their variants."""

    num_partials: int
    grid: tuple[int, int, int]
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    options: dict[str, Any]
    finish_grid: tuple[int, int, int]
    finish_sizes: tuple[Any, ...]
    finish_options: dict[str, Any]
    is_aligned: bool  # strides and sizes of rows that are read in vectors; addresses are extra
    is_embed_aligned: bool
    variants: dict[tuple[bool, ...], tuple[Any, Any]]


def _make_plan(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None,
    cache_cols: Tensor | None,
    draft_tokens: Tensor | None,
    embed_weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> _Plan:
    num_rows, vocab = logits.shape
    tiles_per_chunk = _tiles_per_chunk(num_rows, vocab)
    num_chunks = (vocab + TILE_V * tiles_per_chunk - 1) // (TILE_V * tiles_per_chunk)
    num_partials = num_rows * num_chunks
    num_cols = stride_cache_s = stride_cache_c = 0
    if logits_cache is not None:
        num_cols = logits_cache.shape[1]
        stride_cache_s, stride_cache_c, _ = logits_cache.stride()
    one_bias = bias is None or bias.dim() == 1 or bias.shape[0] == 1
    stride_bias_b = 0 if one_bias else bias.stride(0)  # type: ignore[union-attr]
    one_col = cache_cols is None or cache_cols.dim() == 0
    rank = stride_weight_v = 0
    if embed_weight is not None:
        rank, stride_weight_v = embed_weight.shape[1], embed_weight.stride(0)
    strides = (logits.stride(0), stride_bias_b, stride_cache_s, stride_cache_c)
    options = launch_options(logits)
    pdl = options.pop("LAUNCH_PDL")
    return _Plan(
        num_partials,
        (num_partials, 1, 1),
        (vocab, temperature.shape[0], num_cols, num_chunks, tiles_per_chunk, num_partials),
        (
            logits.stride(0),
            stride_bias_b,
            idx_mapping.stride(0),
            pos.stride(0),
            0 if one_col else cache_cols.stride(0),  # type: ignore[union-attr]
            stride_cache_s,
            stride_cache_c,
            _TL_DTYPE[dtype],
            bias is not None,
            logits_cache is not None,
            cache_cols is not None,
            pdl,
            TILE_V,
        ),
        {"num_warps": NUM_WARPS, **options},
        (num_rows, 1, 1),
        (
            num_chunks,
            num_partials,
            rank,
            0 if draft_tokens is None else draft_tokens.stride(0),
            stride_weight_v,
            draft_tokens is not None,
            embed_weight is not None,
            pdl,
            BLOCK_K,
            BLOCK_R,
        ),
        {"num_warps": FINISH_WARPS, **options},
        is_aligned(vocab, *strides),
        is_aligned(rank, stride_weight_v),
        {},
    )


# Checks and strides cost more host time than the rest of a call (9 of 18 us), so a call whose
# metadata was seen before skips them. Cleared when full: a server meets a few hundred batch shapes.
_plans: dict[tuple[Any, ...], _Plan] = {}
_MAX_PLANS = 4096


def _gumbel_sample_launch(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    embed_weight: Tensor | None = None,
    bias: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> Any:
    device = logits.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current one
            return _gumbel_sample_launch(
                logits,
                idx_mapping,
                temperature,
                seeds,
                pos,
                logits_cache,
                cache_col,
                cache_cols,
                draft_tokens,
                embed_weight,
                bias,
                pos_offset,
                is_drafting,
                apply_temperature,
                use_fp64,
            )
    # Written out: a call of a helper for each tensor costs as much as what it reads.
    # fmt: off
    key: tuple[Any, ...] = (
        logits.dtype, logits.shape, logits.stride(), device,
        idx_mapping.dtype, idx_mapping.shape, idx_mapping.stride(), idx_mapping.get_device(),
        temperature.dtype, temperature.shape, temperature.stride(), temperature.get_device(),
        seeds.dtype, seeds.shape, seeds.stride(), seeds.get_device(),
        pos.dtype, pos.shape, pos.stride(), pos.get_device(),
        None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device()),
        None if logits_cache is None else (
            logits_cache.dtype, logits_cache.shape, logits_cache.stride(), logits_cache.get_device()
        ),
        None if cache_cols is None else (
            cache_cols.dtype, cache_cols.shape, cache_cols.stride(), cache_cols.get_device()
        ),
        None if draft_tokens is None else (
            draft_tokens.dtype, draft_tokens.shape, draft_tokens.stride(), draft_tokens.get_device()
        ),
        None if embed_weight is None else (
            embed_weight.dtype, embed_weight.shape, embed_weight.stride(), embed_weight.get_device()
        ),
        0 <= cache_col <= _checks.MAX_COL,
    )
    # fmt: on
    plan = _plans.get(key)
    if plan is None:
        require_triton("gumbel_sample")
        rows = (logits, idx_mapping, temperature, seeds, pos)
        extras = (draft_tokens, embed_weight, bias)
        dtype = _check(*rows, logits_cache, cache_col, cache_cols, *extras)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(*rows, logits_cache, cache_cols, *extras, dtype)

    num_rows = logits.shape[0]
    token = empty_ids(num_rows, seeds)
    embedding = None
    if embed_weight is not None:
        embedding = embed_weight.new_empty(num_rows, embed_weight.shape[1])
    if num_rows > 0:
        if ACTIVE:
            cached = (logits_cache, cache_col, cache_cols)
            count_rows("gumbel_sample", logits, idx_mapping, temperature, bias, *cached)
        partial = empty_ids(plan.num_partials * 2 if use_fp64 else plan.num_partials, seeds)
        if bias is None:
            bias = logits
        if logits_cache is None:
            logits_cache = logits
        # A variant depends on the plan, the flags, and whether rows can be read in vectors.
        pointers = logits.data_ptr() | bias.data_ptr() | logits_cache.data_ptr()
        aligned = plan.is_aligned and pointers % 16 == 0
        embed_aligned = plan.is_embed_aligned and (
            embed_weight is None or embed_weight.data_ptr() % 16 == 0
        )
        variant = (apply_temperature, use_fp64, aligned, embed_aligned)
        kept = plan.variants.get(variant)
        sampler = launch(
            None if kept is None else kept[0],
            _gumbel_sample_kernel if aligned else _gumbel_sample_unaligned_kernel,
            plan.options,
            plan.grid,
            partial,
            logits,
            bias,
            idx_mapping,
            temperature,
            seeds,
            pos,
            logits_cache,
            pos if cache_cols is None else cache_cols,
            *plan.sizes,
            cache_col,
            key_offset(pos_offset, is_drafting),
            apply_temperature,
            use_fp64,
            *plan.strides,
        )
        finish = launch(
            None if kept is None else kept[1],
            _gumbel_sample_finish_kernel
            if embed_aligned
            else _gumbel_sample_finish_unaligned_kernel,
            plan.finish_options,
            plan.finish_grid,
            token,
            token if draft_tokens is None else draft_tokens,
            token if embedding is None else embedding,
            partial,
            token if embed_weight is None else embed_weight,
            use_fp64,
            *plan.finish_sizes,
        )
        if kept is None and sampler is not None:
            plan.variants[variant] = (sampler, finish)
    return token if embedding is None else (token, embedding)


# 4 op


def gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int | Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
    draft_tokens: Tensor | None = None,
) -> Tensor:
    """Sample a token a row from ``softmax((logits + bias) / temperature)`` by the Gumbel-max trick.

    Args:
        logits: [B, V] bf16, f16 or f32; rows may be strided, columns contiguous.
        idx_mapping, temperature, seeds, pos: as in ``gumbel_block_argmax``.
        bias: [B, V], [1, V] or [V] bf16, f16 or f32, added and rounded as ``torch.add`` does.
        logits_cache: [S, C, >= V] of the dtype of the sum, which is written to it before
            temperature. Must not overlap ``logits`` or ``bias``.
        cache_col, pos_offset, is_drafting, apply_temperature, use_fp64: as there.
        draft_tokens: i32 or i64 [B], any stride, written in place with the id of every row.

    Returns:
        i64 [B], ids in [0, V).

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    rows = row_arguments(logits, idx_mapping, temperature, seeds, pos)
    cache = cache_arguments(logits_cache, cache_col)
    if bias is not None:
        _checks.check_is_tensor("bias", bias)
    if draft_tokens is not None:
        _checks.check_is_tensor("draft_tokens", draft_tokens)
    # Written out: 25 ns of host time, where a call takes 100.
    if not (
        type(pos_offset) is int
        and type(is_drafting) is type(apply_temperature) is type(use_fp64) is bool
    ):
        pos_offset = checked_offset(pos_offset, is_drafting, apply_temperature, use_fp64)
    flags = (bias, pos_offset, is_drafting, apply_temperature, use_fp64)
    if is_plain_gpu_call(logits):
        cached, col, cols = cache or (None, 0, None)
        return _gumbel_sample_launch(*rows, cached, col, cols, draft_tokens, None, *flags)
    ops = torch.ops.dspark
    if draft_tokens is None:
        op = ops.gumbel_sample_cache if cache else ops.gumbel_sample
        return op.default(*rows, *cache, *flags)
    op = ops.gumbel_sample_cache_draft if cache else ops.gumbel_sample_draft
    return op.default(*rows, *cache, draft_tokens, *flags)


# 5 CPU


def _cpu(embed_weight: Tensor | None = None, **arguments: Any) -> Any:
    _check(embed_weight=embed_weight, **arguments)
    if ACTIVE:
        count_rows_ref("gumbel_sample", **arguments)
    token = gumbel_sample_ref(**arguments)
    return token if embed_weight is None else (token, embed_weight[token])


# 6 fake


def _fake(logits: Tensor, embed_weight: Tensor | None = None, **arguments: Any) -> Any:
    _check(logits, embed_weight=embed_weight, **arguments)
    token = logits.new_empty(logits.shape[0], dtype=torch.int64)
    if embed_weight is None:
        return token
    return token, embed_weight.new_empty(logits.shape[0], embed_weight.shape[1])


# An optional mutated argument crashes the compiler, so each combination is an op of its own.
for _embed in ("", "_embed"):
    for _cache in ("", "_cache"):
        for _draft in ("", "_draft"):
            register(
                f"gumbel_sample{_embed}{_cache}{_draft}({SAMPLER_ARGS}"
                f"{CACHE_ARGS if _cache else ''}"
                f"{', Tensor(b!) draft_tokens' if _draft else ''}"
                f"{', Tensor embed_weight' if _embed else ''}"
                f", Tensor? bias=None{FLAG_ARGS}) -> {'(Tensor, Tensor)' if _embed else 'Tensor'}",
                cpu=_cpu,
                cuda=_gumbel_sample_launch,
                fake=_fake,
            )


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): those of ``gumbel_block_argmax`` with every new argument."""
    generator = torch.Generator(device).manual_seed(3)
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []
    for case, (_, arguments, kwargs) in enumerate(block_sample_inputs(device)):
        num_rows, vocab = arguments[0].shape
        dtype = arguments[0].dtype
        shape = ((num_rows, vocab), (vocab,), (1, vocab))[case % 3]
        for embed in ("", "_embed"):
            for draft in ("", "_draft"):
                options = dict(kwargs)
                options["bias"] = torch.randn(shape, device=device, generator=generator).to(dtype)
                if draft:
                    tokens = torch.full((num_rows, 3), -1, device=device, dtype=torch.int32)
                    options["draft_tokens"] = tokens[:, 1]
                if embed:
                    weight = torch.randn(vocab + 1, 6, device=device, generator=generator)
                    options["embed_weight"] = weight[:, :5]
                cache = "_cache" if "logits_cache" in kwargs else ""
                samples.append((f"gumbel_sample{embed}{cache}{draft}", arguments, options))
        samples.append((f"gumbel_sample{cache}", arguments, dict(kwargs)))
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    for args, kwargs in sampler_arguments(serving, with_bias=True):
        for dtype in (None, *serving.id_dtypes):
            tokens = None if dtype is None else serving.zeros(2, dtype=dtype)
            yield functools.partial(gumbel_sample, *args, draft_tokens=tokens, **kwargs)
            for weight in _serving_weights(serving, args[0].shape[1]):
                given = {"draft_tokens": tokens, "embed_weight": weight, **kwargs}
                yield functools.partial(_embed_call, *args, **given)


def _serving_weights(serving: Serving, vocab: int) -> Iterator[Tensor]:
    if serving.markov_rank is not None:
        for dtype, aligned in product(serving.dtypes, (True, False)):
            row = serving.rows(1, serving.markov_rank, dtype=dtype, aligned=aligned)
            yield row.expand(vocab, -1)


def _embed_call(
    *rows: Any,
    logits_cache: Tensor | None = None,
    cache_col: int | Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """What compiled code calls, where the next step's embedding is looked up in the sampler."""
    cached = cache_arguments(logits_cache, cache_col) or (None, 0, None)
    kwargs |= dict(zip(("logits_cache", "cache_col", "cache_cols"), cached, strict=True))
    return _gumbel_sample_launch(*rows, **kwargs)
