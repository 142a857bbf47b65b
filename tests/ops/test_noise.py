"""The random streams: known answers, an independent model, and what the streams promise.

Every test of values runs for the PyTorch reference and for the Triton device functions.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_ops import noise

from . import model
from .conftest import Kernel
from .tolerances import NOISE32, NOISE64

DATA = Path(__file__).parent.parent / "data"
NOISE = json.loads((DATA / "noise.json").read_text())
ACCEPT = json.loads((DATA / "accept.json").read_text())

hash_prefix, hash_finish, uniform = noise.hash_prefix, noise.hash_finish, noise.uniform
gumbel32, gumbel64, gumbel_bound = noise.gumbel32, noise.gumbel64, noise.gumbel_bound

KNOWN_SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 0x123456789ABCDEF, -7]
KNOWN_POS = [0, 1, -1, 2**31 - 1, -(2**31), 2**30, 2**32, 2**32 + 17, 2**62]


@triton.jit
def _draw_kernel(
    hash_ptr,
    u_ptr,
    noise_ptr,
    bound_ptr,
    seed_ptr,
    pos_ptr,
    id_ptr,
    num,
    STREAM: tl.constexpr,
    HIGH: tl.constexpr,
    USE_FP64: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num
    seed = tl.load(seed_ptr + offs, mask=mask, other=0)
    pos = tl.load(pos_ptr + offs, mask=mask, other=0)
    ids = tl.load(id_ptr + offs, mask=mask, other=0).to(tl.int32)
    r = hash_finish(hash_prefix(seed, pos, STREAM), ids)
    tl.store(hash_ptr + offs, r.to(tl.int64), mask=mask)
    tl.store(u_ptr + offs, uniform(r), mask=mask)
    if USE_FP64:
        high = hash_finish(hash_prefix(seed, pos, HIGH), ids)
        tl.store(noise_ptr + offs, gumbel64(high, r), mask=mask)
        tl.store(bound_ptr + offs, gumbel_bound(high ^ 0xFFFFFFFF), mask=mask)
    else:
        tl.store(noise_ptr + offs, gumbel32(r), mask=mask)
        tl.store(bound_ptr + offs, gumbel_bound(r), mask=mask)


def kernel_draws(
    seeds: list[int], pos: list[int], ids: list[int], stream: int = 0, use_fp64: bool = False
) -> dict[str, Tensor]:
    device = Kernel.device
    num = len(seeds)
    float_dtype = torch.float64 if use_fp64 else torch.float32
    out = {
        "hash": torch.empty(num, dtype=torch.int64, device=device),
        "u": torch.empty(num, device=device),
        "noise": torch.empty(num, dtype=float_dtype, device=device),
        "bound": torch.empty(num, device=device),
    }
    keys = [torch.tensor(x, dtype=torch.int64, device=device) for x in (seeds, pos, ids)]
    _draw_kernel[(triton.cdiv(num, 64),)](
        *out.values(),
        *keys,
        num,
        STREAM=stream,
        HIGH=noise.GUMBEL_HIGH_STREAM,
        USE_FP64=use_fp64,
        BLOCK=64,
    )
    return {name: x.cpu() for name, x in out.items()}


def reference_draws(
    seeds: list[int], pos: list[int], ids: list[int], stream: int = 0, use_fp64: bool = False
) -> dict[str, Tensor]:
    keys = [torch.tensor(x, dtype=torch.int64) for x in (seeds, pos, ids)]
    r = noise.hash_ref(*keys, stream)
    return {"hash": r, "u": noise.uniform_ref(r), "noise": noise.gumbel_ref(*keys, use_fp64)}


@pytest.fixture(params=["reference", "kernel"])
def draws(request: pytest.FixtureRequest):
    return {"reference": reference_draws, "kernel": kernel_draws}[request.param]


def assert_noise(actual: Tensor, expected: np.ndarray, tolerance: float) -> None:
    assert actual.isfinite().all()
    limit = tolerance * np.maximum(1.0, np.abs(expected))
    assert (np.abs(actual.numpy().astype(np.float64) - expected) <= limit).all()


def random_keys(num: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Keys over the full range of each word, the edges first."""
    rng = np.random.default_rng(seed)
    pairs = [(s, p) for s in KNOWN_SEEDS for p in KNOWN_POS]
    seeds = [s for s, _ in pairs] + rng.integers(-(2**63), 2**63, num, dtype=np.int64).tolist()
    pos = [p for _, p in pairs] + rng.integers(-(2**31), 2**32, num).tolist()
    ids = rng.integers(0, 2**31, len(seeds)).tolist()
    return seeds, pos, ids


# Known answers


