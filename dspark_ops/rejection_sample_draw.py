"""The token after the accepted ones: the best noised value of each chunk, then of the row.

Where the draft ended (bonus, placeholder, greedy row), the values are the target's logits, and the
token is, bit for bit, that of ``gumbel_sample(target_logits, apply_temperature=False)``. After a
rejection they are ``log(max(P * p - q, 0))``. Such a residual may be zero everywhere, which only
all of its chunks together can tell: each chunk also stores its best by the target's logits, and the
row takes those if every value was -inf.
"""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.gumbel_combine import combine_row
from dspark_ops.noised import noised_values, over_temperature
from dspark_ops.ordered import argmax_first, max_packed, ordered_key, pack_key, unpack_id
from dspark_ops.rejection_sample_request import LOG_PREFIX, load_draft_ids, load_request
from dspark_ops.rejection_sample_residual import residual_of


@triton.jit
def store_best(best_ptr, num_partials, value, offs_v, mask_v, USE_FP64: tl.constexpr):
    """Key and id of the best value of a chunk: one word, in f64 two, ``num_partials`` apart."""
    none = -0x8000000000000000 if USE_FP64 else -0x80000000
    key, best_id = argmax_first(ordered_key(value), offs_v, mask_v, none)
    if USE_FP64:
        tl.store(best_ptr, key)
        tl.store(best_ptr + num_partials, best_id.to(tl.int64))
    else:
        tl.store(best_ptr, pack_key(key, best_id))


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_logits", "num_steps", "num_chunks"]
    + ["num_partials", "stride_ids_l", "stride_cu_b", "stride_pos_l", "stride_idx_b"],
    do_not_specialize_on_alignment=["partial_ptr", "num_sampled_ptr", "length_ptr", "steps_ptr"]
    + ["ids_ptr", "cu_num_logits_ptr", "pos_ptr", "idx_mapping_ptr", "temperature_ptr"]
    + ["seeds_ptr"],
)
def _rejection_draw_kernel(
    partial_ptr,
    num_sampled_ptr,
    length_ptr,
    steps_ptr,
    target_ptr,
    draft_ptr,
    ids_ptr,
    cu_num_logits_ptr,
    pos_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    V,
    num_rows,
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
    stride_pos_l,
    stride_idx_b,
    USE_FP64: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    TILE_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // num_chunks
    offs_v = (program % num_chunks).to(tl.int32) * TILE_V + tl.arange(0, TILE_V)
    mask_v = offs_v < V
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    accepted = tl.load(num_sampled_ptr + row) - 1
    if accepted >= 0:
        slot, _, sampled, temperature, seed, start, _ = load_request(
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
        logit_row = start + accepted
        pos = tl.load(pos_ptr + logit_row * stride_pos_l).to(tl.int64)
        target_row = target_ptr + logit_row * stride_target_l
        target = tl.load(target_row + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        value = noised_values(target, offs_v, sampled, 1.0, seed, pos, False, USE_FP64)
        best_ptr = partial_ptr + program
        store_best(best_ptr, num_partials, value, offs_v, mask_v, USE_FP64)
        if accepted < tl.load(length_ptr + row):
            if HAS_DRAFT:
                draft_row = draft_ptr + slot * stride_draft_s
                draft_row += accepted.to(tl.int64) * stride_draft_c
                draft = tl.load(draft_row + offs_v, mask=mask_v, other=float("-inf"))
                draft = over_temperature(draft.to(tl.float32), temperature)
                plane = num_rows.to(tl.int64) * num_steps
                step = row * num_steps + accepted
                log_prefix = tl.full((), 0.0, tl.float32)
                if IS_BLOCK:
                    prefix_ptr = steps_ptr + LOG_PREFIX * plane + step - 1
                    log_prefix = tl.load(prefix_ptr, mask=accepted > 0, other=0.0)
                residual = residual_of(target, draft, log_prefix, steps_ptr, plane, step)
                log_residual = tl.log(residual)  # -inf where zero
                value = noised_values(log_residual, offs_v, True, 1.0, seed, pos, False, USE_FP64)
            else:
                # P * p without the rejected id: its logarithm is the target's logit but for a
                # constant.
                rejected = load_draft_ids(ids_ptr, start, accepted, True, stride_ids_l)
                value = tl.where(offs_v == rejected, float("-inf"), value)
            residual_ptr = best_ptr + (2 if USE_FP64 else 1) * num_partials
            store_best(residual_ptr, num_partials, value, offs_v, mask_v, USE_FP64)


_rejection_draw_unaligned_kernel = unaligned(_rejection_draw_kernel)


@triton.jit(
    do_not_specialize=["num_steps", "num_chunks", "num_partials"],
    do_not_specialize_on_alignment=["tokens_ptr", "num_sampled_ptr", "length_ptr", "partial_ptr"],
)
def _rejection_finish_kernel(
    tokens_ptr,
    num_sampled_ptr,
    length_ptr,
    partial_ptr,
    num_steps,
    num_chunks,
    num_partials,
    USE_FP64: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    accepted = tl.load(num_sampled_ptr + row) - 1
    if accepted >= 0:
        words_ptr = partial_ptr + row * num_chunks
        if accepted < tl.load(length_ptr + row):
            residual_ptr = words_ptr + (2 if USE_FP64 else 1) * num_partials
            key = max_packed(residual_ptr, num_chunks, BLOCK_K)
            if not USE_FP64:
                key = key >> 32
            dtype: tl.constexpr = tl.float64 if USE_FP64 else tl.float32
            if key > ordered_key(tl.full((), float("-inf"), dtype)):
                words_ptr = residual_ptr
        if USE_FP64:
            token = combine_row(words_ptr, words_ptr + num_partials, num_chunks, BLOCK_K)
        else:
            token = unpack_id(max_packed(words_ptr, num_chunks, BLOCK_K)).to(tl.int64)
        tl.store(tokens_ptr + row * (num_steps + 1) + accepted, token)
