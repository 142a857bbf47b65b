"""What a row of rejection_sample is to its kernels: a request, its logit rows, its draft tokens.

Row b owns the logit rows ``cu_num_logits[b] .. cu_num_logits[b + 1] - 1``. Kernels meet whatever is
on the device: logit rows are clamped to [0, L), and of more than ``num_steps + 1`` only the first
count, so that nothing out of bounds is read or written. A negative draft id ends the draft.

Of a draft step a kernel needs ``p(v) = softmax(target)(v)`` and ``q(v) = softmax(draft / T)(v)``.
Both are ``exp((x - max) - log(sum(exp(x - max))))``: no step multiplies, so no FMA can make equal
rows give different bits, and a residual ``p - q`` of equal rows is zero on every device.
"""

from dspark_ops._triton import tl, triton
from dspark_ops.noise import ACCEPTANCE_STREAM, hash_finish, hash_prefix, uniform
from dspark_ops.rows import load_row

TL_ACCEPTANCE_STREAM = tl.constexpr(ACCEPTANCE_STREAM)

# What the kernels hand on about each draft step, [plane, B * num_steps] f32.
TARGET_MAX = tl.constexpr(0)
TARGET_LOG_SUM = tl.constexpr(1)
DRAFT_MAX = tl.constexpr(2)
DRAFT_LOG_SUM = tl.constexpr(3)
LOG_PREFIX = tl.constexpr(4)  # log P_i of the block rule after this step
DOUBT = tl.constexpr(5)  # its acceptance draw where R_i decides, else NOT_IN_DOUBT
NUM_PLANES = 6
NOT_IN_DOUBT = tl.constexpr(2.0)  # no draw is above 1


@triton.jit
def load_request(
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
):
    """(slot i64, live, sampled, temperature, seed, first logit row i64, number of drafts i32).

    A row without logits is not live and has -1 drafts.
    """
    # Positions belong to logit rows: what is loaded as one here is not used.
    slot, live, sampled, temperature, seed, _, _ = load_row(
        row,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        idx_mapping_ptr,
        idx_mapping_ptr,
        num_slots,
        0,
        0,
        stride_idx_b,
        0,
        0,
        False,
    )
    start = tl.load(cu_num_logits_ptr + row * stride_cu_b).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + (row + 1) * stride_cu_b).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), num_logits)
    end = tl.minimum(tl.minimum(end, num_logits), start + num_steps + 1)
    num_drafts = (tl.maximum(end, start) - start).to(tl.int32) - 1
    live &= num_drafts >= 0
    return slot, live, sampled & live, temperature, seed, start, num_drafts


@triton.jit
def load_draft_ids(ids_ptr, start, offs_n, mask_n, stride_ids_l):
    """Draft tokens of the steps ``offs_n``, int64; -1 where masked."""
    ids_ptrs = ids_ptr + (start + 1 + offs_n) * stride_ids_l
    return tl.load(ids_ptrs, mask=mask_n, other=-1).to(tl.int64)


@triton.jit
def first_of(condition, offs_n, BLOCK_N: tl.constexpr):
    """The lowest step at which ``condition`` holds, BLOCK_N if there is none."""
    return tl.min(tl.where(condition, offs_n, BLOCK_N), axis=0)


@triton.jit
def log_probability(x, row_max, log_sum):
    return (x - row_max) - log_sum


@triton.jit
def acceptance_uniform(seed, pos, step):
    """fp32 acceptance draws of int32 ``step`` at int64 ``pos``, tensors of one shape."""
    prefix = hash_prefix(seed ^ (step.to(tl.int64) << 32), pos, TL_ACCEPTANCE_STREAM)
    return uniform(hash_finish(prefix, step * 0))


@triton.jit
def store_decision(
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
    BLOCK_N: tl.constexpr,
):
    """The accepted draft tokens and -1 after them; counts that include the token still to come."""
    offs_n = tl.arange(0, 2 * BLOCK_N)  # num_steps + 1 may be one more than BLOCK_N
    ids = load_draft_ids(ids_ptr, start, offs_n, (offs_n < accepted) & live, stride_ids_l)
    tl.store(tokens_ptr + row * (num_steps + 1) + offs_n, ids, mask=offs_n <= num_steps)
    tl.store(num_sampled_ptr + row, tl.where(live, accepted + 1, 0))
    tl.store(num_rejected_ptr + row, tl.where(live, num_drafts - accepted, 0))
