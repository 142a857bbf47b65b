"""Toy targets and drafts: Markov, so that every law is a small table.

    toy         V   draft ids  N  logits  what for
    one step    3   3          1  f32     draft and target far apart: shared noise shows most
    returning   3   3          2  f32     most drafts are rejected whole, and their positions return
    rounding    4   4          2  bf16    sums that bf16 rounds by up to half a nat; ties
    truncated   5   5          3  f32     a draft of two ids a step, a target that never emits two
    reduced     16  6          4  bf16    a draft vocabulary of some of the target's ids
    wide        16  16         2  bf16    a peaked target and a flatter draft
    filtered    16  16         3  f32     both by top-k and top-p, the draft after its bias is added

The target's logits depend on the previous token, the draft's on the step and that token, by
``base[:, i] + linear(embedding(prev, W1), W2)``. W1 is the identity and W2 holds bf16 numbers, so
that the product is ``bias[prev]``, bit for bit, on every device and with TF32 too; what is sampled
is the rounded sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import dspark_ops

TEMPERATURES = (1.0, 0.7, 0.0)
SAMPLED = TEMPERATURES[:2]
NEVER = float("-inf")


@dataclass(frozen=True)
class Toy:
    """V target ids, D draft ids, N draft steps."""

    name: str
    target: Tensor  # [V, V] logits after each token
    base: Tensor  # [N, D], of the dtype of bias
    bias: Tensor  # [V, D]
    num_tokens: int  # of each request's text
    draft_ids: Tensor | None = None  # [D] target ids of a reduced draft vocabulary, ascending
    truncated: Tensor | None = None  # [N, D] bool: never sampled at a step
    top_k_top_p: tuple[int, float] | None = None  # of the target, over temperature, and the draft
    anchor: int = 0  # the token before the text

    @property
    def vocab(self) -> int:
        return self.target.shape[0]

    @property
    def num_steps(self) -> int:
        return self.base.shape[0]

    def filter(self, logits: Tensor) -> Tensor:
        """``logits`` [B, V] f32 as the toy samples them, in place."""
        if self.top_k_top_p is None:
            return logits
        k, p = self.top_k_top_p
        some = logits.new_empty(len(logits))
        return dspark_ops.top_k_top_p_(
            logits, torch.full_like(some, k, dtype=torch.int32), torch.full_like(some, p)
        )

    @property
    def sampled_base(self) -> Tensor:
        """[N, D]: -inf where truncated."""
        if self.truncated is None:
            return self.base
        return self.base.masked_fill(self.truncated, NEVER)

    @property
    def target_ids(self) -> Tensor:
        """[D] the target id of each draft id."""
        return torch.arange(self.vocab) if self.draft_ids is None else self.draft_ids


def _shifted(logits: Tensor) -> Tensor:
    """[V, V]: after token t, ``logits`` shifted by t."""
    return torch.stack([logits.roll(t) for t in range(len(logits))])


def _log(*law: float) -> Tensor:
    """f32 with values of bf16."""
    return torch.tensor(law).log().bfloat16().float()


def _one_step() -> Toy:
    target, bias = _shifted(_log(0.02, 0.53, 0.45)), _shifted(_log(0.6, 0.38, 0.02))
    return Toy("one step", target, torch.zeros(1, 3), bias, num_tokens=4)


def _returning() -> Toy:
    target, bias = _shifted(_log(0.58, 0.03, 0.39)), _shifted(_log(0.95, 0.03, 0.02))
    return Toy("returning", target, torch.zeros(2, 3), bias, num_tokens=5)


def _rounding() -> Toy:
    """bf16 has steps of 1 from 128 to 256: biases 1/16 apart become a whole nat apart."""
    bias = _shifted(torch.tensor([0.46875, 0.53125, 0.46875, 0.53125]).bfloat16())
    base = torch.tensor([[140.0, 140, 140, 140], [141, 140, 140, 140]]).bfloat16()
    target = _shifted(torch.tensor([1.0, 0.0, 1.0, 0.25]).bfloat16())
    return Toy("rounding", target, base, bias, num_tokens=4)


def _truncated() -> Toy:
    target = _shifted(_log(0.4, 0.4, 0.2, 0.0, 0.0))
    base = _log(0.5, 0.3, 0.1, 0.1, 0.1).expand(3, -1)
    bias = torch.eye(5) * 0.5
    truncated = torch.tensor([False, False, True, True, True]).expand(3, -1)
    return Toy("truncated", target, base, bias, num_tokens=4, truncated=truncated)


def _reduced() -> Toy:
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([1, 2, 5, 8, 11, 15])
    target = torch.randn(16, 16, generator=generator)
    target[:, ids] += 2
    base = torch.randn(4, 6, generator=generator) * 0.5
    bias = target[:, ids] + torch.randn(16, 6, generator=generator) * 0.5
    target, base, bias = (x.bfloat16() for x in (target, base, bias))
    return Toy("reduced", target, base, bias, num_tokens=6, draft_ids=ids)


def _wide() -> Toy:
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(16, 16, generator=generator) * 2
    base = torch.randn(2, 16, generator=generator) * 0.5
    bias = target * 0.6 + torch.randn(16, 16, generator=generator) * 0.5
    target, base, bias = (x.bfloat16() for x in (target, base, bias))
    return Toy("wide", target, base, bias, num_tokens=4)


def _filtered() -> Toy:
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(16, 16, generator=generator) * 2
    base = torch.randn(3, 16, generator=generator) * 0.5
    bias = (target * 0.7 + torch.randn(16, 16, generator=generator)).bfloat16().float()
    return Toy("filtered", target, base, bias, num_tokens=4, top_k_top_p=(6, 0.85))


def toys() -> list[Toy]:
    small = [_one_step(), _returning(), _rounding(), _truncated()]
    return [*small, _reduced(), _wide(), _filtered()]
