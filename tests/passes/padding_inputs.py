"""A random batch for `prepare_positions`, and a bool buffer of random contents beside it."""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_ops import prepare_positions

from .inputs import DEVICE

PADDING = "padding_fusion"
LENGTH = 16


class Batch(NamedTuple):
    """B rows, S slots, T tokens."""

    idx_mapping: Tensor  # i32 [B]
    query_start_loc: Tensor  # i32 [B + 1]
    num_computed_tokens: Tensor  # i32 [S]
    positions: Tensor  # i64 [T]
    seq_lens: Tensor  # i32 [B + 2]
    is_padding: Tensor  # bool [T]
    other: Tensor  # bool [T], for what a test needs besides
    input_ids: Tensor  # i64 [n]


def make_batch(num_tokens: int = 6, seed: int = 0, length: int = LENGTH) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def bools(size: int) -> Tensor:
        return torch.rand(size, generator=generator) > 0.5

    made = Batch(
        idx_mapping=torch.tensor([2, -1, 0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 2, 3, 5], dtype=torch.int32),
        num_computed_tokens=torch.randint(0, 99, (4,), generator=generator, dtype=torch.int32),
        positions=torch.full((length,), -9),
        seq_lens=torch.full((5,), -9, dtype=torch.int32),
        is_padding=bools(length),
        other=bools(length),
        input_ids=torch.randint(0, 9, (num_tokens,), generator=generator),
    )
    return Batch(*(tensor.to(DEVICE) for tensor in made))


def prepare(x: Batch) -> None:
    """The op without padding, as the fills stand beside it."""
    prepare_positions(*x[:5])
