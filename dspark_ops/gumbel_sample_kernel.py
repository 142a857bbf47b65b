"""The two kernels of gumbel_sample: the best token of each chunk of a row, then of the row.

Logarithms are the cost of a large batch, and only a value that can still win needs them. A
program walks a chunk of a row tile by tile. Each lane keeps its token of the highest
``gumbel_bound`` and the second highest bound it met; noise is computed once, for the lanes'
tokens. Rounding is monotonic and a bound is never below its noise, so a token left out is at most
its lane's second bound. While all of these are below the best value, the best is that of computing
every value; else, about once in 300 chunks, every value is computed. So the result is exact for any
input and chunk size.
"""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.gumbel_combine import combine_row
from dspark_ops.noise import (
    TL_GUMBEL_HIGH_STREAM,
    TL_GUMBEL_STREAM,
    gumbel_bound,
    hash_finish,
    hash_prefix,
)
from dspark_ops.noised import noised_values, over_temperature
from dspark_ops.ordered import argmax_first, max_packed, ordered_key, pack_key, unpack_id
from dspark_ops.rounding import round_to
from dspark_ops.rows import load_row


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
    APPLY_TEMPERATURE: tl.constexpr,
    USE_FP64: tl.constexpr,
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
    next_bias = next_x
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


_gumbel_sample_unaligned_kernel = unaligned(_gumbel_sample_kernel)


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
    USE_FP64: tl.constexpr,
    num_chunks,
    num_partials,
    R,
    stride_draft_b,
    stride_weight_v,
    HAS_DRAFT: tl.constexpr,
    HAS_EMBED: tl.constexpr,
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


_gumbel_sample_finish_unaligned_kernel = unaligned(_gumbel_sample_finish_kernel)
