"""Probabilities as integers: ``exp(x - max(x))`` in units of 2^-44 of the largest, in an int64.

Integer sums have no rounding and no order, so a prefix of a row has the same mass in any order of
summation, for any tiling, batch and device. The largest logit weighs 2^44 exactly, so no total is
zero, and 2^18 tokens of that weight still fit (a larger vocabulary drops low bits, ``shift``).
Relative error of a mass, down to where 2^-44 ends it: polynomial 8.4e-8, fixed point of the logits
and their largest 1.2e-7; of the share of any prefix at most 7.2e-8, a quarter of how far the errors
in a row lie apart. Logits 30.48 and more below the largest
weigh nothing: 2^18 of them together 1.5e-8 of the whole.

``masses_ref`` in PyTorch is the specification; the Triton function gives the same integers.
"""

import torch
from torch import Tensor

from dspark_ops._triton import tl, triton

# A mass is 2^z, z = 44 - log2(e) * (max - x), made from z with 54 fractional bits. Logits are fixed
# point with 24. From a largest of 64 up in size they are taken relative to it: then what is near it
# has a difference to it without rounding, and else a size below 128, so that 32 bits suffice.
LOG2_E = 1549082005  # * 2^-30
Z_OF_MAX = 44 << 54
NEAR = 30.484375
LARGE = 64.0
LARGEST = torch.finfo(torch.float32).max
# 2^f * 2^30 for the fraction f of z: of the polynomials of degree 5 that are exact at 0 the one
# with the smallest relative error on [0, 1), 8.4e-8.
POLYNOMIAL = (2004816, 9681963, 59914700, 257874615, 744265554, 1073741824)

_TL_LOG2_E = tl.constexpr(LOG2_E)
_TL_Z_OF_MAX = tl.constexpr(Z_OF_MAX)
_TL_NEAR = tl.constexpr(NEAR)
_TL_LARGE = tl.constexpr(LARGE)
_TL_LARGEST = tl.constexpr(LARGEST)
_C5, _C4, _C3, _C2, _C1, _C0 = (tl.constexpr(c) for c in POLYNOMIAL)


def mass_shift(vocab: int) -> int:
    """Low bits that masses drop so that ``vocab`` of the largest fit into an int64."""
    return max(0, (vocab - 1).bit_length() - 18)


def masses_ref(x: Tensor, row_max: Tensor, shift: int) -> Tensor:
    """i64 masses of f32 ``x`` without NaN; ``row_max`` [..., 1] is its largest, +inf the finite."""
    x, top = x.clamp(max=LARGEST), row_max.clamp(max=LARGEST)
    base = top.where(top.abs() >= LARGE, 0)
    x, top = x - base, top - base
    near = x > top - NEAR
    z = Z_OF_MAX - (_fixed(top) - _fixed(x.where(near, top))) * LOG2_E
    f = (z >> 22) & 0xFFFFFFFF
    power = torch.full_like(f, POLYNOMIAL[0])
    for c in POLYNOMIAL[1:]:
        power = ((f * power) >> 32) + c
    mass = (power << 14) >> (44 + shift - (z >> 54))
    return mass.where(near, 0)


def _fixed(x: Tensor) -> Tensor:
    return (x * 2.0**24).to(torch.int64)


@triton.jit
def mass_of(x, row_max, shift):
    """int64 masses of f32 ``x`` without NaN; ``row_max`` is a scalar, or broadcasts."""
    x = tl.minimum(x, _TL_LARGEST)
    top = tl.minimum(row_max, _TL_LARGEST)
    base = tl.where(tl.abs(top) >= _TL_LARGE, top, 0.0)
    x -= base
    top -= base
    near = x > top - _TL_NEAR
    z_of_base = _TL_Z_OF_MAX - (top * 16777216.0).to(tl.int32).to(tl.int64) * _TL_LOG2_E
    fixed = (x * 16777216.0).to(tl.int32)  # any number where not near
    z = z_of_base + fixed.to(tl.int64) * _TL_LOG2_E
    f = (z >> 22).to(tl.uint32)
    power = tl.umulhi(f, tl.full(f.shape, _C5, tl.uint32)) + _C4
    power = tl.umulhi(f, power) + _C3
    power = tl.umulhi(f, power) + _C2
    power = tl.umulhi(f, power) + _C1
    power = tl.umulhi(f, power) + _C0
    halvings = tl.where(near, (44 - (z >> 54).to(tl.int32)) + shift, 63)
    return (power.to(tl.int64) << 14) >> halvings.to(tl.int64)
