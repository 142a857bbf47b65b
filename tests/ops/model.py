"""The contract in numpy, written from its text and not from dspark_ops.

Values are held as fp32 arrays whatever the dtype: bf16, f16 and f32 all fit. ``expect`` computes
what each sampler op has to return and to write.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .tolerances import id_tolerance

GUMBEL = 0
GUMBEL_HIGH = 0x9E3779B9
ACCEPTANCE = 0x5851F42D
BLOCK_V = 1024

U32 = np.uint32
F32 = np.float32


def _rotl(x, bits):
    return (x << U32(bits)) | (x >> U32(32 - bits))


def _mix(h, k):
    k = _rotl(k * U32(0xCC9E2D51), 15) * U32(0x1B873593)
    return _rotl(h ^ k, 13) * U32(5) + U32(0xE6546B64)


def _words(x) -> np.ndarray:
    """Low 32 bits of integers of any size and sign, as u32 arrays of one dimension or more."""
    return np.array([int(v) & 0xFFFFFFFF for v in np.ravel(x)], U32).reshape(np.shape(x) or (1,))


def murmur(seed: int, pos: int, ids, domain: int) -> np.ndarray:
    """MurmurHash3 of seed.lo, seed.hi, pos.lo, id."""
    h = _words(domain)
    for word in (_words(seed), _words(seed >> 32), _words(pos)):
        h = _mix(h, word)
    h = _mix(h, np.atleast_1d(np.asarray(ids)).astype(U32)) ^ U32(16)
    h = (h ^ (h >> U32(16))) * U32(0x85EBCA6B)
    h = (h ^ (h >> U32(13))) * U32(0xC2B2AE35)
    return h ^ (h >> U32(16))


def uniform(r: np.ndarray) -> np.ndarray:
    high = (r >> U32(16)).astype(np.int32).astype(F32)
    low = (r & U32(0xFFFF)).astype(np.int32).astype(F32)
    return high * F32(2.0**-16) + (low + F32(0.5)) * F32(2.0**-32)


def gumbel32(r: np.ndarray) -> np.ndarray:
    u = uniform(r)
    horner = np.full_like(u, 1 / 8)
    for k in range(6, -1, -1):
        horner = horner * u + F32(1 / (k + 1))
    log1m = np.where(u < F32(0.25), -u * horner, np.log(np.maximum(F32(1) - u, F32(2.0**-24))))
    return -np.log(-log1m)


def gumbel64(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    bits = ((high.astype(np.uint64) << np.uint64(32)) | low) >> np.uint64(11)
    u = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, np.nextafter(1.0, 0.0))
    return -np.log(-np.log(u))


def gumbel(seed: int, pos: int, ids, use_fp64: bool) -> np.ndarray:
    low = murmur(seed, pos, ids, GUMBEL)
    if use_fp64:
        return gumbel64(murmur(seed, pos, ids, GUMBEL_HIGH), low)
    return gumbel32(low)


def acceptance(seed: int, pos: int, step: int) -> np.ndarray:
    return uniform(murmur(seed ^ (step << 32), pos, 0, ACCEPTANCE))


def first_argmax(values: np.ndarray) -> int:
    """First NaN, else the lowest index of the maximum; -0.0 == 0.0."""
    nans = np.flatnonzero(np.isnan(values))
    if nans.size:
        return int(nans[0])
    return int(np.flatnonzero(values == values.max())[0])


def values_of(x: Tensor) -> np.ndarray:
    return x.detach().cpu().float().numpy()


def round_to(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """fp32 to the nearest value of ``dtype``, ties to even, as fp32."""
    if dtype == torch.float32:
        return x
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(F32)
    bits = x.view(U32)
    rounded = (bits + (U32(0x7FFF) + ((bits >> U32(16)) & U32(1)))) & U32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(F32))


def sum_dtype(logits: Tensor, bias: Tensor | None) -> torch.dtype:
    """bf16 and f16 meet in f32; else the wider of the two."""
    if bias is None or bias.dtype == logits.dtype:
        return logits.dtype
    return torch.float32


@dataclass
class Expected:
    logits: np.ndarray  # [B, V] what is sampled from, before temperature
    value: np.ndarray  # [B, V] noised
    scale: np.ndarray  # [B, V] largest finite term of each value, for the tolerance
    tokens: list[int]
    block_max: np.ndarray  # [B, K]
    block_argmax: np.ndarray  # [B, K]
    cache: np.ndarray | None  # [S, C, W] after the call
    exact: list[bool]  # rows without noise, whose ids have no tolerance


def expect(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int | Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> Expected:
    """Call before the op: ``logits_cache`` is read for the entries that must keep their bits."""
    x = values_of(logits)
    num_rows, vocab = x.shape
    if bias is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            x = round_to(x + values_of(bias), sum_dtype(logits, bias))
    cache = None if logits_cache is None else values_of(logits_cache).copy()
    value = x.astype(np.float64 if use_fp64 else F32)
    scale = np.ones(x.shape)
    exact = [True] * num_rows
    for b in range(num_rows):
        slot = int(idx_mapping[b])
        if not 0 <= slot < temperature.shape[0]:
            continue
        seed = int(seeds[slot])
        if cache is not None:
            cols = torch.as_tensor(cache_col)
            col = int(cols[b] if cols.dim() else cols)
            seed ^= col << 32
            if 0 <= col < cache.shape[1]:
                cache[slot, col, :vocab] = x[b]
        t = F32(temperature[slot].item())
        if not (F32(1e-5) <= t < np.inf):
            continue
        exact[b] = False
        key = int(pos[b]) + pos_offset + (2**30 if is_drafting else 0)
        noise = gumbel(seed, key, np.arange(vocab), use_fp64)
        with np.errstate(over="ignore"):
            scaled = x[b] / t if apply_temperature else x[b]
        value[b] = scaled.astype(value.dtype) + noise
        term = np.where(np.isfinite(scaled), np.abs(scaled), 0.0)
        scale[b] = np.maximum(1.0, np.maximum(np.abs(noise), term))
    blocks = range(0, vocab, BLOCK_V)
    ids = [[k + first_argmax(row[k : k + BLOCK_V]) for k in blocks] for row in value]
    block_argmax = np.array(ids, np.int64).reshape(num_rows, len(blocks))
    return Expected(
        logits=x,
        value=value,
        scale=scale,
        tokens=[first_argmax(row) for row in value],
        block_max=np.take_along_axis(value, block_argmax, 1),
        block_argmax=block_argmax,
        cache=cache,
        exact=exact,
    )


def _assert_id(row: int, actual: int, wanted: int, expected: Expected) -> None:
    if actual == wanted:
        return
    value = expected.value[row]
    assert 0 <= actual < value.size, f"row {row}: id {actual} is not in [0, {value.size})"
    limit = 0.0
    if not expected.exact[row]:
        limit = (
            id_tolerance(value.dtype == np.float64) * expected.scale[row][[actual, wanted]].max()
        )
    assert value[wanted] - value[actual] < limit, (
        f"row {row}: id {actual} with value {value[actual]}, expected id {wanted} with value "
        f"{value[wanted]}; they would have to be within {limit}"
    )


def assert_tokens(tokens: Tensor, expected: Expected) -> None:
    """Ids equal the model's, or tie with them within the tolerance; exact in rows without noise."""
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(expected.tokens),)
    for row, (actual, wanted) in enumerate(zip(tokens.tolist(), expected.tokens, strict=True)):
        _assert_id(row, actual, wanted, expected)


def assert_blocks(block_max: Tensor, block_argmax: Tensor, expected: Expected) -> None:
    """Maxima within the tolerance, exact in rows without noise; ids as in ``assert_tokens``."""
    maxima, ids = block_max.cpu().numpy(), block_argmax.cpu().numpy()
    assert maxima.dtype == expected.block_max.dtype
    assert ids.dtype == np.int64
    assert maxima.shape == ids.shape == expected.block_max.shape
    for row in range(len(maxima)):
        limit = 0.0 if expected.exact[row] else id_tolerance(maxima.dtype == np.float64)
        near = limit * expected.scale[row][expected.block_argmax[row]]
        for actual, wanted, atol in zip(maxima[row], expected.block_max[row], near, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)
        for k, best in enumerate(expected.block_argmax[row].tolist()):
            assert ids[row, k] // BLOCK_V == k
            _assert_id(row, int(ids[row, k]), best, expected)


def assert_cache(logits_cache: Tensor, expected: Expected) -> None:
    """Every entry, written or not; NaN equals NaN, and -0.0 differs from 0.0."""
    assert expected.cache is not None
    actual = values_of(logits_cache)
    np.testing.assert_array_equal(actual, expected.cache)
    zero = expected.cache == 0
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected.cache[zero]))
