"""Masses as integers: the reference against float64, the Triton function against the reference."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_ops import mass
from dspark_ops.mass import LARGEST, mass_shift, masses_ref

from .conftest import Kernel

ONE = 2**44
INF = math.inf
# The interpreter's numpy says what a GPU does without a word: inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
mass_of = mass.mass_of


@triton.jit
def _mass_kernel(out_ptr, x_ptr, top_ptr, num, shift, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    top = tl.load(top_ptr + offs, mask=mask, other=0.0)
    tl.store(out_ptr + offs, mass_of(x, top, shift), mask=mask)


def kernel_masses(x: Tensor, top: Tensor, shift: int) -> Tensor:
    x, top = x.flatten().to(Kernel.device), top.expand_as(x).flatten().to(Kernel.device)
    out = torch.empty(x.shape, dtype=torch.int64, device=Kernel.device)
    _mass_kernel[(triton.cdiv(x.numel(), 1024),)](out, x, top, x.numel(), shift, BLOCK=1024)
    return out.cpu()


def pairs(num: int = 20_000) -> tuple[Tensor, Tensor]:
    """(x, largest [..., 1]): all distances from 0 to past 32, tops of every size; -inf too."""
    g = torch.Generator().manual_seed(0)
    tops = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 9.7, -50.3, 1e3, 1e6, 2.0**24, -3e5, 1e30, LARGEST, INF]
    )
    below = torch.rand(len(tops), num, generator=g) * 34
    below[:, : num // 4] = 10.0 ** -(torch.rand(len(tops), num // 4, generator=g) * 44)
    below[:, :6] = torch.tensor([0.0, 32.0, 31.999998, 2.0**-149, INF, 1e38])
    return tops[:, None].clamp(max=LARGEST) - below, tops[:, None]


def test_the_largest_is_2_44() -> None:
    tops = torch.tensor([0.0, -0.0, 1e-45, 3.7, -1e30, LARGEST, INF])
    assert (masses_ref(tops, tops[:, None], 0).diagonal() == ONE).all()
    assert masses_ref(torch.tensor([0.0, -0.0]), torch.tensor([-0.0]), 0).tolist() == [ONE] * 2
    assert masses_ref(torch.tensor([LARGEST]), torch.tensor([INF]), 0).item() == ONE


def test_none_is_negative_or_above_the_largest() -> None:
    x, top = pairs()
    masses = masses_ref(x, top, 0)
    assert masses.dtype == torch.int64
    assert masses.min() == 0
    assert masses.max() == ONE
    assert (masses[top.clamp(max=LARGEST) - x >= 32] == 0).all()
    assert (masses[x == -INF] == 0).all()


@pytest.mark.parametrize("top", [0.0, 1.0, -7.3, 40.0, -1000.5, 1e5])
def test_relative_error(top: float) -> None:
    """Polynomial and fixed point 1.45e-7, and about a unit of 2^-44 that is cut off."""
    g = torch.Generator().manual_seed(1)
    x = top - torch.cat([torch.rand(200_000, generator=g) * 32, torch.rand(100_000, generator=g)])
    exact = (x.double() - torch.tensor(top).double()).exp() * ONE
    error = (masses_ref(x, torch.tensor([top]), 0) - exact).abs()
    assert (error - 1.45e-7 * exact).max() < 1.02
    is_large = exact > ONE * 2.0**-16
    assert is_large.sum() > 100_000
    assert (error / exact)[is_large].max() < 1.5e-7


def test_distances_that_fp32_rounds() -> None:
    """9.1 - (-0.03) has no fp32: what the subtraction loses would be 5e-7 of the mass."""
    g = torch.Generator().manual_seed(2)
    top = torch.rand(100_000, 1, generator=g) + 9
    x = torch.randn(100_000, 1, generator=g) / 8
    exact = (x.double() - top.double()).exp() * ONE
    rounded = (x - top).double().exp() * ONE
    assert ((rounded - exact) / exact).abs().max() > 4e-7
    assert ((masses_ref(x, top, 0) - exact) / exact).abs().max() < 1.5e-7


def test_shift_lets_every_vocabulary_fit() -> None:
    """Equal logits: the sum is at most 2^62, and no bit is dropped that need not be."""
    for vocab in (1, 2, 151936, 2**18, 2**18 + 1, 248320, 2**19, 2**20, 2**24 + 1, 2**30):
        shift = mass_shift(vocab)
        largest = int(masses_ref(torch.zeros(1), torch.zeros(1), shift))
        assert largest == ONE >> shift
        assert vocab * largest <= 2**62
        assert shift == 0 or vocab * (largest << 1) > 2**62


@pytest.mark.parametrize("vocab", [2**18, 2**20])
def test_totals_do_not_wrap(vocab: int) -> None:
    shift = mass_shift(vocab)
    assert masses_ref(torch.zeros(1, vocab), torch.zeros(1, 1), shift).sum().item() == 2**62
    assert mass_shift(vocab) == {2**18: 0, 2**20: 2}[vocab]


def test_a_shift_drops_low_bits() -> None:
    x, top = pairs()
    assert torch.equal(masses_ref(x, top, 0) >> 5, masses_ref(x, top, 5))


@pytest.mark.parametrize("shift", [0, 1, 2, 12])
def test_the_kernel_gives_the_same_integers(shift: int) -> None:
    x, top = pairs()
    masses = kernel_masses(x, top, shift)
    assert torch.equal(masses, masses_ref(x, top, shift).flatten())


def test_the_kernel_with_a_row_of_minus_inf() -> None:
    x = torch.full((1, 3), -INF)
    assert (kernel_masses(x, x[:, :1], 0) == 0).all()
    assert (masses_ref(x, x[:, :1], 0) == 0).all()
