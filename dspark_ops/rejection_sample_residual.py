"""The residual of rejection_sample, and the block rule's R_i: its sum where a step is in doubt.

    residual(v) = max(P * p(v) - q(v), 0)

P is 1 for the token-wise rule, and P_i after i tokens for the block rule.
"""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.noised import over_temperature
from dspark_ops.rejection_sample_decide import block_bar
from dspark_ops.rejection_sample_request import (
    DOUBT,
    DRAFT_LOG_SUM,
    DRAFT_MAX,
    LOG_PREFIX,
    NOT_IN_DOUBT,
    TARGET_LOG_SUM,
    TARGET_MAX,
    load_request,
    log_probability,
    store_decision,
)


@triton.jit
def residual_of(target, draft, log_prefix, steps_ptr, plane, step):
    """f32 residual at int64 ``step``, over all rows, of logits, the draft's over temperature."""
    target_max = tl.load(steps_ptr + TARGET_MAX * plane + step)
    target_log_sum = tl.load(steps_ptr + TARGET_LOG_SUM * plane + step)
    draft_max = tl.load(steps_ptr + DRAFT_MAX * plane + step)
    draft_log_sum = tl.load(steps_ptr + DRAFT_LOG_SUM * plane + step)
    scaled_p = tl.exp(log_probability(target, target_max, target_log_sum - log_prefix))
    return tl.maximum(scaled_p - tl.exp(log_probability(draft, draft_max, draft_log_sum)), 0.0)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_logits", "num_steps", "num_chunks"]
    + ["stride_cu_b", "stride_idx_b"],
    do_not_specialize_on_alignment=["mass_ptr", "steps_ptr", "cu_num_logits_ptr"]
    + ["idx_mapping_ptr", "temperature_ptr", "seeds_ptr"],
)
def _rejection_mass_kernel(
    mass_ptr,
    steps_ptr,
    target_ptr,
    draft_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    V,
    num_rows,
    num_slots,
    num_logits,
    num_steps,
    num_chunks,
    stride_target_l,
    stride_draft_s,
    stride_draft_c,
    stride_cu_b,
    stride_idx_b,
    LAUNCH_PDL: tl.constexpr,
    CHUNK_V: tl.constexpr,
):
    """A chunk's part of R_i for each step in doubt; the residual is that of the step after it."""
    program = tl.program_id(0).to(tl.int64)
    chunk = (program % num_chunks).to(tl.int32)
    step = program // num_chunks  # over all rows
    row = step // num_steps
    plane = num_rows.to(tl.int64) * num_steps
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(steps_ptr + DOUBT * plane + step) < NOT_IN_DOUBT:
        slot, _, _, temperature, _, start, _ = load_request(
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
        offs_v = chunk * CHUNK_V + tl.arange(0, CHUNK_V)
        mask_v = offs_v < V
        next_step = step % num_steps + 1
        target_row = target_ptr + (start + next_step) * stride_target_l
        draft_row = draft_ptr + slot * stride_draft_s + next_step * stride_draft_c
        target = tl.load(target_row + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        draft = tl.load(draft_row + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        draft = over_temperature(draft, temperature)
        log_prefix = tl.load(steps_ptr + LOG_PREFIX * plane + step)
        residual = residual_of(target, draft, log_prefix, steps_ptr, plane, step + 1)
        tl.store(mass_ptr + program, tl.sum(residual, axis=0))


_rejection_mass_unaligned_kernel = unaligned(_rejection_mass_kernel)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "num_logits", "num_steps", "num_chunks"]
    + ["stride_ids_l", "stride_cu_b", "stride_idx_b"],
    do_not_specialize_on_alignment=["tokens_ptr", "num_sampled_ptr", "num_rejected_ptr"]
    + ["steps_ptr", "mass_ptr", "ids_ptr", "cu_num_logits_ptr", "idx_mapping_ptr"]
    + ["temperature_ptr", "seeds_ptr"],
)
def _rejection_extend_kernel(
    tokens_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    steps_ptr,
    mass_ptr,
    ids_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    num_rows,
    num_slots,
    num_logits,
    num_steps,
    num_chunks,
    stride_ids_l,
    stride_cu_b,
    stride_idx_b,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Accept up to the last step in doubt that R_i accepts: all of them lie behind those that are
    accepted already."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    steps = row * num_steps + offs_n
    plane = num_rows.to(tl.int64) * num_steps
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    doubt_ptrs = steps_ptr + DOUBT * plane + steps
    u = tl.load(doubt_ptrs, mask=offs_n < num_steps, other=NOT_IN_DOUBT)
    in_doubt = u < NOT_IN_DOUBT
    if tl.min(u, axis=0) < NOT_IN_DOUBT:
        rest = tl.full((BLOCK_N,), 0.0, tl.float32)
        for first in range(0, num_chunks, BLOCK_K):
            offs_k = first + tl.arange(0, BLOCK_K)
            mask = in_doubt[:, None] & (offs_k < num_chunks)[None, :]
            offsets = steps[:, None] * num_chunks + offs_k[None, :]
            rest += tl.sum(tl.load(mass_ptr + offsets, mask=mask, other=0.0), axis=1)
        log_prefix = tl.load(steps_ptr + LOG_PREFIX * plane + steps, mask=in_doubt, other=0.0)
        bar = block_bar(tl.exp(log_prefix), rest)
        accepted = tl.max(tl.where(in_doubt & (u <= bar), offs_n + 1, 0), axis=0)
        if accepted > 0:
            _, live, _, _, _, start, num_drafts = load_request(
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
            store_decision(
                tokens_ptr,
                num_sampled_ptr,
                num_rejected_ptr,
                ids_ptr,
                row,
                start,
                live,
                num_drafts,
                accepted,
                num_steps,
                stride_ids_l,
                BLOCK_N,
            )
