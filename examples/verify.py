"""Verification of drafted tokens, the rule of Leviathan et al. 2023 in plain PyTorch.

    accept token x while u * q(x) < p(x); at the first rejection draw from max(p - q, 0), and after
    N accepted tokens draw one more from p.

p and q are the distributions of target and draft, so what comes out is distributed as p whatever
the draft proposes, provided that q is what the draft really sampled from: its logits cache.
Shape letters: B rows, N draft steps, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Verdict:
    tokens: Tensor  # i64 [B, N + 1]: accepted tokens, one of the target's own, then -1
    num_accepted: Tensor  # i64 [B], without the target's own token


def distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities f32 [B, M, V] of logits [B, M, V] at temperature f32 [B]; greedy: one-hot."""
    sampled = (temperature >= GREEDY_BELOW) & temperature.isfinite()
    greedy = ~sampled[:, None, None]
    logits = logits.float()
    one_hot = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    divisor = temperature[:, None, None].masked_fill(greedy, 1.0)
    return torch.where(greedy, one_hot, (logits / divisor).softmax(-1))


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample i64 [...] from unnormalised probabilities [..., V]."""
    noise = torch.empty_like(p).exponential_(generator=generator)
    return (p / noise).argmax(-1)


def verify(
    target_logits: Tensor,
    draft_logits: Tensor,
    draft_tokens: Tensor,
    temperature: Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Decide how many drafted tokens stand, and add one of the target's.

    target_logits: [B, N + 1, V], row i given the tokens before draft token i. draft_logits:
    [B, N, V] as sampled, before temperature. draft_tokens: i64 [B, N]. temperature: f32 [B]; below
    1e-5 a row is greedy: a token stands while it is the target's argmax. generator must have
    nothing in common with the draft's noise, else acceptance is biased.
    """
    n = draft_tokens.shape[1]
    p = distribution(target_logits, temperature)  # [B, N + 1, V]
    q = distribution(draft_logits, temperature)  # [B, N, V]
    index = draft_tokens.unsqueeze(-1)
    p_token, q_token = p[:, :n].gather(-1, index).squeeze(-1), q.gather(-1, index).squeeze(-1)
    u = torch.empty_like(p_token).uniform_(generator=generator)
    stands = (u * q_token < p_token).long().cumprod(-1)
    num_accepted = stands.sum(-1)  # [B]

    # Nothing was drafted after the last token: there q is 0 and the residual is p.
    residual = torch.cat(((p[:, :n] - q).clamp(min=0), p[:, n:]), dim=1)
    row = torch.arange(len(p), device=p.device)
    own = draw(residual[row, num_accepted], generator)
    step = torch.arange(n + 1, device=p.device)
    tokens = torch.cat((draft_tokens, own.unsqueeze(-1)), dim=1)
    tokens = torch.where(step < num_accepted.unsqueeze(-1), tokens, -1)
    tokens[row, num_accepted] = own
    return Verdict(tokens, num_accepted)