def test_number_of_known_answers() -> None:
    assert (len(NOISE), len(ACCEPT)) == (40, 24)


def known(rows: list[dict], name: str) -> list:
    return [row[name] for row in rows]


def known_keys() -> tuple[list[int], list[int], list[int]]:
    return known(NOISE, "seed"), known(NOISE, "pos"), known(NOISE, "id")


def test_known_noise(draws) -> None:
    result = draws(*known_keys())
    assert result["hash"].tolist() == known(NOISE, "hash")
    assert result["u"].tolist() == known(NOISE, "u")
    assert_noise(result["noise"], np.array(known(NOISE, "noise")), NOISE32)


def test_known_noise_fp64(draws) -> None:
    result = draws(*known_keys(), use_fp64=True)
    assert result["noise"].dtype == torch.float64
    assert_noise(result["noise"], np.array(known(NOISE, "noise64")), NOISE64)


def test_known_acceptance(draws) -> None:
    seeds = [row["seed"] ^ (row["step"] << 32) for row in ACCEPT]
    result = draws(seeds, known(ACCEPT, "pos"), [0] * 24, stream=noise.ACCEPTANCE_STREAM)
    assert result["hash"].tolist() == known(ACCEPT, "hash")
    assert result["u"].tolist() == known(ACCEPT, "u")


def test_known_acceptance_by_step() -> None:
    columns = [torch.tensor(known(ACCEPT, name)) for name in ("seed", "pos", "step")]
    u = noise.acceptance_uniform_ref(*columns)
    assert u.dtype == torch.float32
    assert u.tolist() == known(ACCEPT, "u")


# The model of the other tests meets the same answers


def test_model_meets_the_known_answers() -> None:
    for row in NOISE:
        key = (row["seed"], row["pos"], row["id"])
        assert int(model.murmur(*key, model.GUMBEL)[0]) == row["hash"]
        assert float(model.uniform(model.murmur(*key, model.GUMBEL))[0]) == row["u"]
        assert_noise(torch.tensor(model.gumbel(*key, False)), np.array([row["noise"]]), NOISE32)
        assert_noise(torch.tensor(model.gumbel(*key, True)), np.array([row["noise64"]]), NOISE64)
    for row in ACCEPT:
        assert float(model.acceptance(row["seed"], row["pos"], row["step"])[0]) == row["u"]


# Against the model on random keys


@pytest.mark.parametrize("stream", [model.GUMBEL, model.GUMBEL_HIGH, model.ACCEPTANCE])
def test_hash_and_uniform_equal_the_model(draws, stream: int) -> None:
    seeds, pos, ids = keys = random_keys(300, seed=1)
    result = draws(*keys, stream=stream)
    expected = np.array(
        [model.murmur(s, p, i, stream)[0] for s, p, i in zip(seeds, pos, ids, strict=True)]
    )
    assert result["hash"].tolist() == expected.tolist()
    assert result["u"].tolist() == model.uniform(expected).tolist()


@pytest.mark.parametrize("use_fp64", [False, True])
def test_noise_equals_the_model(draws, use_fp64: bool) -> None:
    seeds, pos, ids = keys = random_keys(300, seed=2)
    result = draws(*keys, use_fp64=use_fp64)
    expected = [model.gumbel(s, p, i, use_fp64)[0] for s, p, i in zip(seeds, pos, ids, strict=True)]
    assert_noise(result["noise"], np.array(expected, np.float64), NOISE64 if use_fp64 else NOISE32)


def test_only_the_low_word_of_pos_is_hashed(draws) -> None:
    here, there = draws([5], [9], [3]), draws([5], [9 + 2**32], [3])
    assert here["hash"].tolist() == there["hash"].tolist()
    assert here["hash"].tolist() != draws([5 + 2**32], [9], [3])["hash"].tolist()


# Streams


@pytest.mark.parametrize("draft", [0, noise.DRAFT_POSITION_OFFSET])
def test_streams_of_a_key_differ(draws, draft: int) -> None:
    """Draft, target, high word and acceptance: no two streams share a hash at the same key."""
    seeds, _, _ = random_keys(300, seed=3)
    pos, ids = [17] * len(seeds), [0] * len(seeds)
    target = draws(seeds, pos, ids)["hash"]
    for stream in (noise.GUMBEL_HIGH_STREAM, noise.ACCEPTANCE_STREAM):
        assert (draws(seeds, [p + draft for p in pos], ids, stream=stream)["hash"] != target).all()
    shifted = draws(seeds, [p + noise.DRAFT_POSITION_OFFSET for p in pos], ids)["hash"]
    assert (shifted != target).all()


