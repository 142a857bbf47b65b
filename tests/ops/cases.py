"""Inputs of the sampler ops, made on the CPU from fixed seeds and then put on a device."""

from dataclasses import dataclass

import torch
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)

# By slot: sampled at 1, sampled, greedy, greedy by sign, sampled.
TEMPERATURES = (1.0, 0.7, 0.0, -1.0, 1.6)
INERT = -1


@dataclass
class Inputs:
    """The arguments that every sampler has."""

    logits: Tensor
    idx_mapping: Tensor
    temperature: Tensor
    seeds: Tensor
    pos: Tensor

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.logits, self.idx_mapping, self.temperature, self.seeds, self.pos


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def make_inputs(
    device: str,
    vocab: int,
    slots: tuple[int, ...] = (1, INERT, 2),
    dtype: torch.dtype = F32,
    temperatures: tuple[float, ...] = TEMPERATURES,
    seed: int = 0,
) -> Inputs:
    """Contiguous inputs, a row for each of ``slots``."""
    num_rows = len(slots)
    return Inputs(
        logits=random_values((num_rows, vocab), dtype, seed).to(device),
        idx_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
        temperature=torch.tensor(temperatures, device=device),
        seeds=(torch.arange(len(temperatures)) * 0x9E3779B97F4A7C1 - 5 - seed).to(device),
        pos=(torch.arange(num_rows) * 7 + 11).to(device),
    )


def from_rows(
    device: str, rows: list[list[float]], dtype: torch.dtype = F32, temperature: float = 0.0
) -> Inputs:
    """Given logits, each row in a slot of its own, all at one temperature."""
    inputs = make_inputs(
        device, 1, tuple(range(len(rows))), dtype, temperatures=(temperature,) * len(rows)
    )
    inputs.logits = torch.tensor(rows).to(dtype).to(device)
    return inputs


def strided(x: Tensor) -> Tensor:
    """``x`` in every third row (2-D) or entry (1-D) of a larger buffer."""
    buffer = torch.full((x.shape[0], 3, *x.shape[1:]), 99, dtype=x.dtype, device=x.device)
    buffer[:, 1] = x
    return buffer[:, 1]


def make_cache(
    device: str, vocab: int, dtype: torch.dtype, num_slots: int = len(TEMPERATURES), cols: int = 3
) -> Tensor:
    """[S, C, V + 5] full of 7.0, rows neither adjacent nor at the start of their buffer."""
    return torch.full((num_slots, cols, vocab + 8), 7.0, dtype=dtype, device=device)[..., 3:]
