"""gumbel_sample: add, round, cache, noise, maximum, draft column and next embedding, in two launches.

    sum[b, v] = round(logits[b, v] + bias[b, v])                      # as torch.add rounds it
    token[b]  = argmax_v(sum[b, v] / temperature[s] + gumbel(...)),   s = idx_mapping[b]
    logits_cache[s, cache_col, :V] = sum[b];  draft_tokens[b] = token[b];  embedding[b] = weight[token[b]]

Equal, bit for bit, to ``torch.add`` + ``gumbel_block_argmax`` + argmax + gather on the same device; see
there for the contract. ``draft_tokens`` gets the id of every row, inert ones too. Bytes that must move:
logits, bias and cache once each.

Logarithms are the cost of a large batch, and only a value that can still win needs them. A program
walks a chunk of a row tile by tile. Each lane keeps its token of the highest ``gumbel_bound`` and the
second highest bound it met; noise is computed once, for the lanes' tokens. Rounding is monotonic and a
bound is never below its noise, so a token left out is at most the second bound: if no lane's exceeds
the best value, which it does about once in 300 chunks, the result is that of computing every value,
otherwise every value is computed. So the result is exact for any input and chunk size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import launch_options, on_device
from dspark_ops._library import is_plain_gpu_call, register
from dspark_ops._triton import require_triton, tl, triton
from dspark_ops.gumbel_block_argmax import (
    CACHE_ARGS,
    FLAG_ARGS,
    SAMPLER_ARGS,
    cache_arguments,
    check_arguments,
    check_sampler,
    columns_ref,
    key_offset,
    noised_logits_ref,
    noised_values,
    over_temperature,
    write_cache_ref,
)
from dspark_ops.gumbel_block_argmax import sample_inputs as block_sample_inputs
from dspark_ops.gumbel_combine import combine_row
from dspark_ops.noise import (
    TL_GUMBEL_HIGH_STREAM,
    TL_GUMBEL_STREAM,
    gumbel_bound,
    hash_finish,
    hash_prefix,
)
from dspark_ops.ordered import argmax_first, max_packed, ordered_key, pack_key, unpack_id
from dspark_ops.rounding import round_to
from dspark_ops.rows import load_row, rows_ref

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
    cols = None if logits_cache is None else columns_ref(cache_col, cache_cols, idx_mapping)
    offset = key_offset(pos_offset, is_drafting)
    rows = rows_ref(idx_mapping, temperature, seeds, pos, offset, cols)
    if logits_cache is not None:
        write_cache_ref(logits_cache, logits, rows, cols)
    token = noised_logits_ref(logits, rows, apply_temperature, use_fp64).argmax(-1)
    if draft_tokens is not None:
        draft_tokens.copy_(token)
    return token


# 2 kernel


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "num_cols",
        "num_chunks",
        "tiles_per_chunk",
        "num_partials",
    ]
    + ["col", "offset", "stride_idx_b", "stride_pos_b", "stride_col_b"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "temperature_ptr", "seeds_ptr"]
    + ["pos_ptr", "col_ptr", "partial_ptr"],
)
def _gumbel_sample_kernel(
    partial_ptr,
    logits_ptr,
    bias_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    cache_ptr,
    col_ptr,
    V,
    num_slots,
    num_cols,
    num_chunks,
    tiles_per_chunk,
    num_partials,
    col,
    offset,
    stride_logits_b,
    stride_bias_b,
    stride_idx_b,
    stride_pos_b,
    stride_col_b,
    stride_cache_s,
    stride_cache_c,
    SUM_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_COL_PTR: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
    USE_FP64: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    TILE_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # one axis: the others end at 65535
    row = program // num_chunks
    first_tile = (program % num_chunks).to(tl.int32) * tiles_per_chunk
    logits_row = logits_ptr + row * stride_logits_b
    bias_row = bias_ptr + row * stride_bias_b
    offs_v = first_tile * TILE_V + tl.arange(0, TILE_V)
    mask_v = offs_v < V
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # A tile is loaded while the one before it, or the row's state, is worked on.
    next_x = tl.load(logits_row + offs_v, mask=mask_v, other=float("-inf"))
    next_bias = 0.0
    if HAS_BIAS:
        next_bias = tl.load(bias_row + offs_v, mask=mask_v, other=0.0)
    slot, live, sampled, temperature, seed, pos, column = load_row(
        row,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        pos_ptr,
        col_ptr,
        num_slots,
        col,
        offset,
        stride_idx_b,
        stride_pos_b,
        stride_col_b,
        HAS_COL_PTR,
    )
    written = live
    cache_row = cache_ptr
    if HAS_CACHE:
        written = live & (column >= 0) & (column < num_cols)
        cache_row = cache_ptr + slot * stride_cache_s + column * stride_cache_c
        seed ^= column << 32
    # The bound needs one hash: the noise's own in fp32, the complement of the high word in fp64.
    bound_prefix = hash_prefix(seed, pos, TL_GUMBEL_HIGH_STREAM if USE_FP64 else TL_GUMBEL_STREAM)

    lane_id = offs_v
    lane_x = tl.full((TILE_V,), float("-inf"), tl.float32)
    lane_bound = lane_x
    lane_second = lane_x
    last_tile = first_tile + tiles_per_chunk - 1
    for tile in range(first_tile, last_tile + 1):
        offs_v = tile * TILE_V + tl.arange(0, TILE_V)
        mask_v = offs_v < V
        x = next_x
        bias = next_bias
        offs_next = offs_v + TILE_V
        mask_next = (offs_next < V) & (tile < last_tile)
        next_x = tl.load(logits_row + offs_next, mask=mask_next, other=float("-inf"))
        if HAS_BIAS:
            next_bias = tl.load(bias_row + offs_next, mask=mask_next, other=0.0)
            x = round_to(x.to(tl.float32) + bias.to(tl.float32), SUM_DTYPE)
        if HAS_CACHE:
            tl.store(cache_row + offs_v, x, mask=mask_v & written)
        x = x.to(tl.float32)
        if tiles_per_chunk == 1:
            lane_x = x
        else:
            bound = x
            if sampled:
                if APPLY_TEMPERATURE:
                    bound = over_temperature(x, temperature)
                r = hash_finish(bound_prefix, offs_v)
                bound += gumbel_bound(r ^ 0xFFFFFFFF if USE_FP64 else r)
            bound = tl.where(bound == bound, bound, float("inf"))  # NaN wins
            lane_second = tl.maximum(lane_second, tl.minimum(bound, lane_bound))
            higher = bound > lane_bound
            lane_bound = tl.where(higher, bound, lane_bound)
            lane_x = tl.where(higher, x, lane_x)
            lane_id = tl.where(higher, offs_v, lane_id)

    none = -0x8000000000000000 if USE_FP64 else -0x80000000
    value = noised_values(
        lane_x, lane_id, sampled, temperature, seed, pos, APPLY_TEMPERATURE, USE_FP64
    )
    best_key, best_id = argmax_first(ordered_key(value), lane_id, lane_id < V, none)

    # Of a greedy row the bounds are the values: only NaN beside inf in one lane is undecided.
    second = tl.max(lane_second, axis=0)
    undecided = second == float("inf")
    if sampled & (second > float("-inf")):
        best = tl.sum(tl.where(lane_id == best_id, value, 0.0), axis=0)  # one lane is not zero
        # In fp64 the bound is a sum rounded to f32: it may lie half an ulp too low.
        undecided |= not (second + tl.abs(second) * 1.1920928955078125e-07 < best)
    if undecided:
        for tile in range(first_tile, last_tile + 1):
            offs_v = tile * TILE_V + tl.arange(0, TILE_V)
            mask_v = offs_v < V
            x = tl.load(logits_row + offs_v, mask=mask_v, other=float("-inf"))
            if HAS_BIAS:
                bias = tl.load(bias_row + offs_v, mask=mask_v, other=0.0)
                x = round_to(x.to(tl.float32) + bias.to(tl.float32), SUM_DTYPE)
            value = noised_values(
                x.to(tl.float32),
                offs_v,
                sampled,
                temperature,
                seed,
                pos,
                APPLY_TEMPERATURE,
                USE_FP64,
            )
            key, key_id = argmax_first(ordered_key(value), offs_v, mask_v, none)
            if (key > best_key) | ((key == best_key) & (key_id < best_id)):
                best_key = key
                best_id = key_id
    if USE_FP64:
        tl.store(partial_ptr + program, best_key)
        tl.store(partial_ptr + num_partials + program, best_id.to(tl.int64))
    else:
        tl.store(partial_ptr + program, pack_key(best_key, best_id))


@triton.jit(
    do_not_specialize=["num_chunks", "num_partials", "stride_draft_b"],
    do_not_specialize_on_alignment=["token_ptr", "draft_ptr", "partial_ptr"],
)
def _gumbel_sample_finish_kernel(
    token_ptr,
    draft_ptr,
    embedding_ptr,
    partial_ptr,
    weight_ptr,
    num_chunks,
    num_partials,
    R,
    stride_draft_b,
    stride_weight_v,
    HAS_DRAFT: tl.constexpr,
    HAS_EMBED: tl.constexpr,
    USE_FP64: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    keys = partial_ptr + row * num_chunks
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    if USE_FP64:
        token = combine_row(keys, keys + num_partials, num_chunks, BLOCK_K)
    else:
        token = unpack_id(max_packed(keys, num_chunks, BLOCK_K)).to(tl.int64)
    if HAS_EMBED:
        for start in range(0, R, BLOCK_R):
            offs_r = start + tl.arange(0, BLOCK_R)
            mask_r = offs_r < R
            weight = tl.load(weight_ptr + token * stride_weight_v + offs_r, mask=mask_r, other=0.0)
            tl.store(embedding_ptr + row * R + offs_r, weight, mask=mask_r)
    tl.store(token_ptr + row, token)
    if HAS_DRAFT:
        tl.store(draft_ptr + row * stride_draft_b, token.to(draft_ptr.dtype.element_ty))


# 3 launcher

# One tile for every batch, so that a new batch size compiles nothing; how many tiles a program walks
# is a run-time argument. H200, V 151936, bf16, loop of 7 steps in graph replay, us, by tiles a chunk:
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
    bias: Tensor | None,
    logits_cache: Tensor | None,
    cache_col: int,
    cache_cols: Tensor | None,
    draft_tokens: Tensor | None,
    embed_weight: Tensor | None,
) -> torch.dtype:
    """Raise for metadata that does not fit; return the dtype of the sum."""
    check_sampler(logits, idx_mapping, temperature, seeds, pos)
    num_rows, vocab = logits.shape
    device = logits.device
    dtype = logits.dtype
    if bias is not None:
        if bias.dtype not in _checks.LOGITS_DTYPES:
            _checks.check_dtype("bias", bias, _checks.LOGITS_DTYPES)
        if bias.dtype != dtype:
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
        if bias.device != device:
            _checks.check_device("bias", bias, device)
        if bias.stride(-1) != 1 and vocab > 1:
            _checks.check_last_stride("bias", bias)
    if logits_cache is not None:
        _checks.check_cache(logits_cache, temperature.shape[0], vocab, dtype, device)
        _checks.check_cache_col(cache_col, cache_cols, num_rows, device)
    if draft_tokens is not None:
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
    """What a call's metadata decides."""

    num_chunks: int
    num_partials: int
    sampler: dict[str, Any]
    finish: dict[str, Any]


