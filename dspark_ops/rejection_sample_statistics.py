"""First kernel of rejection_sample: the one pass over target and draft logits.

A program takes a chunk of a draft step: of a sampled row the maximum and the sum of exponentials of
the target's logits, and the same of the draft's over temperature; of a greedy row the target's best
id. Chunks have one size for every batch and are combined in one order, so that a row's
probabilities have the same bits in any batch. A NaN, or +inf, makes the sum of its chunk NaN.
"""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.noised import over_temperature
from dspark_ops.ordered import argmax_first, ordered_key, pack_key
from dspark_ops.rejection_sample_request import first_of, load_draft_ids, load_request


@triton.jit
def exponent_shift(row_max):
    """What to subtract before exp: 0 for a part of only -inf, whose exponentials are then 0."""
    return tl.where(row_max > float("-inf"), row_max, 0.0)


@triton.jit
def chunk_statistics(x):
    """int64 with the bits of (maximum, sum of exp(x - maximum)) of f32 ``x``."""
    chunk_max = tl.max(x, axis=0)
    chunk_sum = tl.sum(tl.exp(x - exponent_shift(chunk_max)), axis=0)
    high = chunk_max.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | chunk_sum.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def combine_statistics(
    words_ptr, steps, mask_n, num_chunks, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(maximum, sum of exponentials) [BLOCK_N] of the chunks of int64 ``steps``."""
    row_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    row_sum = tl.full((BLOCK_N,), 0.0, tl.float32)
    for first in range(0, num_chunks, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        mask = mask_n[:, None] & (offs_k < num_chunks)[None, :]
        offsets = steps[:, None] * num_chunks + offs_k[None, :]
        words = tl.load(words_ptr + offsets, mask=mask, other=0)
        chunk_max = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        chunk_max = tl.where(mask, chunk_max, float("-inf"))
        chunk_sum = words.to(tl.uint32).to(tl.float32, bitcast=True)  # 0 where masked
        new_max = tl.maximum(row_max, tl.max(chunk_max, axis=1))
        shift = exponent_shift(new_max)
        scaled = chunk_sum * tl.exp(chunk_max - shift[:, None])
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(scaled, axis=1)
        row_max = new_max
    return row_max, row_sum


@triton.jit
def combine_best(
    words_ptr, steps, mask_n, num_chunks, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The largest word of ``pack_key`` [BLOCK_N] of the chunks of int64 ``steps``."""
    best = tl.full((BLOCK_N,), -0x8000000000000000, tl.int64)
    for first in range(0, num_chunks, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        mask = mask_n[:, None] & (offs_k < num_chunks)[None, :]
        offsets = steps[:, None] * num_chunks + offs_k[None, :]
        words = tl.load(words_ptr + offsets, mask=mask, other=-0x8000000000000000)
        best = tl.maximum(best, tl.max(words, axis=1))
    return best


@triton.jit(
    do_not_specialize=["num_slots", "num_logits", "num_steps", "num_chunks", "num_partials"]
    + ["stride_ids_l", "stride_cu_b", "stride_idx_b"],
    do_not_specialize_on_alignment=["partial_ptr", "ids_ptr", "cu_num_logits_ptr"]
    + ["idx_mapping_ptr", "temperature_ptr", "seeds_ptr"],
)
def _rejection_statistics_kernel(
    partial_ptr,
    target_ptr,
    draft_ptr,
    ids_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    V,
    num_slots,
    num_logits,
    num_steps,
    num_chunks,
    num_partials,
    stride_target_l,
    stride_draft_s,
    stride_draft_c,
    stride_ids_l,
    stride_cu_b,
    stride_idx_b,
    HAS_DRAFT: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # one axis: the others end at 65535
    chunk = (program % num_chunks).to(tl.int32)
    row = program // num_chunks // num_steps
    step = (program // num_chunks % num_steps).to(tl.int32)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot, live, sampled, temperature, _, start, num_drafts = load_request(
        row,
        cu_num_logits_ptr,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        num_slots,
        num_logits,
        num_steps,
        stride_cu_b,
        stride_idx_b,
    )
    offs_n = tl.arange(0, BLOCK_N)
    ids = load_draft_ids(ids_ptr, start, offs_n, offs_n < num_drafts, stride_ids_l)
    if live & (step < first_of(ids < 0, offs_n, BLOCK_N)):
        offs_v = chunk * CHUNK_V + tl.arange(0, CHUNK_V)
        mask_v = offs_v < V
        target_row = target_ptr + (start + step) * stride_target_l
        target = tl.load(target_row + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        if sampled:
            if HAS_DRAFT:
                draft_row = draft_ptr + slot * stride_draft_s + step.to(tl.int64) * stride_draft_c
                draft = tl.load(draft_row + offs_v, mask=mask_v, other=float("-inf"))
                draft = over_temperature(draft.to(tl.float32), temperature)
                tl.store(partial_ptr + num_partials + program, chunk_statistics(draft))
            tl.store(partial_ptr + program, chunk_statistics(target))
        else:
            key, best_id = argmax_first(ordered_key(target), offs_v, mask_v, -0x80000000)
            tl.store(partial_ptr + program, pack_key(key, best_id))


_rejection_statistics_unaligned_kernel = unaligned(_rejection_statistics_kernel)
