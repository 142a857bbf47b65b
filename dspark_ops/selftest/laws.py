"""Exact laws of a toy in f64, by enumeration from its rounded logits.

Shape letters: V target ids, D draft ids, N draft steps, R rows.
"""

import torch
from torch import Tensor

from dspark_ops.selftest.toys import Toy


def _law(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities of logits that are divided in f32, as the ops do."""
    return torch.softmax((logits.float() / temperature).double(), -1)


def _filtered(toy: Toy, logits: Tensor) -> Tensor:
    """Of f32 logits [..., V] the k largest, and of those the shortest prefix of mass p; by sorting.

    Toys have neither ties nor a prefix near p.
    """
    if toy.top_k_top_p is None:
        return logits
    k, p = toy.top_k_top_p
    ordered, ids = logits.double().sort(-1, descending=True)
    law = torch.softmax(ordered[..., :k], -1)
    kept = (law.cumsum(-1) - law < p).sum(-1, keepdim=True)
    rank = ids.argsort(-1)
    return logits.masked_fill(rank >= kept, float("-inf"))


def target_law(toy: Toy, temperature: float) -> Tensor:
    """[V, V]: after each token."""
    return _law(_filtered(toy, toy.target.float() / temperature), 1.0)


def draft_law(toy: Toy, temperature: float) -> Tensor:
    """[N, V, V]: at each step, after each token; 0 for ids that are not the draft's."""
    law = torch.zeros(toy.num_steps, toy.vocab, toy.vocab, dtype=torch.float64)
    logits = _filtered(toy, toy.sampled_base[:, None] + toy.bias)
    law[..., toy.target_ids] = _law(logits, temperature)
    return law


def text_law(toy: Toy, temperature: float, start: int, length: int) -> Tensor:
    """[V ** length]: of ``length`` tokens after the first ``start``; the first one is the most
    significant digit."""
    law = target_law(toy, temperature)
    text = law[toy.anchor]
    for _ in range(start):
        text = text @ law
    for _ in range(length - 1):
        text = (text.view(-1, toy.vocab, 1) * law).flatten()
    return text


def acceptance_bars(p: Tensor, q: Tensor, x: Tensor, method: str) -> Tensor:
    """[R, N]: the chance that each test of draft tokens x [R, N] passes; q(x) > 0.

    p [R, N + 1, V], q [R, N, V]. "standard" accepts up to the first test that fails, "block" up to
    the last that passes.
    """
    num_steps = x.shape[1]
    p_x = p[:, :num_steps].gather(-1, x[..., None])[..., 0]
    q_x = q.gather(-1, x[..., None])[..., 0]
    if method == "standard":
        return (p_x / q_x).clamp(max=1)
    bars = []
    prefix = torch.ones_like(p_x[:, 0])
    for i in range(num_steps):
        prefix = (prefix * p_x[:, i] / q_x[:, i]).clamp(max=1)
        bar = prefix
        if i + 1 < num_steps:
            rest = (prefix[:, None] * p[:, i + 1] - q[:, i + 1]).clamp(min=0).sum(-1)
            bar = torch.where(rest + 1 - prefix > 0, rest / (rest + 1 - prefix), 1.0)
        bars.append(bar)
    return torch.stack(bars, 1)


def length_law(toy: Toy, temperature: float, method: str) -> Tensor:
    """[V, N + 1]: of the number of accepted draft tokens, after each anchor."""
    anchors = torch.arange(toy.vocab)
    drafts = torch.cartesian_prod(anchors, *[toy.target_ids] * toy.num_steps)  # [R, N + 1]
    q = draft_law(toy, temperature)[torch.arange(toy.num_steps), drafts[:, :-1]]  # [R, N, V]
    drawn = q.gather(-1, drafts[:, 1:, None]).prod(1)[:, 0]
    possible = drawn > 0
    drafts, q, drawn = drafts[possible], q[possible], drawn[possible]
    bars = acceptance_bars(target_law(toy, temperature)[drafts], q, drafts[:, 1:], method)
    one = torch.ones_like(bars[:, :1])
    if method == "standard":
        passed = torch.cat([one, bars.cumprod(1)], 1)  # the first i tests
        chance = passed * torch.cat([1 - bars, one], 1)
    else:
        failed = torch.cat([one, (1 - bars).flip(1).cumprod(1)], 1).flip(1)  # those after i
        chance = failed * torch.cat([one, bars], 1)
    law = torch.zeros(toy.vocab, toy.num_steps + 1, dtype=torch.float64)
    return law.index_add_(0, drafts[:, 0], drawn[:, None] * chance)


def greedy_text(toy: Toy) -> Tensor:
    """[num_tokens] of plain greedy decoding."""
    tokens = [toy.anchor]
    for _ in range(toy.num_tokens):
        tokens.append(int(toy.target[tokens[-1]].argmax()))
    return torch.tensor(tokens[1:])