def _make_plan(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    bias: Tensor | None,
    logits_cache: Tensor | None,
    cache_cols: Tensor | None,
    draft_tokens: Tensor | None,
    embed_weight: Tensor | None,
    dtype: torch.dtype,
) -> _Plan:
    num_rows, vocab = logits.shape
    tiles_per_chunk = _tiles_per_chunk(num_rows, vocab)
    num_chunks = (vocab + TILE_V * tiles_per_chunk - 1) // (TILE_V * tiles_per_chunk)
    num_partials = num_rows * num_chunks
    pdl = launch_options(logits)
    sampler = dict(
        V=vocab,
        num_slots=temperature.shape[0],
        num_cols=0,
        num_chunks=num_chunks,
        tiles_per_chunk=tiles_per_chunk,
        num_partials=num_partials,
        stride_logits_b=logits.stride(0),
        stride_bias_b=0,
        stride_idx_b=idx_mapping.stride(0),
        stride_pos_b=pos.stride(0),
        stride_col_b=0,
        stride_cache_s=0,
        stride_cache_c=0,
        SUM_DTYPE=_TL_DTYPE[dtype],
        HAS_BIAS=bias is not None,
        HAS_CACHE=logits_cache is not None,
        HAS_COL_PTR=cache_cols is not None,
        TILE_V=TILE_V,
        num_warps=NUM_WARPS,
        **pdl,
    )
    if bias is not None and bias.dim() == 2 and bias.shape[0] > 1:
        sampler["stride_bias_b"] = bias.stride(0)
    if logits_cache is not None:
        sampler["num_cols"] = logits_cache.shape[1]
        sampler["stride_cache_s"] = logits_cache.stride(0)
        sampler["stride_cache_c"] = logits_cache.stride(1)
    if cache_cols is not None and cache_cols.dim() == 1:
        sampler["stride_col_b"] = cache_cols.stride(0)
    finish = dict(
        num_chunks=num_chunks,
        num_partials=num_partials,
        R=0 if embed_weight is None else embed_weight.shape[1],
        stride_draft_b=0 if draft_tokens is None else draft_tokens.stride(0),
        stride_weight_v=0 if embed_weight is None else embed_weight.stride(0),
        HAS_DRAFT=draft_tokens is not None,
        HAS_EMBED=embed_weight is not None,
        BLOCK_K=BLOCK_K,
        BLOCK_R=BLOCK_R,
        num_warps=FINISH_WARPS,
        **pdl,
    )
    return _Plan(num_chunks, num_partials, sampler, finish)


