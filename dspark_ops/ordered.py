"""Floats as integers in the order of ``torch.argmax``: NaN above all, -0.0 equal to 0.0.

Integer maxima have no NaN rule, so the same reduction means the same thing in Triton's compiler, in
its interpreter and for every block size; a tie goes to the lowest id by a second, integer minimum.
"""

from dspark_ops._triton import tl, triton


@triton.jit
def ordered_key(x):
    """int64 key of f32 or f64; all NaN share the largest key of their width."""
    x = tl.where(x == 0.0, 0.0, x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
        return tl.where(x != x, 0x7FFFFFFFFFFFFFFF, key)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def argmax_first(key, offs, mask, NONE_KEY: tl.constexpr):
    """(largest key, lowest offset that has it) over a tile; masked lanes never win."""
    key = tl.where(mask, key, NONE_KEY)
    best = tl.max(key, axis=0)
    return best, tl.min(tl.where(mask & (key == best), offs, 0x7FFFFFFF), axis=0)
