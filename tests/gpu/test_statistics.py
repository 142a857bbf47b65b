"""Draws on a GPU follow softmax(logits / temperature). Seeds are fixed, so runs are repeatable."""

import math

import pytest
import torch
from torch import Tensor

import dspark_ops

from ..ops.test_statistics import assert_count, assert_follows

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def draw(logits: Tensor, num: int, temperature: float = 1.0, **kwargs) -> Tensor:
    """``num`` draws at positions 0, 1, ... of one request, in one launch."""
    return dspark_ops.gumbel_sample(
        logits.cuda().expand(num, -1),
        torch.zeros(num, dtype=torch.int32, device="cuda"),
        torch.tensor([temperature], device="cuda"),
        torch.tensor([1], device="cuda"),
        torch.arange(num, device="cuda"),
        **kwargs,
    ).cpu()


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("vocab", [64, 4000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chi_square_of_1e6_draws(temperature: float, vocab: int, use_fp64: bool) -> None:
    """False alarms: 1e-6 each. V 4000 is walked in chunks of 8 tiles, mostly without noise."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    ids = draw(logits, 1_000_000, temperature, use_fp64=use_fp64)
    assert_follows(ids, torch.softmax(logits.double() / temperature, -1))


def test_mass_of_a_token_12_below_the_rest() -> None:
    """1e6 draws, 100 ids 12 below the first: about 614 hits. False alarm: 1e-6."""
    logits = torch.full((101,), -12.0)
    logits[0] = 0.0
    lower = 100 * math.exp(-12)
    assert_count(int((draw(logits, 1_000_000) > 0).sum()), 1e6 * lower / (1 + lower))


@pytest.mark.parametrize("use_fp64", [False, True])
def test_b1_16_tail(use_fp64: bool) -> None:
    """262144 ids 20.5 below one: 1e5 draws hit them 32.8 times on average; 4 sigma."""
    logits = torch.full((262145,), -20.5)
    logits[0] = 0.0
    hits = int((draw(logits, 100_000, use_fp64=use_fp64) > 0).sum())
    assert 10 <= hits <= 56


def test_b1_22_1e5_ids_below_the_real_vocabulary() -> None:
    storage = torch.zeros(1, 1024)
    storage[:, :1000] = -5.0
    ids = draw(storage.cuda()[:, :1000], 100_000)
    assert (int(ids.min()), int(ids.max())) == (0, 999)


def test_b1_23_head_of_a_large_bf16_vocabulary() -> None:
    """One id 6 above 131071 others: its share of 1e6 draws within 4.9 sigma (false alarm 1e-6)."""
    logits = torch.zeros(131072, dtype=torch.bfloat16)
    logits[70_000] = 6.0
    chance = math.exp(6) / (math.exp(6) + 131071)
    hits = int((draw(logits, 1_000_000) == 70_000).sum())
    assert abs(hits - 1e6 * chance) < 4.9 * math.sqrt(1e6 * chance * (1 - chance))
