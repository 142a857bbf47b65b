"""Third kernel of top_k_top_p_: the bracket with which each row's search begins.

For k up to the number of groups: at least k logits are at or above the k-th largest maximum of a
group, and rarely many more. Else what the sums above the sample's pivots leave of the whole row, of
which what lies ``log(V / ((1 - p) * total))`` and more below the largest logit has at most the mass
1 - p. A bracket that still has too many tokens gets new pivots, for one more pass of sums.
"""

from dspark_ops._triton import tl, triton
from dspark_ops.ordered import ordered_key
from dspark_ops.top_k_top_p_state import (
    COUNT,
    CRITERION,
    CUT_ID,
    CUT_KEY,
    DONE,
    FILTERED,
    HIGH,
    LOW,
    MASS,
    NAN_KEY,
    NEG_INF_KEY,
    NUM_CANDIDATES,
    REFERENCE,
    SUMS,
    TOP,
    WAITS,
    load_k,
    load_p,
    narrowed,
    value_of,
)

# Tokens of a bracket from which one more pass is worth its time: by the sample.
MANY = tl.constexpr(8192)


@triton.jit
def _lowest_for_mass(top, total, p, vocab):
    """A key below the threshold of mass ``p``, given at most the mass ``total`` (in exp(-top))."""
    depth = tl.log(vocab / (tl.maximum(1.0 - p, 1e-8) * total)) + 0.01
    return ordered_key(top - tl.minimum(tl.maximum(depth, 0.01), 31.0)) - 1


@triton.jit
def _num_groups_from(bound, group_keys_ptr, num_groups, BLOCK_G: tl.constexpr):
    """How many of the groups' keys, as unsigned numbers in their order, are at least ``bound``."""
    offs = tl.arange(0, BLOCK_G)
    count = tl.full((BLOCK_G,), 0, tl.int32)
    for start in range(0, num_groups, BLOCK_G):
        mask = start + offs < num_groups
        keys = tl.load(group_keys_ptr + start + offs, mask=mask, other=NEG_INF_KEY)
        count += (keys.to(tl.int64) + 0x80000000 >= bound).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _lowest_for_count(group_keys_ptr, num_groups, k, BLOCK_G: tl.constexpr):
    """A key below the k-th largest of at least k groups' keys."""
    lowest = tl.full((), 0, tl.int64)
    # Sign, exponent and 4 bits of the mantissa: a closer bracket would not be worth the time.
    for step in range(0, 13):
        trial = lowest + (tl.full((), 0x80000000, tl.int64) >> step)
        if _num_groups_from(trial, group_keys_ptr, num_groups, BLOCK_G) >= k:
            lowest = trial
    return tl.maximum((lowest - 0x80000001).to(tl.int32), NEG_INF_KEY)


@triton.jit
def _spread(high, low, top, NUM_PIVOTS: tl.constexpr):
    """Keys [NUM_PIVOTS] inside (low, high], even in their distance from the largest logit.

    A bracket far longer than its distance, as one down to -inf, gets pivots from its upper end on,
    each step twice the one before.
    """
    step = (tl.arange(0, NUM_PIVOTS) + 1).to(tl.float32)
    nearest = top - value_of(high)
    farthest = top - value_of(low)
    even = nearest + (farthest - nearest) * (step / (NUM_PIVOTS + 1))
    unit = tl.maximum(nearest, 0.0625)
    doubling = nearest + unit * tl.exp2(step - 6.0)
    return ordered_key(top - tl.where(farthest > nearest + unit * 16, doubling, even))


