"""Train the example pair from nothing: tokenizer, target, draft.

    python examples/train_pair.py [--quick] [--out FOLDER]

The target learns the text. Then it writes a text of its own, a quarter of a million tokens at
temperature 1, and the draft is distilled on both: acceptance depends on how close the draft's
distribution is to the target's and on nothing else. Shape letters as in draft_model.py.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from corpus import PAIR, encode, read_corpus, split_corpus, train_tokenizer
from draft_model import Draft, DraftConfig
from target_model import KeysValues, Target, TargetConfig, TransformerConfig

WINDOW = 256
TARGET_STEPS, TARGET_ROWS, TARGET_RATES = 300, 16, (1.2e-2, 5e-3)
DRAFT_STEPS, DRAFT_ROWS, DRAFT_RATES = 700, 12, (1e-2, 6e-3)
ANCHORS = 24
SAMPLED_ROWS, PROMPT = 1024, 32


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Progress:
    """Count steps; draw a bar with the seconds gone, the seconds left and a note."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps, self.note = title, steps, ""

    def __iter__(self) -> Iterator[int]:
        start = time.monotonic()
        for step in range(self.steps):
            yield step
            self._draw(step + 1, time.monotonic() - start)

    def _draw(self, done: int, gone: float) -> None:
        last = done == self.steps
        if sys.stderr.isatty() or last:
            bar, left = "#" * (30 * done // self.steps), gone / done * (self.steps - done)
            count = f"{done}/{self.steps} {gone:4.0f}s +{left:4.0f}s"
            line = f"{self.title:8s}[{bar:30s}] {count} {self.note}"
            print(f"\r{line:90s}", end="\n" if last else "", file=sys.stderr, flush=True)


def windows(stream: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Random windows [rows, WINDOW] of a token stream i64 [T]."""
    start = torch.randint(len(stream) - WINDOW + 1, (rows, 1), generator=generator)
    return stream[start + torch.arange(WINDOW)]


def optimise(
    title: str,
    module: nn.Module,
    steps: int,
    rates: tuple[float, float],
    loss: Callable[[float], Tensor],
    held_out_loss: Callable[[], float],
) -> float:
    """Muon for the matrices of the layers and AdamW for the rest, with warm-up and cosine decay.

    Leaves the weights with the best held-out loss in module. loss is given the share of the steps
    that is done. rates: Muon's and AdamW's.
    """
    matrices = {n: p for n, p in module.named_parameters() if p.ndim == 2 and "layers." in n}
    others = [p for n, p in module.named_parameters() if n not in matrices]
    muon = torch.optim.Muon(
        matrices.values(), lr=rates[0], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=rates[1], betas=(0.9, 0.98), weight_decay=0.1)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimiser,
            lambda step: min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2,
        )
        for optimiser in (muon, adamw)
    ]
    best, best_state = math.inf, module.state_dict()
    progress = Progress(title, steps)
    for step in progress:
        module.train()
        module.zero_grad()
        loss(step / steps).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimiser, schedule in zip((muon, adamw), schedules, strict=True):
            optimiser.step()
            schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            module.eval()
            with torch.no_grad():
                value = held_out_loss()
            progress.note = f"held-out loss {value:.3f}"
            if value < best:
                best = value
                best_state = {k: v.clone() for k, v in module.state_dict().items()}
    module.load_state_dict(best_state)
    module.eval()
    return best


def initialise(module: nn.Module, std: float) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=std)


def train_target(
    config: TargetConfig, train: Tensor, held_out: Tensor, steps: int, dropout: float
) -> Target:
    target = Target(replace(config, dropout=dropout))
    initialise(target, std=0.05)
    generator = torch.Generator().manual_seed(1)
    fixed = held_out[: len(held_out) // WINDOW * WINDOW].view(-1, WINDOW)

    def cross_entropy(tokens: Tensor) -> Tensor:
        with autocast():
            logits = target.logits(target.hidden_states(tokens)[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    best = optimise(
        "target",
        target,
        steps,
        TARGET_RATES,
        lambda _: cross_entropy(windows(train, TARGET_ROWS, generator)),
        lambda: cross_entropy(fixed).item(),
    )
    round_weights(target)
    print(f"target: held-out loss {best:.3f} nats, perplexity {math.exp(best):.1f}")
    return target


@torch.no_grad()
def sample_text(target: Target, train: Tensor, rows: int) -> Tensor:
    """Windows [rows, WINDOW] that the target continues at temperature 1 from prompts of train."""
    generator = torch.Generator().manual_seed(2)
    chunks = []
    batch = min(rows, 512)
    steps = WINDOW - PROMPT
    for step in Progress("sample", rows // batch * steps):
        if step % steps == 0:
            tokens = windows(train, batch, generator)[:, :PROMPT]
            cache: list[KeysValues] = []
            fresh = tokens
        with autocast():
            hidden = target.hidden_states(fresh, cache)[0][:, -1]
            logits = target.logits(hidden).float()
        noise = torch.empty_like(logits).exponential_(generator=generator)
        fresh = (logits.softmax(-1) / noise).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, fresh), dim=1)
        if step % steps == steps - 1:
            chunks.append(tokens)
    return torch.cat(chunks)


def distil(target: Target, draft: Draft, tokens: Tensor, anchors: Tensor, share: float) -> Tensor:
    """Loss of the draft at anchors i64 [B, A] of tokens i64 [B, T], the previous tokens given.

    Starts as the forward KL divergence of target and draft, which has a gradient everywhere, and
    becomes the thing itself: minus the expected number of accepted tokens, where step i accepts
    with probability sum(min(p, q)).
    """
    n = draft.config.block_size
    rows = torch.arange(len(tokens))[:, None, None]
    index = anchors[..., None] + torch.arange(n)  # [B, A, N]
    with autocast():
        with torch.no_grad():
            hidden, outputs = target.hidden_states(tokens)
            context = torch.cat([outputs[i] for i in draft.config.target_layer_ids], dim=-1)
            log_p = target.logits(hidden[rows, index]).float().log_softmax(-1)  # [B, A, N, V]
        base = draft.backbone(tokens[rows[..., 0], anchors], anchors, context)
        logits = base + draft.markov_bias(tokens[rows, index])
    log_q = logits.float().log_softmax(-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1)  # [B, A, N]
    weights = 0.8 ** torch.arange(n)
    accepted = torch.minimum(p, log_q.exp()).sum(-1).cumprod(-1).sum(-1)  # [B, A]
    return (1 - share) * (divergence * weights).sum(-1).mean() / weights.sum() - accepted.mean()


def train_draft(
    config: DraftConfig,
    target: Target,
    text: Tensor,
    sampled: Tensor,
    held_out: Tensor,
    steps: int,
    dropout: float,
) -> Draft:
    target.requires_grad_(False)
    draft = Draft(replace(config, dropout=dropout), target.embedding.weight.detach())
    initialise(draft, std=0.05)
    generator = torch.Generator().manual_seed(3)
    n = config.block_size

    def some_anchors(rows: int) -> Tensor:
        return torch.randint(8, WINDOW - n, (rows, ANCHORS), generator=generator)

    fixed = held_out[: len(held_out) // WINDOW * WINDOW].view(-1, WINDOW)
    fixed_anchors = some_anchors(len(fixed))

    def loss(share: float) -> Tensor:
        own = sampled[torch.randint(len(sampled), (DRAFT_ROWS * 3 // 4,), generator=generator)]
        tokens = torch.cat((own, windows(text, DRAFT_ROWS - len(own), generator)))
        return distil(target, draft, tokens, some_anchors(len(tokens)), share)

    best = optimise(
        "draft",
        draft,
        steps,
        DRAFT_RATES,
        loss,
        lambda: distil(target, draft, fixed, fixed_anchors, 1.0).item(),
    )
    print(f"draft: {-best:.3f} tokens accepted in expectation, previous tokens given")
    return draft


def round_weights(module: nn.Module) -> None:
    """Round to bf16, as shipped: the draft learns the very target it will meet."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())


def save(folder: Path, module: nn.Module, config: TransformerConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / "config.json")
    weights = {name: value.bfloat16() for name, value in module.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PAIR, help="checkpoint folder to write")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    steps = (lambda n: 3) if args.quick else (lambda n: n)

    target_config, draft_config = TargetConfig(), DraftConfig()
    train_texts, held_out_texts = split_corpus(read_corpus())
    tokenizer = train_tokenizer(train_texts, target_config.vocab_size)
    end = torch.tensor([target_config.eos_token_id])
    train, held_out = (
        torch.cat([torch.cat((t, end)) for t in encode(tokenizer, texts)])
        for texts in (train_texts, held_out_texts)
    )
    print(f"{len(train)} training tokens, {len(held_out)} held out")

    target = train_target(target_config, train, held_out, steps(TARGET_STEPS), dropout=0.2)
    save(args.out / "target", target, target_config)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    for path in PAIR.glob("corpus.*"):
        if args.out != PAIR:
            shutil.copy(path, args.out)

    sampled = sample_text(target, train, 8 if args.quick else SAMPLED_ROWS)
    draft = train_draft(
        draft_config, target, train, sampled, held_out, steps(DRAFT_STEPS), dropout=0.0
    )
    save(args.out / "draft", draft, draft_config)


if __name__ == "__main__":
    main()
