"""Counter-based random streams: a pure function of (seed, position, token id, stream).

The hash is MurmurHash3 over the words ``seed.lo, seed.hi, pos.lo, id`` with the stream as its seed.
Gumbel noise in fp32 uses stream 0, in fp64 stream 0 and one more for the high word; acceptance in
verification has a stream of its own, so no draw of one kind can meet a draw of another. There is no
generator state: a row gives the same draw in any batch, order, block size and rank.

Each function exists twice: ``*_ref`` in PyTorch (the specification) and a Triton device function.
Hash and fp32 uniforms agree bit for bit; noise within ``4e-7 * max(1, |noise|)`` (1e-14 in fp64).

Source: the stream of vLLM 0.33's V2 sampler, so that draws can be compared with it.
"""

import torch
from torch import Tensor

from dspark_ops._triton import tl, triton

GUMBEL_STREAM = 0
GUMBEL_HIGH_STREAM = 0x9E3779B9
ACCEPTANCE_STREAM = 0x5851F42D
# Drafting adds this to the position: draft and target noise must never meet.
DRAFT_POSITION_OFFSET = 1 << 30

# The same as kernels see them: a global of a kernel has to be a constexpr.
TL_GUMBEL_STREAM = tl.constexpr(GUMBEL_STREAM)
TL_GUMBEL_HIGH_STREAM = tl.constexpr(GUMBEL_HIGH_STREAM)

_MASK32 = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-53


def _mix_ref(h: Tensor | int, k: Tensor) -> Tensor:
    k = (k * 0xCC9E2D51) & _MASK32
    k = ((k << 15) | (k >> 17)) & _MASK32
    h = h ^ ((k * 0x1B873593) & _MASK32)
    h = ((h << 13) | (h >> 19)) & _MASK32
    return (h * 5 + 0xE6546B64) & _MASK32


def hash_ref(seed: Tensor, pos: Tensor, ids: Tensor, stream: int) -> Tensor:
    """MurmurHash3 of (seed, pos, ids); int64 tensors that broadcast; returns u32 in int64."""
    h = _mix_ref(stream, seed & _MASK32)
    h = _mix_ref(h, (seed >> 32) & _MASK32)
    h = _mix_ref(h, pos & _MASK32)
    h = _mix_ref(h, ids & _MASK32) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)


def uniform_ref(r: Tensor) -> Tensor:
    """fp32 uniform in (0, 1] of a u32 hash held in int64."""
    return (r >> 16).float() * 2.0**-16 + ((r & 0xFFFF).float() + 0.5) * 2.0**-32


def gumbel_ref(seed: Tensor, pos: Tensor, ids: Tensor, use_fp64: bool) -> Tensor:
    """Standard Gumbel noise, f32 or f64, always finite."""
    if use_fp64:
        high = hash_ref(seed, pos, ids, GUMBEL_HIGH_STREAM)
        low = hash_ref(seed, pos, ids, GUMBEL_STREAM)
        bits = (high << 21) | (low >> 11)  # the top 53 of 64 bits
        u = ((bits.double() + 0.5) * 2.0**-53).clamp(max=_BELOW_ONE)
        return -torch.log(-torch.log(u))
    u = uniform_ref(hash_ref(seed, pos, ids, GUMBEL_STREAM))
    series = torch.full_like(u, 1 / 8)
    for k in range(7, 0, -1):
        series = series * u + 1 / k
    # -log(1 - u): the series keeps its leading digits where u is small, that is where noise is
    # large.
    rate = torch.where(u < 0.25, u * series, -torch.log((1 - u).clamp(min=2.0**-24)))
    return -torch.log(rate)


def acceptance_uniform_ref(seed: Tensor, pos: Tensor, step: Tensor | int) -> Tensor:
    """fp32 uniform for the acceptance test of draft step ``step`` at ``pos``; int64 tensors.

    The step is part of the key: a position examined in one round comes back, at another step, in a
    later one, and must then meet a fresh draw.
    """
    step = torch.as_tensor(step, dtype=torch.int64, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    return uniform_ref(hash_ref(seed ^ (step << 32), pos, zero, ACCEPTANCE_STREAM))


@triton.jit
def _mix(h, k):
    k *= 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    k *= 0x1B873593
    h ^= k
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def hash_prefix(seed, pos, STREAM: tl.constexpr):
    """The part of the hash that a row shares: int64 seed and pos to a uint32 state."""
    h = _mix(tl.full((), STREAM, tl.uint32), seed.to(tl.uint32))
    h = _mix(h, (seed >> 32).to(tl.uint32))
    return _mix(h, pos.to(tl.uint32))


@triton.jit
def hash_finish(prefix, ids):
    """uint32 hash of int32 ids under a row's prefix."""
    h = _mix(prefix, ids.to(tl.uint32)) ^ 16
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform(r):
    high = (r >> 16).to(tl.int32).to(tl.float32)
    low = (r & 0xFFFF).to(tl.int32).to(tl.float32)
    return high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10  # 2^-16, 2^-32


@triton.jit
def gumbel32(r):
    """fp32 noise of a stream-0 hash."""
    u = uniform(r)
    series = u * 0.125 + 0.14285714285714285
    series = series * u + 0.16666666666666666
    series = series * u + 0.2
    series = series * u + 0.25
    series = series * u + 0.3333333333333333
    series = series * u + 0.5
    series = series * u + 1.0
    large = -tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))  # 2^-24
    return -tl.log(tl.where(u < 0.25, u * series, large))


@triton.jit
def gumbel64(high, low):
    """fp64 noise of the two hashes of an id."""
    bits = (high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)
    u = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    below_one = tl.full((), 1.0, tl.float64) - 1.1102230246251565e-16
    return -tl.log(-tl.log(tl.minimum(u, below_one)))


@triton.jit
def gumbel_bound(r):
    """fp32 upper bound of the noise, at four instructions: hash for fp32, ~high for fp64.

    ``-log(1 - u) >= u`` gives ``noise <= -log u`` (fp64: ``-log u >= 1 - u``, hence the
    complement). ``u >= r * 2^-32``, and the bits of a float read as an integer are piecewise
    linear in its logarithm and never above it, so ``-log u <= -ln2 * (bits(float(r)) * 2^-23 -
    127 - 32)``. The 3e-5 covers the roundings: conversion (5e-6), product and constant (4e-6
    each), logarithm (3e-6). Checked against the computed noise of all 2^32 hashes on a GPU
    (tests/gpu/test_noise.py).
    """
    bits = r.to(tl.float32).to(tl.int32, bitcast=True)
    return bits.to(tl.float32) * -8.262958294867817e-08 + 110.21043  # -ln2 * 2^-23; 159 ln2 + 3e-5
