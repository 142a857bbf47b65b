"""Speculative generation with the example pair: draft, verify, accept.

    python examples/generate.py [PROMPT] [--temperature T] [--tokens M]

The target keeps no KV cache: every round runs it once over the whole text, which verifies the
drafted tokens and gives the hidden states the next draft reads. All shapes stay fixed, so that a
compiled draft step is compiled once. Shape letters as in draft_step.py; W is the buffer's width.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from draft_model import Pair, load_pair
from verify import Verdict, distribution, draw, verify

StepFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Of a round (without its verdict), temperature f32 [B] and seeds i64 [B].
VerifyFunction = Callable[["Round", Tensor, Tensor], Verdict]


@dataclass(frozen=True)
class Round:
    """What one draft step was given and gave, and what the target made of it."""

    anchor: Tensor  # i64 [B]
    context_hidden: Tensor  # [B, W, F]
    idx_mapping: Tensor  # i32 [B, N]; -1 once a row is finished
    pos: Tensor  # i64 [B, N]
    draft_tokens: Tensor  # i64 [B, N]
    logits_cache: Tensor  # [B, N, V], slot b is row b
    target_logits: Tensor  # [B, N + 1, V]; the first row's input stands at pos[:, 0] - 1
    verdict: Verdict | None = None  # meaningless in inert rows


@dataclass(frozen=True)
class Generation:
    texts: list[str]  # prompts excluded
    token_ids: list[list[int]]
    accepted: list[list[int]]  # by row, drafted tokens that stood in each of its rounds
    rounds: list[Round]

    @property
    def mean_accepted(self) -> float:
        counts = [count for row in self.accepted for count in row]
        return sum(counts) / max(len(counts), 1)


@torch.no_grad()
def generate(
    pair: Pair,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float | Sequence[float],
    draft_step: StepFunction,
    seed: int = 0,
    verify_round: VerifyFunction | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continue every prompt by max_new_tokens.

    draft_step: DraftStep(pair.draft), compiled or not. temperature: one for all or one a row, below
    1e-5 greedy. seed: of the draft's noise and, through a torch.Generator that shares nothing with
    it, of the target's own draws. A row that has its tokens becomes inert until all have theirs.
    verify_round: decides how much of a round's draft stands; verify.py without it. progress: told
    after each round how many tokens there are and will be.
    """
    tokenizer = Tokenizer.from_file(str(pair.folder / "tokenizer.json"))
    config = pair.draft.config
    n, layer_ids = config.block_size, config.target_layer_ids
    dtype, device = pair.draft.lm_head.dtype, pair.draft.lm_head.device
    prompt_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    if min(map(len, prompt_ids)) == 0:
        raise ValueError("every prompt needs at least one token")
    rows = len(prompt_ids)
    row = torch.arange(rows, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    temperatures = torch.tensor(temperature, dtype=torch.float32, device=device).expand(rows)
    temperatures = temperatures.contiguous()
    seeds = seed + row

    width = max(map(len, prompt_ids)) + max_new_tokens + 2 * n + 1
    buffer = torch.zeros(rows, width, dtype=torch.int64, device=device)
    for b, ids in enumerate(prompt_ids):
        buffer[b, : len(ids)] = torch.tensor(ids, device=device)
    start = torch.tensor([len(ids) for ids in prompt_ids], device=device)

    logits, hidden = pair.target(buffer, layer_ids)
    anchor = draw(distribution(logits[row, start - 1, None], temperatures)[:, 0], generator)
    buffer[row, start] = anchor
    length = start + 1  # of the text, anchor included

    steps = torch.arange(n + 1, device=device)
    rounds: list[Round] = []
    accepted: list[list[int]] = [[] for _ in range(rows)]
    while True:
        active = length - start < max_new_tokens
        if not active.any():
            break
        idx_mapping = torch.where(active, row, -1).int().unsqueeze(1).repeat(1, n)
        pos = length.unsqueeze(1) + steps[:n]
        logits_cache = torch.zeros(rows, n, config.vocab_size, dtype=dtype, device=device)
        draft_tokens = torch.zeros(rows, n, dtype=torch.int64, device=device)
        # A step captured in a CUDA graph owns its output and overwrites it at the next replay.
        draft_tokens = draft_step(
            anchor, hidden, idx_mapping, temperatures, seeds, pos, logits_cache, draft_tokens
        ).clone()

        buffer[row[:, None], pos] = draft_tokens
        logits, next_hidden = pair.target(buffer, layer_ids)
        target_logits = logits[row[:, None], length.unsqueeze(1) - 1 + steps]
        done = Round(anchor, hidden, idx_mapping, pos, draft_tokens, logits_cache, target_logits)
        if verify_round is None:
            verdict = verify(target_logits, logits_cache, draft_tokens, temperatures, generator)
        else:
            verdict = verify_round(done, temperatures, seeds)
        rounds.append(replace(done, verdict=verdict))
        own = verdict.tokens[row, verdict.num_accepted]
        grown = length + verdict.num_accepted
        buffer[row, grown] = torch.where(active, own, buffer[row, grown])
        anchor = torch.where(active, own, anchor)
        length = torch.where(active, grown + 1, length)
        hidden = next_hidden
        for b in active.nonzero().flatten().tolist():
            accepted[b].append(int(verdict.num_accepted[b]))
        if progress is not None:
            new_tokens = (length - start).clamp(max=max_new_tokens).sum()
            progress(int(new_tokens), rows * max_new_tokens)

    token_ids = [
        buffer[b, first : first + max_new_tokens].tolist() for b, first in enumerate(start.tolist())
    ]
    return Generation(tokenizer.decode_batch(token_ids), token_ids, accepted, rounds)


def main() -> None:
    from draft_step import DraftStep

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default='The "for" statement is used to')
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pair = load_pair(Path(__file__).parent / "pair")
    result = generate(
        pair, [args.prompt], args.tokens, args.temperature, DraftStep(pair.draft), args.seed
    )
    print(args.prompt + result.texts[0])
    print(
        f"\n{len(result.rounds)} rounds, {result.mean_accepted:.2f} drafted tokens accepted in each"
    )


if __name__ == "__main__":
    main()
