"""Fifth kernel of top_k_top_p_: exact sums around a row's bracket, and what lies in it.

Of each chunk the mass of all that the searches so far kept and of what is above the bracket, in
integers (``mass.py``), and the count above it; the tokens inside it, key, id and mass, go to the
row's candidates, in no order. Where they do not fit, their number still tells, and the next kernel
reads the row instead.
"""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.mass import mass_of
from dspark_ops.ordered import ordered_key
from dspark_ops.top_k_top_p_state import (
    CRITERION,
    CUT_ID,
    CUT_KEY,
    DONE,
    HIGH,
    LAST_HIGH,
    LAST_LOW,
    LOW,
    MASS,
    NUM_CANDIDATES,
    SUMS,
    TOP,
    bound_of,
    load_k,
    load_p,
    narrowed,
    within_cut,
)


@triton.jit
def _popcount(bits):
    """int32 number of ones of uint32 ``bits``."""
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_chunks", "chunk_tiles", "shift", "stride_k_b", "stride_p_b"],
    do_not_specialize_on_alignment=["k_ptr", "p_ptr"],
)
def _top_k_top_p_collect_kernel(
    state_ptr,
    masses_ptr,
    masses_above_ptr,
    counts_above_ptr,
    candidate_keys_ptr,
    candidate_ids_ptr,
    candidate_masses_ptr,
    pivots_ptr,
    sums_ptr,
    totals_ptr,
    logits_ptr,
    k_ptr,
    p_ptr,
    V,
    shift,
    num_chunks,
    chunk_tiles,
    stride_logits_b,
    stride_k_b,
    stride_p_b,
    HAS_CUT: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    CHUNK_V: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILE_V: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // num_chunks
    chunk = (program % num_chunks).to(tl.int32)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state = state_ptr + row * NUM_WORDS
    criterion = tl.load(state + CRITERION)
    if criterion != DONE:
        top = tl.load(state + TOP).to(tl.float32, bitcast=True)
        high = tl.load(state + HIGH)
        low = tl.load(state + LOW)
        if tl.load(state + SUMS) != 0:
            k = load_k(k_ptr, row, stride_k_b, HAS_K)
            p = load_p(p_ptr, row, stride_p_b, HAS_P)
            last_bracket = narrowed(
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
            high = last_bracket[0]
            low = last_bracket[1]
        if chunk == 0:
            tl.store(state + LAST_HIGH, high)
            tl.store(state + LAST_LOW, low)
        above_high = bound_of(high)
        above_low = bound_of(low)
        if HAS_CUT:
            cut_key = tl.load(state + CUT_KEY)
            cut_id = tl.load(state + CUT_ID)
        row_ptr = logits_ptr + row * stride_logits_b
        first = chunk * chunk_tiles * CHUNK_V
        last = tl.minimum(first + chunk_tiles * CHUNK_V, V)
        mass = tl.full((TILE_V,), 0, tl.int64)
        mass_above = tl.full((TILE_V,), 0, tl.int64)
        count_above = tl.full((TILE_V,), 0, tl.int32)
        inside_bits = tl.full((TILE_V,), 0, tl.uint32)  # by iteration
        bit = tl.full((), 1, tl.uint32)
        by_mass = criterion == MASS
        for start in tl.range(first, last, TILE_V, loop_unroll_factor=UNROLL):
            offs_v = start + tl.arange(0, TILE_V)
            x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
            if HAS_CUT:
                x = tl.where(within_cut(ordered_key(x), offs_v, cut_key, cut_id), x, float("-inf"))
            is_above = x > above_high
            count_above += is_above.to(tl.int32)
            inside = (x > above_low) & (x <= above_high)
            inside_bits |= tl.where(inside, bit, 0)
            bit <<= 1
            if HAS_P:
                if by_mass:
                    token_mass = mass_of(x, top, shift)
                    mass += token_mass
                    mass_above += tl.where(is_above, token_mass, 0)
        num_above = tl.sum(count_above, axis=0)
        tl.store(counts_above_ptr + program, num_above)
        if HAS_P:
            tl.store(masses_ptr + program, tl.sum(mass, axis=0))
            tl.store(masses_above_ptr + program, tl.sum(mass_above, axis=0))
        count_inside = _popcount(inside_bits)
        num_inside = tl.sum(count_inside, axis=0)
        if num_inside > 0:
            place = tl.atomic_add(state + NUM_CANDIDATES, num_inside)
            if place + num_inside <= MAX_CANDIDATES:
                # A lane's tokens go to a run of its own, one of each lane at a time.
                offs_c = row * MAX_CANDIDATES + place + tl.cumsum(count_inside, axis=0)
                offs_c -= count_inside
                for _ in range(tl.max(count_inside, axis=0)):
                    left = inside_bits != 0
                    lowest = inside_bits & (0 - inside_bits)
                    inside_bits ^= lowest
                    iteration = _popcount(lowest - 1)
                    offs_v = first + iteration * TILE_V + tl.arange(0, TILE_V)
                    x = tl.load(row_ptr + offs_v, mask=left, other=float("-inf"))
                    tl.store(candidate_keys_ptr + offs_c, ordered_key(x), mask=left)
                    tl.store(candidate_ids_ptr + offs_c, offs_v, mask=left)
                    if HAS_P:
                        tl.store(candidate_masses_ptr + offs_c, mass_of(x, top, shift), mask=left)
                    offs_c += 1


_top_k_top_p_collect_unaligned_kernel = unaligned(_top_k_top_p_collect_kernel)
