"""Calls of rejection_sample: its two implementations, batches of every kind, rounds of a draft."""

import math
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dspark_ops

from .cases import F32
from .conftest import Kernel, op_module

module = op_module("rejection_sample")
METHODS = ("standard", "block")
I32 = torch.int32


class Reference:
    """The public function on CPU tensors."""

    device = "cpu"
    rejection_sample = staticmethod(dspark_ops.rejection_sample)


class Kernels:
    """The launcher: interpreted on CPU tensors, compiled on a GPU."""

    device = Kernel.device
    rejection_sample = staticmethod(module._rejection_sample_launch)


Ops = type[Reference] | type[Kernels]


def under_interpreter(ops: Ops, few: int, many: int) -> int:
    """A program takes the interpreter some 5 ms."""
    return few if ops is Kernels and ops.device == "cpu" else many


@dataclass
class Batch:
    """The arguments of a call."""

    target_logits: Tensor
    draft_logits: Tensor | None
    draft_token_ids: Tensor
    cu_num_logits: Tensor
    pos: Tensor
    idx_mapping: Tensor
    temperature: Tensor
    seeds: Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def to(self, device: str) -> "Batch":
        return Batch(*(None if x is None else x.to(device) for x in self.args))

    def rows(self, chosen: list[int]) -> "Batch":
        """These rows in this order, with copies of their logit rows."""
        cu = self.cu_num_logits.tolist()
        index = torch.tensor([i for b in chosen for i in range(cu[b], cu[b + 1])])
        index = index.long().to(self.pos.device)
        starts = np.cumsum([0] + [cu[b + 1] - cu[b] for b in chosen])
        return replace(
            self,
            target_logits=self.target_logits[index],
            draft_token_ids=self.draft_token_ids[index],
            cu_num_logits=torch.tensor(starts, dtype=I32, device=self.pos.device),
            pos=self.pos[index],
            idx_mapping=self.idx_mapping[chosen],
        )


def starts_of(drafts: list[int]) -> Tensor:
    return torch.tensor([0, *(g + 1 for g in drafts)]).cumsum(0).int()


