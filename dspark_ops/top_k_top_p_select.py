"""Sixth kernel of top_k_top_p_: the exact threshold of each row, among the candidates.

The largest key with enough at or above it, then, if not all that have it stay, the id up to which
they do: each by dividing an interval into five parts a step. A row whose search was for k and has
nothing above its bracket ends with the search for p on the same candidates.
"""

from dspark_ops._triton import tl, triton
from dspark_ops.mass import mass_of
from dspark_ops.ordered import ordered_key
from dspark_ops.top_k_top_p_state import (
    COUNT,
    CRITERION,
    CUT_ID,
    CUT_KEY,
    DONE,
    LAST_HIGH,
    LAST_LOW,
    NUM_CANDIDATES,
    TOP,
    WAITS,
    load_k,
    load_p,
    value_of,
    within_cut,
)

PARTS = tl.constexpr(4)  # a power of two; an interval shrinks to a fifth a step
NO_KEY = tl.constexpr(-0x80000000)


@triton.jit
def _load(first, candidates, TAKES_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(keys, ids, masses) [1, BLOCK] of candidates, of the row if they did not fit.

    The key of a lane that has no candidate is -2^31, that of no logit, and its mass is 0.
    """
    keys_ptr, ids_ptr, masses_ptr, row_ptr, num, reads_row, high, low, top, shift = candidates
    offs = (first + tl.arange(0, BLOCK))[None, :]
    mask = offs < num
    ids = offs
    if reads_row:
        x = tl.load(row_ptr + offs, mask=mask, other=float("-inf"))
        keys = ordered_key(x)
        mask &= (keys > low) & (keys <= high)
        masses = mask.to(tl.int64)
        if TAKES_MASS:
            masses = tl.where(mask, mass_of(x, top, shift), 0)
        keys = tl.where(mask, keys, NO_KEY)
    else:
        keys = tl.load(keys_ptr + offs, mask=mask, other=NO_KEY)
        ids = tl.load(ids_ptr + offs, mask=mask, other=0)
        masses = mask.to(tl.int64)
        if TAKES_MASS:
            masses = tl.load(masses_ptr + offs, mask=mask, other=0)
    return keys, ids, masses


@triton.jit
def _load_kept(
    first,
    candidates,
    cut_key,
    cut_id,
    HAS_CUT: tl.constexpr,
    TAKES_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``_load``, of what the cut leaves."""
    keys, ids, masses = _load(first, candidates, TAKES_MASS, BLOCK)
    if HAS_CUT:
        kept = within_cut(keys, ids, cut_key, cut_id)
        keys = tl.where(kept, keys, NO_KEY)
        masses = tl.where(kept, masses, 0)
    return keys, ids, masses


@triton.jit
def _sums_from(
    bounds,
    tile,
    candidates,
    cut_key,
    cut_id,
    HAS_CUT: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """int64 sums [PARTS] of the candidates with keys of at least ``bounds`` [PARTS, 1]."""
    sums = tl.sum(tl.where(tile[0] >= bounds, tile[2], 0), axis=1)
    for first in range(BLOCK, candidates[4], BLOCK):
        keys, _, masses = _load_kept(first, candidates, cut_key, cut_id, HAS_CUT, BY_MASS, BLOCK)
        sums += tl.sum(tl.where(keys >= bounds, masses, 0), axis=1)
    return sums


@triton.jit
def _ties_up_to(
    key, bounds, tile, candidates, cut_key, cut_id, HAS_CUT: tl.constexpr, BLOCK: tl.constexpr
):
    """How many candidates with ``key`` have ids up to ``bounds`` [PARTS, 1]."""
    counts = tl.sum(((tile[0] == key) & (tile[1] <= bounds)).to(tl.int32), axis=1)
    for first in range(BLOCK, candidates[4], BLOCK):
        keys, ids, _ = _load_kept(first, candidates, cut_key, cut_id, HAS_CUT, False, BLOCK)
        counts += tl.sum(((keys == key) & (ids <= bounds)).to(tl.int32), axis=1)
    return counts


@triton.jit
def _threshold(
    goal,
    candidates,
    cut_key,
    cut_id,
    vocab,
    HAS_CUT: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(key, id) of the candidate with which the sum, in the row's order, reaches int64 ``goal``."""
    part = tl.arange(0, PARTS).to(tl.int64) + 1
    # The first candidates, in most rows all, stay in registers.
    tile = _load_kept(0, candidates, cut_key, cut_id, HAS_CUT, BY_MASS, BLOCK)
    from_key = tl.min(tl.where(tile[0] == NO_KEY, 0x7FFFFFFF, tile[0])).to(tl.int64)
    to_key = tl.max(tile[0]).to(tl.int64)
    for first in range(BLOCK, candidates[4], BLOCK):
        keys, _, _ = _load_kept(first, candidates, cut_key, cut_id, HAS_CUT, False, BLOCK)
        smallest = tl.min(tl.where(keys == NO_KEY, 0x7FFFFFFF, keys)).to(tl.int64)
        from_key = tl.minimum(from_key, smallest)
        to_key = tl.maximum(to_key, tl.max(keys).to(tl.int64))
    while from_key < to_key:
        # In (from, to], for an interval of any length.
        bounds = from_key + ((to_key - from_key) * part + PARTS) // (PARTS + 1)
        sums = _sums_from(
            bounds.to(tl.int32)[:, None], tile, candidates, cut_key, cut_id, HAS_CUT, BY_MASS, BLOCK
        )
        enough = sums >= goal
        to_key = tl.min(tl.where(enough, to_key, bounds - 1), axis=0)
        from_key = tl.max(tl.where(enough, bounds, from_key), axis=0)
    key = from_key.to(tl.int32)
    around = _sums_from(
        (key + (part == 1).to(tl.int32))[:, None],
        tile,
        candidates,
        cut_key,
        cut_id,
        HAS_CUT,
        BY_MASS,
        BLOCK,
    )
    above = tl.min(around, axis=0)
    each = tl.full((), 1, tl.int64)
    if BY_MASS:
        each = tl.maximum(mass_of(value_of(key), candidates[8], candidates[9]), 1)
    # How many of the ties at the key stay: those with the lowest ids.
    stay = (goal - above + each - 1) // each
    from_id = tl.full((), 0, tl.int64)
    to_id = vocab.to(tl.int64) - 1
    if above + stay * each >= tl.max(around, axis=0):
        from_id = to_id
    while from_id < to_id:
        bounds = from_id + (to_id - from_id) * part // (PARTS + 1)
        counts = _ties_up_to(
            key, bounds.to(tl.int32)[:, None], tile, candidates, cut_key, cut_id, HAS_CUT, BLOCK
        )
        enough = counts >= stay
        from_id = tl.max(tl.where(enough, from_id, bounds + 1), axis=0)
        to_id = tl.min(tl.where(enough, bounds, to_id), axis=0)
    # Ties that an earlier search took away stay away.
    last_id = tl.where(key == cut_key, tl.minimum(to_id, cut_id), to_id)
    return key, last_id.to(tl.int32)


@triton.jit
def _mass_goal(total, p, top):
    """int64 mass to reach: at least one token's, of +inf logits exactly one's."""
    goal = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.where(top == float("inf"), 1, tl.maximum(goal, 1))


@triton.jit(
    do_not_specialize=["V", "shift", "num_chunks", "stride_logits_b", "stride_k_b", "stride_p_b"],
    do_not_specialize_on_alignment=["state_ptr", "masses_ptr", "masses_above_ptr"]
    + ["counts_above_ptr", "candidate_keys_ptr", "candidate_ids_ptr", "candidate_masses_ptr"]
    + ["logits_ptr", "k_ptr", "p_ptr"],
)
def _top_k_top_p_select_kernel(
    state_ptr,
    masses_ptr,
    masses_above_ptr,
    counts_above_ptr,
    candidate_keys_ptr,
    candidate_ids_ptr,
    candidate_masses_ptr,
    logits_ptr,
    k_ptr,
    p_ptr,
    V,
    shift,
    num_chunks,
    stride_logits_b,
    stride_k_b,
    stride_p_b,
    IS_SECOND: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state = state_ptr + row * NUM_WORDS
    criterion = tl.load(state + CRITERION)
    if criterion != DONE:
        offs_c = tl.arange(0, BLOCK_C)
        mass = tl.full((BLOCK_C,), 0, tl.int64)
        mass_above = tl.full((BLOCK_C,), 0, tl.int64)
        count_above = tl.full((BLOCK_C,), 0, tl.int32)
        for start in range(0, num_chunks, BLOCK_C):
            chunks = row * num_chunks + start + offs_c
            mask = start + offs_c < num_chunks
            if HAS_P:
                mass += tl.load(masses_ptr + chunks, mask=mask, other=0)
                mass_above += tl.load(masses_above_ptr + chunks, mask=mask, other=0)
            count_above += tl.load(counts_above_ptr + chunks, mask=mask, other=0)
        num_above = tl.sum(count_above, axis=0)
        top = tl.load(state + TOP).to(tl.float32, bitcast=True)
        cut_key = tl.load(state + CUT_KEY)
        cut_id = tl.load(state + CUT_ID)
        num = tl.load(state + NUM_CANDIDATES)
        reads_row = num > MAX_CANDIDATES
        candidates = (
            candidate_keys_ptr + row * MAX_CANDIDATES,
            candidate_ids_ptr + row * MAX_CANDIDATES,
            candidate_masses_ptr + row * MAX_CANDIDATES,
            logits_ptr + row * stride_logits_b,
            tl.where(reads_row, V, num),
            reads_row,
            tl.load(state + LAST_HIGH),
            tl.load(state + LAST_LOW),
            top,
            shift,
        )
        by_mass = criterion != COUNT
        if HAS_K:
            k = load_k(k_ptr, row, stride_k_b, HAS_K)
            if criterion == COUNT:
                goal = (k - num_above).to(tl.int64)
                cut_key, cut_id = _threshold(
                    goal, candidates, cut_key, cut_id, V, IS_SECOND, False, BLOCK
                )
                by_mass = (num_above == 0) & (tl.load(state + WAITS) != 0)
        if HAS_P:
            if by_mass:
                p = load_p(p_ptr, row, stride_p_b, HAS_P)
                if criterion == COUNT:
                    # Nothing is above the bracket, so that the candidates are all that k left.
                    total = tl.full((), 0, tl.int64)
                    for first in range(0, candidates[4], BLOCK):
                        kept = _load_kept(first, candidates, cut_key, cut_id, True, True, BLOCK)
                        total += tl.sum(kept[2])
                    goal = _mass_goal(total, p, top)
                    tl.store(state + WAITS, 0)
                else:
                    goal = _mass_goal(tl.sum(mass, axis=0), p, top) - tl.sum(mass_above, axis=0)
                cut_key, cut_id = _threshold(
                    goal, candidates, cut_key, cut_id, V, HAS_K, True, BLOCK
                )
        tl.store(state + CUT_KEY, cut_key)
        tl.store(state + CUT_ID, cut_id)
