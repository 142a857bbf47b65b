"""First kernel of top_k_top_p_: guesses where each row's threshold is, from a sample of the row.

A histogram of the sample, by distance from its largest, estimates count and mass above any value.
Pivots are put evenly around the estimate, as far as it may err (2.5 standard deviations), and some
at low ranks: a peaked row has most of its mass in few tokens, which a sample rarely has. A guess
decides how long the search takes, never what it finds.
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
    MASS,
    NAN_KEY,
    NEG_INF_KEY,
    REFERENCE,
    SUMS,
    TOP,
    WAITS,
    load_k,
    load_p,
    within_cut,
)


@triton.jit
def _distances(x, valid, top, criterion, goal, NUM_BINS: tl.constexpr, NUM_PIVOTS: tl.constexpr):
    """(distance of each pivot from ``top``, tokens of the sample above it), [NUM_PIVOTS]."""
    lowest = tl.min(tl.where(valid, x, float("inf")), axis=0)
    width = tl.maximum(tl.minimum(top - lowest, 32.0), 1e-6) / NUM_BINS
    bins = tl.minimum((top - tl.where(valid, x, top)) / width, NUM_BINS - 1.0).to(tl.int32)
    offs = tl.arange(0, NUM_BINS)
    counts = tl.histogram(bins, NUM_BINS).to(tl.float32)
    # The invalid were put into the first bin.
    num_valid = tl.sum(valid.to(tl.int32), axis=0)
    num_invalid = x.shape[0] - num_valid
    counts -= tl.where(offs == 0, num_invalid.to(tl.float32), 0.0)
    ranks = tl.cumsum(counts, axis=0)
    if criterion == MASS:
        weights = tl.exp((offs.to(tl.float32) + 0.5) * -width)
        sums = tl.cumsum(counts * weights, axis=0)
        total = tl.sum(counts * weights, axis=0)
        squares = tl.sum(counts * weights * weights, axis=0)
        share = goal
        goal = share * total
        error = 2.5 * tl.sqrt((share * (1 - share) + 1e-4) * squares)
    else:
        sums = ranks
        error = 2.5 * tl.sqrt(goal) + 2
    nearest = tl.sum((sums < goal - error).to(tl.int32), axis=0)
    farthest = tl.sum((sums < goal + error).to(tl.int32), axis=0) + 1
    offs_j = tl.arange(0, NUM_PIVOTS)
    NUM_RANKS: tl.constexpr = 2
    step = (tl.maximum(offs_j - NUM_RANKS, 0)).to(tl.float32) / (NUM_PIVOTS - 1 - NUM_RANKS)
    edges = nearest + (farthest - nearest) * step
    for j in tl.static_range(NUM_RANKS):
        at_rank = tl.sum((ranks < 16 << (4 * j)).to(tl.int32), axis=0)
        edges = tl.where(offs_j == j, at_rank.to(tl.float32), edges)
    below_edge = (offs[None, :] < edges[:, None]).to(tl.float32)
    return edges * width, tl.sum(below_edge * counts[None, :], axis=1)


@triton.jit(
    do_not_specialize=["V", "num_groups", "stride_logits_b", "stride_k_b", "stride_p_b"],
    do_not_specialize_on_alignment=["state_ptr", "pivots_ptr", "ranks_ptr"]
    + ["logits_ptr", "k_ptr", "p_ptr"],
)
def _top_k_top_p_sample_kernel(
    state_ptr,
    pivots_ptr,
    ranks_ptr,
    logits_ptr,
    k_ptr,
    p_ptr,
    V,
    num_groups,
    stride_logits_b,
    stride_k_b,
    stride_p_b,
    IS_SECOND: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    SAMPLE: tl.constexpr,
    RUN: tl.constexpr,
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
    criterion = 0
    cut_key = NEG_INF_KEY + 0
    cut_id = -1
    if IS_SECOND:
        if tl.load(state + WAITS) != 0:
            criterion = MASS + 0
            cut_key = tl.load(state + CUT_KEY)
            cut_id = tl.load(state + CUT_ID)
    else:
        tl.store(state + FILTERED, (k_on | p_on).to(tl.int32))
        tl.store(state + WAITS, 0)
        tl.store(state + TOP, 0)
        tl.store(state + CUT_KEY, cut_key)
        tl.store(state + CUT_ID, cut_id)
        if k_on:
            # Up to this k the groups' maxima will tell more than a sample.
            if k > num_groups:
                criterion = COUNT + 0
        elif p_on:
            criterion = MASS + 0
    sums = criterion != DONE
    reference = 0
    if sums:
        offs = tl.arange(0, SAMPLE)
        ids = offs
        if V > SAMPLE:
            # Runs of the row, evenly spread.
            run = (offs // RUN).to(tl.int64)
            ids = (run * (V - RUN) // (SAMPLE // RUN - 1)).to(tl.int32) + offs % RUN
        mask = ids < V
        x = tl.load(logits_ptr + row * stride_logits_b + ids, mask=mask, other=float("-inf"))
        key = ordered_key(x)
        valid = mask & (key != NAN_KEY)
        if IS_SECOND:
            valid &= within_cut(key, ids, cut_key, cut_id)
        else:
            valid &= key > NEG_INF_KEY
        top = tl.max(tl.where(valid, x, float("-inf")), axis=0)
        sums = (top > float("-inf")) & (top < float("inf"))
        if sums:
            goal = p
            if criterion == COUNT:
                goal = k.to(tl.float32) * (tl.minimum(V, SAMPLE).to(tl.float32) / V)
            distances, above = _distances(x, valid, top, criterion, goal, NUM_BINS, NUM_PIVOTS)
            offs_j = row * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)
            tl.store(pivots_ptr + offs_j, ordered_key(top - distances))
            scale = V / tl.minimum(V, SAMPLE).to(tl.float32)
            tl.store(ranks_ptr + offs_j, (above * scale).to(tl.int32))
            reference = top.to(tl.int32, bitcast=True)
    tl.store(state + REFERENCE, reference)
    tl.store(state + CRITERION, criterion)
    tl.store(state + SUMS, sums.to(tl.int32))
