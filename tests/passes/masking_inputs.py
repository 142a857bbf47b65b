"""Random logits with a k and a p a row, none of which is near an edge, and the rule in float64.

Rows take turns in kind: as they come, one token that has nearly all the mass, only few tokens above
-inf, only -inf. No two finite logits of a row are equal, and no mass that a spelling here compares
with p is within ``EDGE`` of it, so that the set of kept tokens does not depend on rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import DEVICE

MASKING = "masking_fusion"
K, P = 20, 0.8  # those that a spelling has as a number
EDGE = 1e-5
INF = torch.inf


class Rows(NamedTuple):
    """B rows, V vocabulary."""

    logits: Tensor  # f32 [B, V]
    k: Tensor  # i64 [B], from 1 to V + 5
    p: Tensor  # f32 [B], from 0 to beyond 1
    other: Tensor  # f32 [B, V], for what a test needs besides


def make_rows(num_rows: int = 6, vocab: int = 150, seed: int = 0, scale: float = 2.0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = [_row(i % 6, vocab, scale, generator) for i in range(num_rows)]
    logits, k, p = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    made = Rows(
        logits=torch.stack(logits) if rows else torch.empty(0, vocab),
        k=torch.tensor(k, dtype=torch.int64),
        p=torch.tensor(p, dtype=torch.float32),
        other=torch.randn(num_rows, vocab, generator=generator),
    )
    return Rows(*(tensor.to(DEVICE) for tensor in made))


def _row(
    kind: int, vocab: int, scale: float, generator: torch.Generator
) -> tuple[Tensor, int, float]:
    while True:
        row = torch.randn(vocab, generator=generator) * scale
        k = int(torch.randint(1, vocab, (), generator=generator))
        p = float(torch.rand((), generator=generator))
        if kind == 1:
            row[k - 1] = 14.0 + scale
        elif kind == 2:
            row[torch.randperm(vocab, generator=generator)[:-5]] = -INF
        elif kind == 3:
            row[:] = -INF
        elif kind == 4:
            k, p = vocab + 5, 1.5
        elif kind == 5:
            k, p = 1, 0.0
        finite = row[row > -INF]
        if len(finite.unique()) == len(finite) and _is_clear(row, k, p):
            return row, k, p


def _is_clear(row: Tensor, k: int, p: float) -> bool:
    """Whether no mass that is compared with a p is close to it."""
    for kept in (len(row), k, K):
        masses = row.double().sort(descending=True).values[:kept].softmax(-1).cumsum(-1)
        for threshold in (p, P):
            gap = (masses - threshold).abs()
            if 0 < threshold < 1 and gap.min() < EDGE:
                return False
    return True


def kept(logits: Tensor, k: Tensor | int | None = None, p: Tensor | float | None = None) -> Tensor:
    """bool [B, V]: the k largest, then of those the shortest prefix whose mass reaches p."""
    order = logits.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = order.values > -INF
    if k is not None:
        keep &= rank < torch.as_tensor(k, device=logits.device).view(-1, 1)
    if p is not None:
        mass = order.values.masked_fill(~keep, -INF).softmax(-1).nan_to_num(0.0)
        before = mass.cumsum(-1) - mass
        p = torch.as_tensor(p, device=logits.device, dtype=torch.float64).view(-1, 1)
        keep &= (before < p) | (p >= 1) | (rank == 0)
    return torch.zeros_like(keep).scatter_(1, order.indices, keep)


def masked_by_rule(logits: Tensor, k: Tensor | int | None, p: Tensor | float | None) -> Tensor:
    return logits.masked_fill(~kept(logits, k, p), -INF)
