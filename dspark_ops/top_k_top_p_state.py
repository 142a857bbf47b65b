"""What the kernels of top_k_top_p_ hand on: a few words a row, and sums of a row's chunks.

A search looks for the *threshold* of a row, the last token of the order that stays. Its *criterion*
is a count (k) or a mass (p); its *bracket* ``(low, high]`` holds the threshold's key at any time
(keys are those of ``ordered.py``). *Pivots* are keys inside a bracket: the sums above them narrow
it. The *cut* (key, id) is what the searches so far have kept: the tokens above it in the order, and
itself.
"""

from dspark_ops._triton import tl, triton

# Words of a row's state, i32.
TOP = tl.constexpr(0)  # bits of the largest logit
FILTERED = tl.constexpr(1)  # whether anything of the row is masked
CRITERION = tl.constexpr(2)  # of the search under way
SUMS = tl.constexpr(3)  # whether the next pass sums above the pivots
REFERENCE = tl.constexpr(4)  # bits of the logit that these sums are relative to
CUT_KEY = tl.constexpr(5)
CUT_ID = tl.constexpr(6)
NUM_CANDIDATES = tl.constexpr(7)
WAITS = tl.constexpr(8)  # whether a search for p comes after
HIGH = tl.constexpr(9)
LOW = tl.constexpr(10)
LAST_HIGH = tl.constexpr(11)
LAST_LOW = tl.constexpr(12)
NUM_WORDS = 16

DONE = tl.constexpr(0)
COUNT = tl.constexpr(1)
MASS = tl.constexpr(2)

NEG_INF_KEY = tl.constexpr(-0x7F800001)  # ordered_key(-inf)
NAN_KEY = tl.constexpr(0x7FFFFFFF)

# Sums above pivots are fp32: a pivot counts as decided only beyond this of the goal. Their errors
# are 1e-6 (sum of 64 in a lane, then a tree; exponentials 5e-7).
_DOUBT = tl.constexpr(2e-5)


@triton.jit
def value_of(key):
    """The f32 whose ``ordered_key`` is int32 ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_of(key):
    """An f32 above which exactly the logits with keys above ``key`` lie; -1 is no logit's key."""
    return value_of(tl.where(key == -1, -2, key))


@triton.jit
def within_cut(key, ids, cut_key, cut_id):
    return (key > cut_key) | ((key == cut_key) & (ids <= cut_id))


@triton.jit
def load_k(k_ptr, row, stride_k_b, HAS_K: tl.constexpr):
    """k of a row; on if 0 < k < V."""
    k = 0
    if HAS_K:
        k = tl.load(k_ptr + row * stride_k_b)
    return k


@triton.jit
def load_p(p_ptr, row, stride_p_b, HAS_P: tl.constexpr):
    """p of a row, at least 0; on if it is below 1."""
    p = 2.0
    if HAS_P:
        p = tl.load(p_ptr + row * stride_p_b)
        p = tl.where(p < 0, 0.0, p)
    return p


@triton.jit
def narrowed(
    high,
    low,
    criterion,
    k,
    p,
    pivots_ptr,
    sums_ptr,
    totals_ptr,
    num_chunks,
    NUM_PIVOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """(high, low, total): what the sums above each of a row's pivots leave of (low, high]."""
    offs_j = tl.arange(0, NUM_PIVOTS)
    above = tl.full((NUM_PIVOTS,), 0.0, tl.float32)
    total = 0.0
    for start in range(0, num_chunks, BLOCK_C):
        chunks = start + tl.arange(0, BLOCK_C)
        mask = chunks < num_chunks
        offsets = chunks[:, None] * NUM_PIVOTS + offs_j[None, :]
        above += tl.sum(tl.load(sums_ptr + offsets, mask=mask[:, None], other=0.0), axis=0)
        total += tl.sum(tl.load(totals_ptr + chunks, mask=mask, other=0.0), axis=0)
    pivots = tl.load(pivots_ptr + offs_j)
    goal = k.to(tl.float32)
    doubt = 0.0
    if criterion == MASS:
        goal = tl.maximum(p * total, 1e-30)  # nothing is not enough
        doubt = _DOUBT
    # At or below every pivot with less than the goal above it, above every pivot with enough.
    at_most = tl.where(above < goal * (1 - doubt), pivots, high)
    at_least = tl.where(above >= goal * (1 + doubt), pivots, low)
    high = tl.minimum(high, tl.min(at_most, axis=0))
    return high, tl.maximum(low, tl.max(at_least, axis=0)), total
