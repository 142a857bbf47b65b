"""Draws follow softmax(logits / temperature): chi-square and tails on the CPU reference.

Seeds are fixed, so a run is repeatable; the false-alarm rates say how often a right sampler would
have failed for other seeds.
"""

import math

import pytest
import torch
from torch import Tensor

import dspark_ops

from .tolerances import FALSE_ALARM


def draw(logits: Tensor, num: int, seed: int = 1, temperature: float = 1.0, **kwargs) -> Tensor:
    """``num`` draws at positions 0, 1, ... of one request."""
    out = []
    batch = min(num, max(1, 4_000_000 // logits.numel()))
    for start in range(0, num, batch):
        rows = min(batch, num - start)
        out.append(
            dspark_ops.gumbel_sample(
                logits.expand(rows, -1),
                torch.zeros(rows, dtype=torch.int32),
                torch.tensor([temperature]),
                torch.tensor([seed]),
                start + torch.arange(rows),
                **kwargs,
            )
        )
    return torch.cat(out)


def chi_square_limit(freedom: int, rate: float = FALSE_ALARM) -> float:
    """Upper quantile by Wilson and Hilferty's cube, good to 1 % from 5 degrees of freedom on."""
    z = torch.special.ndtri(torch.tensor(1 - rate, dtype=torch.float64)).item()
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * math.sqrt(spread)) ** 3


def assert_follows(ids: Tensor, probability: Tensor) -> None:
    counts = torch.bincount(ids, minlength=probability.numel()).double()
    expected = probability.double() * ids.numel()
    rare = expected < 10
    if rare.any():  # ids too rare to test alone are one cell
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < chi_square_limit(counts.numel() - 1)


def assert_count(count: int, expected: float) -> None:
    """A binomial count with a small chance is nearly Poisson: both tails at FALSE_ALARM."""
    terms = [math.exp(k * math.log(expected) - expected - math.lgamma(k + 1)) for k in range(2000)]
    below, above = sum(terms[: count + 1]), sum(terms[count:])
    assert min(below, above) > FALSE_ALARM / 2, f"{count} hits, expected {expected:.1f}"


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_chi_square_of_1e5_draws(temperature: float, use_fp64: bool) -> None:
    """False alarms: 1e-6 each."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 1.5
    ids = draw(logits, 100_000, temperature=temperature, use_fp64=use_fp64)
    assert_follows(ids, torch.softmax(logits.double() / temperature, -1))


def test_chi_square_rejects_a_wrong_distribution() -> None:
    """The test above can fail: one percent more on one of 64 ids' logits is seen."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 1.5
    ids = draw(logits, 100_000)
    wrong = logits.clone()
    wrong[logits.argmax()] += 0.1
    with pytest.raises(AssertionError):
        assert_follows(ids, torch.softmax(wrong.double(), -1))


def test_chi_square_over_seeds_and_steps() -> None:
    """Draws over seeds at one position, with bias and a cache column. False alarm: 1e-6."""
    num, vocab = 100_000, 20
    generator = torch.Generator().manual_seed(4)
    base, bias = torch.randn(vocab, generator=generator), torch.randn(vocab, generator=generator)
    ids = dspark_ops.gumbel_sample(
        base.expand(num, -1),
        torch.arange(num),
        torch.full((num,), 0.8),
        torch.arange(num) * 0x2545F4914F6CDD1D,
        torch.full((num,), 1234),
        bias=bias,
        logits_cache=torch.zeros(num, 1, vocab),
        cache_col=0,
        is_drafting=True,
    )
    assert_follows(ids, torch.softmax((base + bias).double() / 0.8, -1))


def test_pairs_of_successive_positions_are_independent() -> None:
    """64 cells of (id at pos, id at pos + 1) under equal logits. False alarm: 1e-6."""
    ids = draw(torch.zeros(8), 100_000)
    assert_follows(ids[:-1:2] * 8 + ids[1::2], torch.full((64,), 1 / 64))


def test_pairs_of_draft_and_target_are_independent() -> None:
    """B2-01's cause: a shared stream would put all the mass on the diagonal. False alarm: 1e-6."""
    draft, target = draw(torch.zeros(8), 50_000, is_drafting=True), draw(torch.zeros(8), 50_000)
    assert_follows(draft * 8 + target, torch.full((64,), 1 / 64))


@pytest.mark.parametrize("use_fp64", [False, True])
def test_mass_of_a_token_12_below_the_rest(use_fp64: bool) -> None:
    """100 ids 12 below the first: 1e5 draws hit them about 61 times. False alarm: 1e-6."""
    logits = torch.full((101,), -12.0)
    logits[0] = 0.0
    hits = int((draw(logits, 100_000, use_fp64=use_fp64) > 0).sum())
    lower = 100 * math.exp(-12)
    assert_count(hits, 100_000 * lower / (1 + lower))


def test_b1_16_tail_of_fp32_noise() -> None:
    """Head and 262144 ids 12 below it: the tail's share within 4.9 sigma (false alarm: 1e-6).

    The case has the tail 20.5 below and 1e5 draws, which gpu/test_ops.py makes. The cap of fp32
    noise is 33 ln 2 = 22.9: an id further than about 26 below the best never wins.
    """
    logits = torch.full((262144,), -12.0)
    logits[0] = 0.0
    num = 100
    hits = int((draw(logits, num) > 0).sum())
    chance = 262144 * math.exp(-12) / (1 + 262144 * math.exp(-12))
    assert abs(hits - num * chance) < 4.9 * math.sqrt(num * chance * (1 - chance))


def test_b1_10_equal_logits_share_the_mass() -> None:
    counts = torch.bincount(draw(torch.zeros(8), 80_000), minlength=8)
    assert ((counts / 80_000 - 0.125).abs() < 0.005).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b1_22_ids_below_the_real_vocabulary(temperature: float) -> None:
    storage = torch.zeros(1, 1024)
    storage[:, :1000] = -5.0
    ids = draw(storage[:, :1000], 20_000, temperature=temperature)
    assert ids.min() == 0
    assert ids.max() < 1000
    assert (ids.unique().numel() == 1) == (temperature == 0.0)


def test_b2_17_temperature_reaches_the_draw() -> None:
    ids = draw(torch.tensor([2.0, 1.5, 1.0, 0.5]), 4000)
    assert abs(int((ids == 0).sum()) - 1820) <= 126
