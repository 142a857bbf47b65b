"""How many draft tokens rejection_sample accepts: one program a row.

A draft step whose p or q has no finite sum (NaN or +inf among the logits, or only -inf) ends the
draft as a placeholder does, and the target gives the token. For the token-wise rule that is what
the formula says: the draw is compared with NaN and the residual is NaN. For the block rule it is
``R_i = P_i``, the residual against no draft at all, which keeps the law of the tokens before it.

The block rule takes the last i with ``u_i <= h_i``. As ``R_i <= P_i``, ``h_i <= P_i``, and ``h_i``
is 1 where ``P_i`` is, and ``P_g`` at the end: only other steps with ``u_i <= P_i``, behind the last
that is accepted so, are *in doubt*. Of these alone R_i is summed, which takes another pass over
target and draft logits (``rejection_sample_residual.py``).
"""

from dspark_ops._triton import tl, triton
from dspark_ops.noised import over_temperature
from dspark_ops.ordered import unpack_id
from dspark_ops.rejection_sample_request import (
    DOUBT,
    DRAFT_LOG_SUM,
    DRAFT_MAX,
    LOG_PREFIX,
    NOT_IN_DOUBT,
    TARGET_LOG_SUM,
    TARGET_MAX,
    acceptance_uniform,
    first_of,
    load_draft_ids,
    load_request,
    log_probability,
    store_decision,
)
from dspark_ops.rejection_sample_statistics import combine_best, combine_statistics


@triton.jit
def is_probability(row_sum):
    """Whether a sum of exponentials is that of a distribution; NaN is not."""
    return (row_sum > 0.0) & (row_sum < float("inf"))


@triton.jit
def pick(x, offs_n, step):
    return tl.sum(tl.where(offs_n == step, x, 0.0), axis=0)


@triton.jit
def block_bar(prefix, rest):
    """h_i of P_i and R_i, with 0/0 = 1."""
    denominator = rest + (1.0 - prefix)
    return tl.where(denominator > 0.0, rest / denominator, 1.0)


