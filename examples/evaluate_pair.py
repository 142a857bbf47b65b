"""Measure the example draft on held-out text: mean accepted length at temperature 1.

    python examples/evaluate_pair.py [FOLDER] [--rounds M]

Three drafts propose blocks after the same anchors: the pair's draft, the same draft without its
Markov bias, and a bigram model counted on the training text. A round's accepted length is not drawn
but summed, sum over i of prod over j <= i of min(1, p_j / q_j), which is its expectation given the
drafted tokens. Shape letters as in draft_step.py, M rounds.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import PAIR, encode, read_corpus, split_corpus
from draft_model import Pair, load_pair
from verify import draw

CONTEXT = 128
BATCH = 128


@dataclass(frozen=True)
class Acceptance:
    reached: Tensor  # f32 [M, N], probability that steps 0..i of a round are all accepted

    @property
    def accepted(self) -> float:
        """Mean number of drafted tokens that stand in a round."""
        return self.reached.sum(-1).mean().item()

    @property
    def standard_error(self) -> float:
        return (self.reached.sum(-1).std() / len(self.reached) ** 0.5).item()

    @property
    def by_position(self) -> list[float]:
        """Probability that step i is accepted once all steps before it are."""
        reached = self.reached.mean(0)
        before = torch.cat((torch.ones(1), reached[:-1]))
        return (reached / before).tolist()


def token_stream(tokenizer: Tokenizer, texts: list[str], end: int) -> Tensor:
    """All texts as one i64 [T], each closed by the end token, as in training."""
    return torch.cat([torch.cat((ids, torch.tensor([end]))) for ids in encode(tokenizer, texts)])


def bigram_logits(stream: Tensor, vocab_size: int, discount: float = 0.75) -> Tensor:
    """Log probabilities f32 [V, V] of a token after another: absolute discounting, which leaves
    what it takes from the seen pairs to the add-one unigram distribution."""
    v = vocab_size
    pairs = torch.bincount(stream[:-1] * v + stream[1:], minlength=v * v).view(v, v).float()
    unigram = torch.bincount(stream, minlength=v).float() + 1
    unigram /= unigram.sum()
    total = pairs.sum(-1, keepdim=True)
    left = torch.where(total > 0, discount * (pairs > 0).sum(-1, keepdim=True) / total, 1.0)
    seen = (pairs - discount).clamp(min=0) / total.clamp(min=1)
    return (seen + left * unigram).log()


def propose(
    base: Tensor, bias: Callable[[Tensor], Tensor], anchor: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draft from base [B, N, V] + bias(prev); i64 [B, N] tokens and their f32 [B, N] q."""
    prev, tokens, probabilities = anchor, [], []
    for i in range(base.shape[1]):
        q = (base[:, i] + bias(prev)).float().softmax(-1)
        prev = draw(q, generator)
        tokens.append(prev)
        probabilities.append(q.gather(-1, prev[:, None])[:, 0])
    return torch.stack(tokens, dim=1), torch.stack(probabilities, dim=1)


@torch.inference_mode()
def evaluate(pair: Pair, rounds: int = 1024, seed: int = 0) -> dict[str, Acceptance]:
    """Acceptance of each draft over rounds anchors spread evenly over the held-out text."""
    target, draft, config = pair.target, pair.draft, pair.draft.config
    tokenizer = Tokenizer.from_file(str(pair.folder / "tokenizer.json"))
    end = target.config.eos_token_id
    train, held_out = (
        token_stream(tokenizer, texts, end) for texts in split_corpus(read_corpus(pair.folder))
    )
    bigram = bigram_logits(train, config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    no_base = torch.zeros(1, config.block_size, config.vocab_size)
    no_bias = torch.zeros(1)
    reached: dict[str, list[Tensor]] = {"draft": [], "draft, bias zeroed": [], "bigram": []}

    positions = torch.linspace(CONTEXT, len(held_out) - 1, rounds).long()
    for at in positions.split(BATCH):
        context = held_out[at[:, None] - CONTEXT + torch.arange(CONTEXT)]  # [B, L]
        anchor = held_out[at]
        _, outputs = target.hidden_states(context)
        hidden = torch.cat([outputs[i] for i in config.target_layer_ids], dim=-1)
        base = draft.backbone(anchor[:, None], torch.full((len(at), 1), CONTEXT), hidden)[:, 0]
        proposals = {
            "draft": propose(base, draft.markov_bias, anchor, generator),
            "draft, bias zeroed": propose(base, lambda prev: no_bias, anchor, generator),
            "bigram": propose(no_base, lambda prev: bigram[prev], anchor, generator),
        }
        for name, (tokens, q) in proposals.items():
            text = torch.cat((context, anchor[:, None], tokens), dim=1)
            hidden_out, _ = target.hidden_states(text)
            p = target.logits(hidden_out[:, CONTEXT:-1]).float().softmax(-1)  # [B, N, V]
            p_token = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            reached[name].append((p_token / q).clamp(max=1).cumprod(-1))
    return {name: Acceptance(torch.cat(parts)) for name, parts in reached.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PAIR)
    parser.add_argument("--rounds", type=int, default=1024)
    args = parser.parse_args()
    pair = load_pair(args.folder)
    results = evaluate(pair, args.rounds)
    bigram = results["bigram"]
    n = pair.draft.config.block_size
    print(f"held-out text, temperature 1, {n} drafted tokens a round, {args.rounds} rounds\n")
    print("draft               accepted          ratio   with target's   ratio   by position")
    for name, result in results.items():
        positions = " ".join(f"{rate:.2f}" for rate in result.by_position)
        print(
            f"{name:19s} {result.accepted:5.3f} +- {result.standard_error:5.3f} "
            f"{result.accepted / bigram.accepted:7.2f} {result.accepted + 1:15.3f} "
            f"{(result.accepted + 1) / (bigram.accepted + 1):7.2f}   {positions}"
        )


if __name__ == "__main__":
    main()
