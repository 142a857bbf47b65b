"""The bound of the noise, for every hash there is."""

import pytest
import torch
import triton
import triton.language as tl

from dspark_ops import noise

pytestmark = pytest.mark.usefixtures("poisoned_empty")

gumbel32, gumbel64, gumbel_bound = noise.gumbel32, noise.gumbel64, noise.gumbel_bound

BLOCK, LOOPS = 1024, 64
PROGRAMS = 2**32 // (BLOCK * LOOPS)


@triton.jit
def _violations_kernel(
    count_ptr, shift, USE_FP64: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr
):
    """Hashes of which ``noise <= bound - shift`` does not hold, NaN included."""
    program = tl.program_id(0).to(tl.int64)
    count = tl.zeros((BLOCK,), tl.int32)
    for loop in range(LOOPS):
        r = ((program * LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
        if USE_FP64:
            # r is the high word; the low word that makes the noise largest is all ones.
            low = tl.full((BLOCK,), 0xFFFFFFFF, tl.uint32)
            value = gumbel64(r, low)
            bound = gumbel_bound(r ^ 0xFFFFFFFF).to(tl.float64)
            finite = tl.abs(value) < 1.0e3
        else:
            value = gumbel32(r)
            bound = gumbel_bound(r)
            finite = tl.abs(value) < 1.0e3
        count += tl.where(finite & (value <= bound - shift), 0, 1)
    tl.store(count_ptr + program, tl.sum(count, axis=0))


def violations(use_fp64: bool, shift: float) -> int:
    counts = torch.empty(PROGRAMS, dtype=torch.int32, device="cuda")
    _violations_kernel[(PROGRAMS,)](counts, shift, USE_FP64=use_fp64, BLOCK=BLOCK, LOOPS=LOOPS)
    return int(counts.sum(dtype=torch.int64))


@pytest.mark.parametrize("use_fp64", [False, True])
def test_bound_is_never_below_the_noise_of_all_hashes(use_fp64: bool) -> None:
    """2^32 hashes. The shift is room for a contracted multiply-add: half an ulp of 22.9."""
    assert PROGRAMS * BLOCK * LOOPS == 2**32
    assert violations(use_fp64, shift=1e-6) == 0


@pytest.mark.parametrize("use_fp64", [False, True])
def test_violations_are_counted(use_fp64: bool) -> None:
    """The bound is within 0.1 of the noise somewhere, so a bound lower by that is violated."""
    assert violations(use_fp64, shift=0.1) > 0


@pytest.mark.parametrize("use_fp64", [False, True])
def test_every_noise_is_finite(use_fp64: bool) -> None:
    """With a bound raised out of the way, only a value that is not finite would count."""
    assert violations(use_fp64, shift=-1e3) == 0
