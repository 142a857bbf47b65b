"""Probabilities as integers: ``exp(x - max(x))`` in units of 2^-44 of the largest, in an int64.

Integer sums have no rounding and no order, so a prefix of a row has the same mass in any order of
summation, for any tiling, batch and device. The largest logit weighs 2^44 exactly, so no total is
zero, and 2^18 tokens of that weight still fit (a larger vocabulary drops low bits, ``shift``).
Relative error of a mass, down to where 2^-44 ends it: polynomial 8.4e-8, fixed point 3e-8; of the
share of any prefix, at most a half of that. Logits 32 and more below the largest weigh nothing:
together less than 4e-9 of the whole.

``masses_ref`` in PyTorch is the specification; the Triton function gives the same integers.
"""

import torch
from torch import Tensor

from dspark_ops._triton import tl, triton

LARGEST = torch.finfo(torch.float32).max
# log2(e) * 2^31, and -(2^-f - 1) / f on [0, 1) as the polynomial of degree 4 with the smallest
# relative error of 2^-f, 8.4e-8; coefficients * 2^31, their signs alternate.
_LOG2_E = 3098164009
_C1, _C2, _C3, _C4, _C5 = 1488514807, 515782929, 118750173, 19769301, 2029165

_TL_LARGEST = tl.constexpr(LARGEST)
_TL_LOG2_E = tl.constexpr(_LOG2_E)
_TL_C1, _TL_C2, _TL_C3 = tl.constexpr(_C1), tl.constexpr(_C2), tl.constexpr(_C3)
_TL_C4, _TL_C5 = tl.constexpr(_C4), tl.constexpr(_C5)


def mass_shift(vocab: int) -> int:
    """Low bits that masses drop so that ``vocab`` of the largest fit into an int64."""
    return max(0, (vocab - 1).bit_length() - 18)


def masses_ref(x: Tensor, row_max: Tensor, shift: int) -> Tensor:
    """i64 masses of f32 ``x`` without NaN, ``row_max`` [..., 1] its largest; +inf is finite max."""
    x, top = x.clamp(max=LARGEST), row_max.clamp(max=LARGEST)
    below = top - x
    near = below < 32
    # What the subtraction rounded away (Knuth's two-sum): at 10 it would be 5e-7 of the mass.
    back = below - top
    lost = (top - (below - back)) - (x + back)
    below, lost = below.where(near, 0), lost.where(near, 0)
    fixed = (below * 2.0**26).to(torch.int64) + (lost * 2.0**26).to(torch.int64)
    halvings = fixed * _LOG2_E  # * 2^57
    f = (halvings >> 25) & 0xFFFFFFFF
    series = _C4 - ((f * _C5) >> 32)
    for c in (_C3, _C2, _C1):
        series = c - ((f * series) >> 32)
    mass = ((2**31 - ((f * series) >> 32)) << 13) >> ((halvings >> 57) + shift)
    return mass.where(near, 0)


@triton.jit
def mass_of(x, row_max, shift):
    """int64 mass of f32 ``x``; ``row_max`` is a scalar, or one that broadcasts."""
    x = tl.minimum(x, _TL_LARGEST)
    top = tl.minimum(row_max, _TL_LARGEST)
    below = top - x
    near = below < 32
    back = below - top
    lost = (top - (below - back)) - (x + back)
    below = tl.where(near, below, 0.0)
    lost = tl.where(near, lost, 0.0)
    fixed = (below * 67108864.0).to(tl.int32) + (lost * 67108864.0).to(tl.int32)
    halvings = fixed.to(tl.uint32).to(tl.uint64) * tl.full((), _TL_LOG2_E, tl.uint64)
    f = (halvings >> 25).to(tl.uint32)
    series = _TL_C4 - tl.umulhi(f, tl.full(f.shape, _TL_C5, tl.uint32))
    series = _TL_C3 - tl.umulhi(f, series)
    series = _TL_C2 - tl.umulhi(f, series)
    series = _TL_C1 - tl.umulhi(f, series)
    mantissa = 0x80000000 - tl.umulhi(f, series)
    halved = (halvings >> 57).to(tl.uint32) + shift
    mass = (mantissa.to(tl.uint64) << 13) >> halved.to(tl.uint64)
    return tl.where(near, mass.to(tl.int64), 0)