def test_stream_constants() -> None:
    assert (noise.GUMBEL_STREAM, noise.GUMBEL_HIGH_STREAM) == (0, 0x9E3779B9)
    assert noise.ACCEPTANCE_STREAM == 0x5851F42D
    assert noise.DRAFT_POSITION_OFFSET == 2**30


def test_draft_and_target_positions_never_meet() -> None:
    """For one key the hash is a bijection of pos: distinct low words give distinct hashes."""
    pos = torch.arange(0, 4096)
    key = (torch.tensor(77), torch.tensor(5))
    both = torch.cat([pos, pos + noise.DRAFT_POSITION_OFFSET])
    assert noise.hash_ref(key[0], both, key[1], noise.GUMBEL_STREAM).unique().numel() == 8192


def test_acceptance_differs_by_step() -> None:
    seed, pos = torch.tensor(42), torch.tensor(9)
    draws_by_step = {float(noise.acceptance_uniform_ref(seed, pos, step)) for step in range(32)}
    assert len(draws_by_step) == 32


# Range

EDGE_HASHES = [0, 1, 2, 3, 255, 2**16 - 1, 2**16, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**30 - 1]
EDGE_HASHES += [2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 2**8]
EDGE_HASHES += [2**32 - 2**7, 2**32 - 2**6, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]


@triton.jit
def _bound_kernel(noise_ptr, bound_ptr, r_ptr, num, USE_FP64: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num
    r = tl.load(r_ptr + offs, mask=mask, other=0).to(tl.uint32)
    if USE_FP64:
        tl.store(noise_ptr + offs, gumbel64(r, (r & 0) ^ 0xFFFFFFFF), mask=mask)
        tl.store(bound_ptr + offs, gumbel_bound(r ^ 0xFFFFFFFF), mask=mask)
    else:
        tl.store(noise_ptr + offs, gumbel32(r).to(tl.float64), mask=mask)
        tl.store(bound_ptr + offs, gumbel_bound(r), mask=mask)


@pytest.mark.parametrize("use_fp64", [False, True])
def test_bound_is_never_below_the_noise(use_fp64: bool) -> None:
    """Edges and random hashes; all 2^32 of them in gpu/test_noise.py. In fp64 ``r`` is the high
    word, and the low word is the one that makes the noise largest."""
    rng = np.random.default_rng(4)
    powers = [p + d for k in range(2, 32) for p in [2**k] for d in (-1, 0, 1)]
    random = rng.integers(0, 2**32, 100_000).tolist()
    r = torch.tensor(EDGE_HASHES + powers + random, device=Kernel.device)
    values = torch.empty(r.numel(), dtype=torch.float64, device=Kernel.device)
    bounds = torch.empty(r.numel(), device=Kernel.device)
    block = 4096
    _bound_kernel[(triton.cdiv(r.numel(), block),)](
        values, bounds, r, r.numel(), USE_FP64=use_fp64, BLOCK=block
    )
    assert values.isfinite().all()
    assert (bounds.double() >= values).all()
    # A loose bound would decide little: within 0.5 where noise can win, but for hash 0.
    can_win = (values > 1.0) & (bounds < 100)
    assert (bounds < 100).sum() == r.numel() - 1
    assert (bounds.double() - values)[can_win].max() < 0.5


def test_range_of_fp32_noise() -> None:
    """Finite at the ends; the largest value is the documented cap of about 22.9."""
    r = torch.tensor([0, 2**32 - 1])
    u = noise.uniform_ref(r)
    assert u.tolist() == [2.0**-33, 1.0]
    ends = model.gumbel32(np.array([0, 2**32 - 1], np.uint32))
    assert_noise(
        torch.tensor(ends), np.array([33 * math.log(2), -math.log(24 * math.log(2))]), NOISE32
    )


def test_uniform_has_no_bias() -> None:
    """Mean and second moment of 2^18 draws, at a false-alarm rate of 1e-6 each (4.9 sigma)."""
    ids = torch.arange(2**18)
    u = noise.uniform_ref(noise.hash_ref(torch.tensor(3), torch.tensor(4), ids, 0)).double()
    root = math.sqrt(ids.numel())
    assert abs(u.mean() - 1 / 2) < 4.9 * math.sqrt(1 / 12) / root
    assert abs(u.square().mean() - 1 / 3) < 4.9 * math.sqrt(4 / 45) / root


def test_noise_ignores_global_generators() -> None:
    keys = [torch.tensor(x) for x in (1, 2, 3)]
    torch.manual_seed(0)
    first, state = noise.gumbel_ref(*keys, False), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, noise.gumbel_ref(*keys, False))
    torch.manual_seed(0)
    noise.gumbel_ref(*keys, True)
    assert torch.equal(state, torch.get_rng_state())