# Checks and strides cost more host time than the rest of a call (9 of 18 us), so a call whose metadata
# was seen before skips them. Cleared when full: a server meets a few hundred batch shapes.
_plans: dict[tuple[Any, ...], _Plan] = {}
_MAX_PLANS = 4096


def _metadata(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.dtype, x.shape, x.stride(), x.get_device())


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
    key = (
        _metadata(logits),
        _metadata(idx_mapping),
        _metadata(temperature),
        _metadata(seeds),
        _metadata(pos),
        _metadata(bias),
        _metadata(logits_cache),
        _metadata(cache_cols),
        _metadata(draft_tokens),
        _metadata(embed_weight),
        cache_col < 0,
    )
    plan = _plans.get(key)
    if plan is None:
        require_triton("gumbel_sample")
        arguments = (logits, idx_mapping, temperature, seeds, pos, bias, logits_cache)
        options = (draft_tokens, embed_weight)
        dtype = _check(*arguments, cache_col, cache_cols, *options)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(*arguments, cache_cols, *options, dtype)

    num_rows = logits.shape[0]
    token = seeds.new_empty(num_rows)
    embedding = None
    if embed_weight is not None:
        embedding = embed_weight.new_empty(num_rows, embed_weight.shape[1])
    if num_rows > 0:
        partial = seeds.new_empty((2 if use_fp64 else 1) * plan.num_partials)
        with on_device(logits):
            _gumbel_sample_kernel[(plan.num_partials,)](
                partial_ptr=partial,
                logits_ptr=logits,
                bias_ptr=logits if bias is None else bias,
                idx_mapping_ptr=idx_mapping,
                temperature_ptr=temperature,
                seeds_ptr=seeds,
                pos_ptr=pos,
                cache_ptr=logits if logits_cache is None else logits_cache,
                col_ptr=pos if cache_cols is None else cache_cols,
                col=cache_col,
                offset=key_offset(pos_offset, is_drafting),
                APPLY_TEMPERATURE=apply_temperature,
                USE_FP64=use_fp64,
                **plan.sampler,
            )
            _gumbel_sample_finish_kernel[(num_rows,)](
                token_ptr=token,
                draft_ptr=token if draft_tokens is None else draft_tokens,
                embedding_ptr=token if embedding is None else embedding,
                partial_ptr=partial,
                weight_ptr=token if embed_weight is None else embed_weight,
                USE_FP64=use_fp64,
                **plan.finish,
            )
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
        logits_cache: [S, C, >= V] of the dtype of the sum, which is written to it before temperature.
            Must not overlap ``logits`` or ``bias``.
        cache_col, pos_offset, is_drafting, apply_temperature, use_fp64: as there.
        draft_tokens: int [B], any stride, written in place with the id of every row.

    Returns:
        i64 [B], ids in [0, V).

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    rows = check_arguments(logits, idx_mapping, temperature, seeds, pos, pos_offset)
    if bias is not None:
        _checks.check_is_tensor("bias", bias)
    if draft_tokens is not None:
        _checks.check_is_tensor("draft_tokens", draft_tokens)
    flags = (bias, pos_offset, is_drafting, apply_temperature, use_fp64)
    cache: tuple[Any, ...] = ()
    if logits_cache is not None or cache_col is not None:
        cache = cache_arguments(logits_cache, cache_col)
    if is_plain_gpu_call(logits):
        return _gumbel_sample_launch(*rows, *(cache or (None, 0, None)), draft_tokens, None, *flags)
    if draft_tokens is None:
        op = torch.ops.dspark.gumbel_sample_cache if cache else torch.ops.dspark.gumbel_sample
        return op.default(*rows, *cache, *flags)
    if cache:
        op = torch.ops.dspark.gumbel_sample_cache_draft
    else:
        op = torch.ops.dspark.gumbel_sample_draft
    return op.default(*rows, *cache, draft_tokens, *flags)


# 5 CPU


def _cpu(
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
    embed_weight: Tensor | None = None,
    **flags: Any,
) -> Any:
    arguments = (logits, idx_mapping, temperature, seeds, pos)
    cache = (logits_cache, cache_col, cache_cols)
    _check(*arguments, bias, *cache, draft_tokens, embed_weight)
    token = gumbel_sample_ref(
        *arguments,
        bias=bias,
        logits_cache=logits_cache,
        cache_col=cache_col,
        cache_cols=cache_cols,
        draft_tokens=draft_tokens,
        **flags,
    )
    return token if embed_weight is None else (token, embed_weight[token])


# 6 fake


def _fake(
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
    embed_weight: Tensor | None = None,
    **flags: Any,
) -> Any:
    arguments = (logits, idx_mapping, temperature, seeds, pos)
    cache = (logits_cache, cache_col, cache_cols)
    _check(*arguments, bias, *cache, draft_tokens, embed_weight)
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


# 7 samples


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