@triton.jit(
    do_not_specialize=["V", "num_chunks", "num_groups", "stride_k_b", "stride_p_b"],
    do_not_specialize_on_alignment=["state_ptr", "new_pivots_ptr", "pivots_ptr", "ranks_ptr"]
    + ["sums_ptr", "totals_ptr", "maxima_ptr", "first_nan_ptr", "num_finite_ptr"]
    + ["group_keys_ptr", "k_ptr", "p_ptr"],
)
def _top_k_top_p_begin_kernel(
    state_ptr,
    new_pivots_ptr,
    pivots_ptr,
    ranks_ptr,
    sums_ptr,
    totals_ptr,
    maxima_ptr,
    first_nan_ptr,
    num_finite_ptr,
    group_keys_ptr,
    k_ptr,
    p_ptr,
    V,
    num_chunks,
    num_groups,
    stride_k_b,
    stride_p_b,
    IS_SECOND: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state = state_ptr + row * NUM_WORDS
    k = load_k(k_ptr, row, stride_k_b, HAS_K)
    k_on = (k > 0) & (k < V)
    p = load_p(p_ptr, row, stride_p_b, HAS_P)
    p_on = p < 1
    criterion = tl.load(state + CRITERION)
    had_sums = tl.load(state + SUMS) != 0
    reference = tl.load(state + REFERENCE).to(tl.float32, bitcast=True)
    low = NEG_INF_KEY + 0
    if IS_SECOND:
        top = tl.load(state + TOP).to(tl.float32, bitcast=True)
        low = tl.maximum(low, tl.load(state + CUT_KEY) - 1)
    elif tl.load(state + FILTERED) != 0:
        offs_c = tl.arange(0, BLOCK_C)
        largest = tl.full((BLOCK_C,), float("-inf"), tl.float32)
        first_nan = tl.full((BLOCK_C,), 0x7FFFFFFF, tl.int32)
        num_finite = tl.full((BLOCK_C,), 0, tl.int32)
        for start in range(0, num_chunks, BLOCK_C):
            chunks = row * num_chunks + start + offs_c
            mask = start + offs_c < num_chunks
            chunk_max = tl.load(maxima_ptr + chunks, mask=mask, other=float("-inf"))
            largest = tl.maximum(largest, chunk_max)
            nans = tl.load(first_nan_ptr + chunks, mask=mask, other=0x7FFFFFFF)
            first_nan = tl.minimum(first_nan, nans)
            if HAS_K:
                num_finite += tl.load(num_finite_ptr + chunks, mask=mask, other=0)
        top = tl.max(largest, axis=0)
        row_nan = tl.min(first_nan, axis=0)
        cut_key = NEG_INF_KEY + 0
        cut_id = -1
        waits = 0
        if row_nan < V:
            cut_key = NAN_KEY + 0
            cut_id = row_nan
            criterion = DONE + 0
        elif top == float("-inf"):
            criterion = DONE + 0
        elif HAS_K:
            if k_on:
                if k < tl.sum(num_finite, axis=0):
                    criterion = COUNT + 0
                    waits = p_on.to(tl.int32)
                else:
                    # All that are above -inf stay: a search for p, if any, has no sums yet.
                    had_sums = False
                    criterion = tl.where(p_on, MASS, DONE)
        tl.store(state + TOP, top.to(tl.int32, bitcast=True))
        tl.store(state + CUT_KEY, cut_key)
        tl.store(state + CUT_ID, cut_id)
        tl.store(state + WAITS, waits)
        tl.store(state + CRITERION, criterion)
    else:
        top = float("-inf")
        criterion = DONE + 0

    sums_again = 0
    if criterion != DONE:
        high = ordered_key(top)
        wide = True
        if criterion == MASS:
            if top == float("inf"):
                low = high - 1
                wide = False
        elif HAS_K:
            groups = group_keys_ptr + row * num_groups
            if k <= num_groups:
                above_neg_inf = tl.full((), 0x80000001 + NEG_INF_KEY, tl.int64)
                if _num_groups_from(above_neg_inf, groups, num_groups, BLOCK_G) >= k:
                    low = _lowest_for_count(groups, num_groups, k, BLOCK_G)
                    wide = False
        if wide:
            total = 1.0
            if had_sums & (top < reference + 60):
                high, low, total = narrowed(
                    high,
                    low,
                    criterion,
                    k,
                    p,
                    pivots_ptr + row * NUM_PIVOTS,
                    sums_ptr + row * num_chunks * NUM_PIVOTS,
                    totals_ptr + row * num_chunks,
                    num_chunks,
                    NUM_PIVOTS,
                    BLOCK_C,
                )
                total = tl.maximum(total * tl.exp(reference - top) * 0.999, 1.0)
                offs_j = row * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)
                pivots = tl.load(pivots_ptr + offs_j)
                ranks = tl.load(ranks_ptr + offs_j)
                above_low = tl.max(tl.where(pivots >= low, ranks, 0), axis=0)
                above_high = tl.max(tl.where(pivots >= high, ranks, 0), axis=0)
                wide = (low < tl.min(pivots, axis=0)) | (above_low - above_high > MANY)
            if wide & (top < float("inf")):
                if criterion == MASS:
                    low = tl.maximum(low, _lowest_for_mass(top, total, p, V))
                sums_again = 1
                offs_j = row * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)
                tl.store(new_pivots_ptr + offs_j, _spread(high, low, top, NUM_PIVOTS))
                tl.store(state + REFERENCE, top.to(tl.int32, bitcast=True))
        tl.store(state + HIGH, high)
        tl.store(state + LOW, low)
        tl.store(state + NUM_CANDIDATES, 0)
    tl.store(state + SUMS, sums_again)
