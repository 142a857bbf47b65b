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


@triton.jit
def pack_key(key, offs):
    """int64 that orders (int32 key, int32 offset >= 0) by larger key, then by lower offset."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - offs).to(tl.int64)


@triton.jit
def unpack_id(packed):
    """The offset of ``pack_key``, int32."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def max_packed(packed_ptr, num, BLOCK: tl.constexpr):
    """Largest of ``num`` int64 words of ``pack_key``."""
    offs = tl.arange(0, BLOCK)
    best = tl.load(packed_ptr + offs, mask=offs < num, other=-0x8000000000000000)
    for start in range(BLOCK, num, BLOCK):
        word = tl.load(
            packed_ptr + start + offs, mask=start + offs < num, other=-0x8000000000000000
        )
        best = tl.maximum(best, word)
    return tl.max(best, axis=0)