@triton.jit(
    do_not_specialize=["V", "num_rows", "num_slots", "num_logits", "num_steps", "num_chunks"]
    + ["num_partials", "stride_target_l", "stride_draft_s", "stride_draft_c", "stride_ids_l"]
    + ["stride_cu_b", "stride_pos_l", "stride_idx_b"],
    do_not_specialize_on_alignment=["tokens_ptr", "num_sampled_ptr", "num_rejected_ptr"]
    + ["length_ptr", "steps_ptr", "partial_ptr", "target_ptr", "draft_ptr", "ids_ptr"]
    + ["cu_num_logits_ptr", "pos_ptr", "idx_mapping_ptr", "temperature_ptr", "seeds_ptr"],
)
def _rejection_decide_kernel(
    tokens_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    length_ptr,
    steps_ptr,
    partial_ptr,
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
    HAS_DRAFT: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Accepted tokens, counts, and ``length``: how many tokens the draft has, or, of a row whose
    last token comes from the target whatever is accepted, how many are accepted."""
    row = tl.program_id(0).to(tl.int64)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot, live, sampled, temperature, seed, start, num_drafts = load_request(
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
    ids = load_draft_ids(ids_ptr, start, offs_n, (offs_n < num_drafts) & live, stride_ids_l)
    length = first_of(ids < 0, offs_n, BLOCK_N)
    is_draft = offs_n < length
    steps = row * num_steps + offs_n
    plane = num_rows.to(tl.int64) * num_steps
    doubt = tl.full((BLOCK_N,), NOT_IN_DOUBT, tl.float32)
    if sampled:
        target_max, target_sum = combine_statistics(
            partial_ptr, steps, is_draft, num_chunks, BLOCK_N, BLOCK_K
        )
        is_sound = is_probability(target_sum)
        is_known = is_draft & (ids < V)
        target_ptrs = target_ptr + (start + offs_n) * stride_target_l + ids
        target = tl.load(target_ptrs, mask=is_known, other=float("-inf")).to(tl.float32)
        target_log_sum = tl.log(target_sum)
        log_p = log_probability(target, target_max, target_log_sum)
        log_ratio = log_p
        if HAS_DRAFT:
            draft_max, draft_sum = combine_statistics(
                partial_ptr + num_partials, steps, is_draft, num_chunks, BLOCK_N, BLOCK_K
            )
            is_sound &= is_probability(draft_sum)
            draft_row = draft_ptr + slot * stride_draft_s
            draft_ptrs = draft_row + offs_n.to(tl.int64) * stride_draft_c + ids
            draft = tl.load(draft_ptrs, mask=is_known, other=float("-inf")).to(tl.float32)
            draft = over_temperature(draft, temperature)
            draft_log_sum = tl.log(draft_sum)
            log_ratio = log_p - log_probability(draft, draft_max, draft_log_sum)
            # p = q = 0 is rejected, as is an id that the vocabulary does not have.
            log_ratio = tl.where(log_p > float("-inf"), log_ratio, float("-inf"))
            step_ptrs = steps_ptr + steps
            tl.store(step_ptrs + TARGET_MAX * plane, target_max, mask=is_draft)
            tl.store(step_ptrs + TARGET_LOG_SUM * plane, target_log_sum, mask=is_draft)
            tl.store(step_ptrs + DRAFT_MAX * plane, draft_max, mask=is_draft)
            tl.store(step_ptrs + DRAFT_LOG_SUM * plane, draft_log_sum, mask=is_draft)
        length = tl.minimum(length, first_of(is_draft & (is_sound == 0), offs_n, BLOCK_N))
        is_draft = offs_n < length
        pos = tl.load(pos_ptr + (start + offs_n) * stride_pos_l, mask=is_draft, other=0)
        u = acceptance_uniform(seed, pos.to(tl.int64), offs_n)
        if IS_BLOCK:
            log_prefix = tl.full((BLOCK_N,), 0.0, tl.float32)
            log_next = tl.full((BLOCK_N,), float("-inf"), tl.float32)  # log p of the next token
            prefix = tl.full((), 0.0, tl.float32)
            for step in range(0, length):
                ratio = pick(log_ratio, offs_n, step)
                # P = 0 stays 0, also where q = 0.
                is_zero = prefix == float("-inf")
                prefix = tl.where(is_zero, prefix, tl.minimum(prefix + ratio, 0.0))
                log_prefix = tl.where(offs_n == step, prefix, log_prefix)
                if not HAS_DRAFT:
                    if step + 1 < length:
                        next_p = pick(log_p, offs_n, step + 1)
                        log_next = tl.where(offs_n == step, next_p, log_next)
            prefix_p = tl.exp(log_prefix)
            if HAS_DRAFT:
                is_last = offs_n == length - 1
                certain = (log_prefix == 0.0) | (is_last & (u <= prefix_p))
                accepted = tl.max(tl.where(is_draft & certain, offs_n + 1, 0), axis=0)
                open_step = is_draft & (is_last == 0) & (offs_n >= accepted)
                doubt = tl.where(open_step & (u <= prefix_p), u, NOT_IN_DOUBT)
                tl.store(steps_ptr + LOG_PREFIX * plane + steps, log_prefix, mask=is_draft)
            else:
                bar = block_bar(prefix_p, prefix_p * (1.0 - tl.exp(log_next)))
                accepted = tl.max(tl.where(is_draft & (u <= bar), offs_n + 1, 0), axis=0)
        else:
            accepts = is_draft & (u < tl.exp(log_ratio))
            accepted = first_of(accepts == 0, offs_n, BLOCK_N)
    else:
        best = combine_best(partial_ptr, steps, is_draft, num_chunks, BLOCK_N, BLOCK_K)
        accepts = is_draft & (ids == unpack_id(best).to(tl.int64))
        accepted = first_of(accepts == 0, offs_n, BLOCK_N)
        length = accepted
    if IS_BLOCK and HAS_DRAFT:
        tl.store(steps_ptr + DOUBT * plane + steps, doubt, mask=offs_n < num_steps)
    tl.store(length_ptr + row, length)
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
