"""Rounding of an f32 sum to the dtype that ``torch.add`` gives: once, to nearest even."""

import os

from dspark_ops._triton import tl, triton

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on"))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """f32 ``x`` to DTYPE. Triton's interpreter truncates to bf16, so there integers do it."""
    if DTYPE == tl.float32:
        return x
    elif _INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        bits16 = tl.where(x == x, rounded, quiet_nan).to(tl.uint16)
        return bits16.to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
