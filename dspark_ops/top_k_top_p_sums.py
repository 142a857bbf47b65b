"""The pass of top_k_top_p_ that sums above pivots, of each chunk of a row: counts or masses.

Masses are fp32 and relative to a reference logit: they only decide where to look, the threshold
itself is found in exact arithmetic. The first pass over a row also takes what its search starts
from: the largest logit, the first NaN, how many are above -inf and, for k, the largest of each
group of logits (the k-th largest group has at least k logits at or above its maximum).
"""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.ordered import ordered_key
from dspark_ops.top_k_top_p_state import (
    CRITERION,
    CUT_ID,
    CUT_KEY,
    FILTERED,
    MASS,
    REFERENCE,
    SUMS,
    bound_of,
    within_cut,
)


@triton.jit
def _pass(
    sums_ptr,
    totals_ptr,
    maxima_ptr,
    first_nan_ptr,
    num_finite_ptr,
    group_keys_ptr,
    state,
    pivots_ptr,
    row_ptr,
    program,
    first,
    last,
    V,
    TAKES_SUMS: tl.constexpr,
    BY_MASS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_K: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILE_V: tl.constexpr,
    UNROLL: tl.constexpr,
):
    offs_j = tl.arange(0, NUM_PIVOTS)
    if TAKES_SUMS:
        bounds = bound_of(tl.load(pivots_ptr + offs_j))[:, None]
        sums = tl.full((NUM_PIVOTS, TILE_V), 0.0, tl.float32)
        total = tl.full((1, TILE_V), 0.0, tl.float32)
        reference = tl.load(state + REFERENCE).to(tl.float32, bitcast=True)
    if HAS_CUT:
        cut_key = tl.load(state + CUT_KEY)
        cut_id = tl.load(state + CUT_ID)
    if IS_FIRST:
        largest = tl.full((1, TILE_V), float("-inf"), tl.float32)
        num_nan = tl.full((1, TILE_V), 0, tl.int32)
        num_finite = tl.full((1, TILE_V), 0, tl.int32)
    for start in tl.range(first, last, TILE_V, loop_unroll_factor=UNROLL):
        offs_v = (start + tl.arange(0, TILE_V))[None, :]
        x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        if IS_FIRST:
            num_nan += (x != x).to(tl.int32)
            largest = tl.maximum(largest, x)  # of a number and a NaN, the number
        if TAKES_SUMS:
            if BY_MASS:
                weight = tl.exp(x - reference)
            else:
                weight = (x > float("-inf")).to(tl.float32)
            if HAS_CUT:
                kept = within_cut(ordered_key(x), offs_v, cut_key, cut_id)
                weight = tl.where(kept, weight, 0.0)
            sums += tl.where(x > bounds, 1.0, 0.0) * weight
            total += weight
        if IS_FIRST and HAS_K:
            num_finite += (x > float("-inf")).to(tl.int32)
    if TAKES_SUMS:
        tl.store(sums_ptr + program * NUM_PIVOTS + offs_j, tl.sum(sums, axis=1))
        tl.store(totals_ptr + program, tl.sum(total))
    if IS_FIRST:
        first_nan = 0x7FFFFFFF
        if tl.sum(num_nan) > 0:
            for start in range(first, last, TILE_V):
                offs = start + tl.arange(0, TILE_V)
                x = tl.load(row_ptr + offs, mask=offs < V, other=0.0)
                first_nan = tl.minimum(first_nan, tl.min(tl.where(x != x, offs, 0x7FFFFFFF)))
        tl.store(maxima_ptr + program, tl.max(largest))
        tl.store(first_nan_ptr + program, first_nan)
        if HAS_K:
            tl.store(num_finite_ptr + program, tl.sum(num_finite))
            groups = tl.max(tl.reshape(largest, (NUM_GROUPS, TILE_V // NUM_GROUPS)), axis=1)
            offs_g = program * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
            tl.store(group_keys_ptr + offs_g, ordered_key(groups))


@triton.jit(
    do_not_specialize=["num_chunks", "chunk_tiles"],
)
def _top_k_top_p_sums_kernel(
    sums_ptr,
    totals_ptr,
    maxima_ptr,
    first_nan_ptr,
    num_finite_ptr,
    group_keys_ptr,
    state_ptr,
    pivots_ptr,
    logits_ptr,
    V,
    num_chunks,
    chunk_tiles,
    stride_logits_b,
    IS_FIRST: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_K: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    CHUNK_V: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILE_V: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # one axis: the others end at 65535
    row = program // num_chunks
    # A multiple of the tile that the compiler can see, for loads of 16 bytes.
    first = (program % num_chunks).to(tl.int32) * chunk_tiles * CHUNK_V
    last = tl.minimum(first + chunk_tiles * CHUNK_V, V)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state = state_ptr + row * NUM_WORDS
    row_ptr = logits_ptr + row * stride_logits_b
    row_pivots_ptr = pivots_ptr + row * NUM_PIVOTS
    takes_sums = tl.load(state + SUMS) != 0
    by_mass = tl.load(state + CRITERION) == MASS
    if takes_sums & by_mass:
        _pass(
            sums_ptr,
            totals_ptr,
            maxima_ptr,
            first_nan_ptr,
            num_finite_ptr,
            group_keys_ptr,
            state,
            row_pivots_ptr,
            row_ptr,
            program,
            first,
            last,
            V,
            True,
            True,
            IS_FIRST,
            HAS_CUT,
            HAS_K,
            NUM_PIVOTS,
            NUM_GROUPS,
            TILE_V,
            UNROLL,
        )
    elif takes_sums:
        _pass(
            sums_ptr,
            totals_ptr,
            maxima_ptr,
            first_nan_ptr,
            num_finite_ptr,
            group_keys_ptr,
            state,
            row_pivots_ptr,
            row_ptr,
            program,
            first,
            last,
            V,
            True,
            False,
            IS_FIRST,
            HAS_CUT,
            HAS_K,
            NUM_PIVOTS,
            NUM_GROUPS,
            TILE_V,
            UNROLL,
        )
    elif IS_FIRST:
        if tl.load(state + FILTERED) != 0:
            _pass(
                sums_ptr,
                totals_ptr,
                maxima_ptr,
                first_nan_ptr,
                num_finite_ptr,
                group_keys_ptr,
                state,
                row_pivots_ptr,
                row_ptr,
                program,
                first,
                last,
                V,
                False,
                False,
                IS_FIRST,
                HAS_CUT,
                HAS_K,
                NUM_PIVOTS,
                NUM_GROUPS,
                TILE_V,
                UNROLL,
            )


_top_k_top_p_sums_unaligned_kernel = unaligned(_top_k_top_p_sums_kernel)