def make_batch(
    device: str,
    drafts: list[int],
    vocab: int,
    *,
    dtype: torch.dtype = F32,
    draft_dtype: torch.dtype | None = None,
    temperatures: tuple[float, ...] = (1.0, 0.7, 0.0, 1.6, -1.0),
    num_steps: int | None = None,
    apart: float = 0.7,
    has_draft: bool = True,
    seed: int = 0,
) -> Batch:
    """Row b has ``drafts[b]`` draft tokens drawn from q, -1 if it has no logits; slots permuted.

    q is the target at a distance ``apart``; a greedy row's tokens are the argmax four times in
    five.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_slots = len(drafts), len(drafts) + 2
    steps = max([*drafts, 0]) if num_steps is None else num_steps
    cu = starts_of(drafts)
    num_logits = int(cu[-1])
    # Rows that differ in height and lean to either end: no statistics of one serve another.
    height, lean = (torch.randn(num_logits, 1, generator=generator) * 3 for _ in range(2))
    target = torch.randn(num_logits, vocab, generator=generator) * 2
    target = (target + height + lean * torch.linspace(-1, 1, vocab)).to(dtype)
    draft = torch.randn(num_slots, steps, vocab, generator=generator)
    ids = torch.randint(0, vocab, (num_logits,), generator=generator)
    slots = torch.randperm(num_slots, generator=generator)[:num_rows].int()
    temperature = torch.tensor((temperatures * num_slots)[:num_slots])
    draft = draft.to(draft_dtype or dtype)
    for b, g in enumerate(drafts):
        slot, start = int(slots[b]), int(cu[b])
        t = float(temperature[slot])
        is_sampled = 1e-5 <= t < math.inf
        t = t if is_sampled else 1.0
        for i in range(min(g, steps)):
            logits = target[start + i].float()
            q = (logits + apart * torch.randn(vocab, generator=generator)) * t
            draft[slot, i] = q.to(draft.dtype)
            chosen = torch.multinomial(
                torch.softmax(draft[slot, i].float() / t, -1), 1, generator=generator
            )
            if not is_sampled and torch.rand((), generator=generator) < 0.8:
                chosen = logits.argmax()
            ids[start + i + 1] = chosen
    return Batch(
        target,
        draft if has_draft else None,
        ids,
        cu,
        torch.randint(0, 100_000, (num_logits,), generator=generator),
        slots,
        temperature,
        torch.randint(-(2**62), 2**62, (num_slots,), generator=generator),
    ).to(device)


def from_probabilities(*rows: list[float] | np.ndarray) -> Tensor:
    return torch.tensor(np.array(rows), dtype=torch.float64).log().float()


def repeated(
    ps: Tensor, qs: Tensor | None, xs: list[int], num: int, temperature: float = 1.0
) -> Batch:
    """The same draft in ``num`` rows of a seed each; ``ps`` [g + 1, V], ``qs`` [g, V] logits."""
    g, vocab = len(xs), ps.shape[1]
    ids = torch.tensor([0, *xs])
    return Batch(
        ps.repeat(num, 1),
        None if qs is None else qs.expand(num, g, vocab),
        ids.repeat(num),
        torch.arange(num + 1, dtype=I32) * (g + 1),
        torch.arange(g + 1).repeat(num) + 100,
        torch.arange(num),
        torch.full((num,), temperature),
        torch.arange(num) * 0x2545F4914F6CDD1D,
    )


def random_tables(vocab: int, length: int, seed: int, zeros: bool) -> dict[tuple[int, ...], Any]:
    """A law for each sequence of fewer than ``length`` tokens; some probabilities zero."""
    rng = np.random.default_rng(seed)
    tables = {}
    for n in range(length):
        for prefix in product(range(vocab), repeat=n):
            law = rng.random(vocab) ** 2
            if zeros:
                law[rng.integers(vocab)] = 0.0
            tables[prefix] = law / law.sum()
    return tables


def every_draft(vocab: int, steps: int, num: int) -> tuple[Batch, list[Any]]:
    """``num`` rows for each draft of ``steps`` tokens, and each draft with its p and q."""
    p, q = random_tables(vocab, steps + 1, 3, False), random_tables(vocab, steps, 4, False)
    batches, drafts = [], []
    for xs in product(range(vocab), repeat=steps):
        ps = [p[xs[:i]] for i in range(steps + 1)]
        qs = [q[xs[:i]] for i in range(steps)]
        batches.append(repeated(from_probabilities(*ps), from_probabilities(*qs), list(xs), num))
        drafts.append((xs, ps, qs))
    rows = num * len(batches)
    joined = Batch(
        torch.cat([b.target_logits for b in batches]),
        torch.cat([b.draft_logits for b in batches]),
        torch.cat([b.draft_token_ids for b in batches]),
        torch.arange(rows + 1, dtype=I32) * (steps + 1),
        torch.cat([b.pos for b in batches]),
        torch.arange(rows),
        torch.ones(rows),
        torch.arange(rows) * 0x2545F4914F6CDD1D,
    )
    return joined, drafts


# Rounds, drafted by the product's own sampler


@dataclass
class Pair:
    """Target and draft whose logits depend on the previous token alone: [V, V] tables."""

    target: Tensor
    draft: Tensor
    temperature: float = 1.0
    is_greedy: bool = False  # the draft; q is then one-hot

    @property
    def law(self) -> Tensor:
        return torch.softmax(self.target.double() / self.temperature, -1)


def random_pair(vocab: int, **kwargs: Any) -> Pair:
    generator = torch.Generator().manual_seed(vocab)
    target = torch.randn(vocab, vocab, generator=generator)
    return Pair(target, target + 0.8 * torch.randn(vocab, vocab, generator=generator), **kwargs)


def constant_pair(p: Any, q: Any, **kwargs: Any) -> Pair:
    """The same p and q at every step."""
    vocab = len(p)
    rows = (from_probabilities(np.array(x, np.float64)).expand(vocab, vocab) for x in (p, q))
    return Pair(*rows, **kwargs)


def draft_and_verify(
    pair: Pair, anchor: Tensor, pos: Tensor, seeds: Tensor, steps: int, method: str, **flags: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """One round of each request: row b drafts from ``anchor[b]`` at ``pos[b]`` and is verified."""
    device, num, vocab = anchor.device, anchor.shape[0], pair.target.shape[0]
    target, draft = pair.target.to(device), pair.draft.to(device)
    slots = torch.arange(num, device=device)
    temperature = torch.full((num,), pair.temperature, device=device)
    cache = torch.empty(num, steps, vocab, device=device)
    ids = [anchor]
    for i in range(steps):
        logits = draft[ids[-1]]
        if pair.is_greedy:
            ids.append(logits.argmax(-1))
            continue
        ids.append(
            dspark_ops.gumbel_sample(
                *(logits, slots, temperature, seeds, pos + i),
                logits_cache=cache,
                cache_col=i,
                is_drafting=True,
            )
        )
    drafted = torch.stack(ids, 1)
    return dspark_ops.rejection_sample(
        (target[drafted] / pair.temperature).view(-1, vocab),
        None if pair.is_greedy else cache,
        drafted.view(-1),
        torch.arange(num + 1, dtype=I32, device=device) * (steps + 1),
        (pos[:, None] + torch.arange(steps + 1, device=device)).view(-1),
        slots,
        temperature,
        seeds,
        num_steps=steps,
        method=method,
        **flags,
    )


def first_tokens(
    pair: Pair, num: int, steps: int, method: str, device: str = "cpu", **flags: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(first token, second token, accepted in the first round) of ``num`` requests from token 0.

    Where the first round gave one token, the second comes from another round, a position later.
    """
    seeds = torch.arange(num, device=device) * 0x2545F4914F6CDD1D + 3
    anchor = torch.zeros(num, dtype=torch.int64, device=device)
    pos = torch.full((num,), 50, device=device)
    tokens, num_sampled, _ = draft_and_verify(pair, anchor, pos, seeds, steps, method, **flags)
    first, second = tokens[:, 0], tokens[:, 1].clone()
    short = num_sampled == 1
    if short.any():
        again = draft_and_verify(
            pair, first[short], pos[short] + 1, seeds[short], steps, method, **flags
        )
        second[short] = again[0][:, 0]
    return first.cpu(), second.cpu(), num_sampled.cpu() - 1
