"""Speculative against plain decoding: the same text, or the same distribution, in fewer forwards.

    python examples/speculative_decode.py [--tokens M] [--samples K] [--picture FILE.svg]

The example pair continues prompts by draft -> verify -> accept, the draft step compiled with
``backend="dspark"`` and, on a GPU, captured in a CUDA graph; `dspark_ops.rejection_sample` decides
what stands, by the standard and by the block rule. Plain decoding runs the target for every token.

- greedy: the text must be the same, token for token;
- sampled: K continuations of one prompt each way, whose tokens must follow one distribution (a
  two-sample chi-square test at each of the first positions; dof are its degrees of freedom).

Exits with 1 if they are not, or if K is too small to tell. Prints the accepted length by position,
the target's forwards saved and the times; with --picture it draws the former. Shape letters as in
draft_step.py.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import dspark_ops
import inductor_passes  # noqa: F401  registers the backend
from draft_model import Pair, load_pair
from draft_step import DraftStep
from generate import Generation, Round, StepFunction, VerifyFunction, generate
from verify import GREEDY_BELOW, Verdict

PROMPTS = (
    'The "for" statement is used to',
    "A class definition",
    'The "try" statement specifies exception handlers',
    "An object is a container if it contains references to other objects. Examples of",
)
METHODS = ("standard", "block")
POSITIONS = 3  # of a sampled continuation, whose tokens are compared
# Of a run without a fault: the chance that one of its tests fails.
FALSE_ALARM = 1e-4
COMMON = 10  # samples of both sides: a token seen so often has a cell of the test
MAX_RARE_CELLS = 8


def over_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """f32 logits [B, ..., V] as `rejection_sample` takes them; greedy rows stay as they are."""
    sampled = (temperature >= GREEDY_BELOW) & temperature.isfinite()
    divisor = torch.where(sampled, temperature, 1.0)
    return logits.float() / divisor.view(-1, *[1] * (logits.dim() - 1))


def verify_with(method: str) -> VerifyFunction:
    """`rejection_sample` for a round of `generate`."""

    def verify_round(drafted: Round, temperature: Tensor, seeds: Tensor) -> Verdict:
        rows, n = drafted.draft_tokens.shape
        steps = torch.arange(n + 1, device=seeds.device)
        tokens, num_sampled, _ = dspark_ops.rejection_sample(
            over_temperature(drafted.target_logits, temperature).flatten(0, 1),
            drafted.logits_cache,
            torch.cat((drafted.anchor[:, None], drafted.draft_tokens), dim=1).flatten(),
            torch.arange(rows + 1, device=seeds.device, dtype=torch.int32) * (n + 1),
            (drafted.pos[:, :1] - 1 + steps).flatten(),
            drafted.idx_mapping[:, 0],
            temperature,
            seeds,
            num_steps=n,
            method=method,
        )
        return Verdict(tokens, num_sampled.long() - 1)

    return verify_round


@torch.no_grad()
def decode_plainly(
    pair: Pair,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[list[int]], int]:
    """(token ids of each prompt's continuation, forwards of the target)."""
    tokenizer = Tokenizer.from_file(str(pair.folder / "tokenizer.json"))
    device = pair.draft.lm_head.device
    prompt_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
    rows = len(prompt_ids)
    row = torch.arange(rows, device=device)
    width = max(map(len, prompt_ids)) + max_new_tokens
    text = torch.zeros(rows, width, dtype=torch.int64, device=device)
    for b, ids in enumerate(prompt_ids):
        text[b, : len(ids)] = torch.tensor(ids, device=device)
    start = torch.tensor([len(ids) for ids in prompt_ids], device=device)
    temperatures = torch.full((rows,), temperature, device=device)
    for i in range(max_new_tokens):
        logits, _ = pair.target(text, pair.draft.config.target_layer_ids)
        token = dspark_ops.gumbel_sample(
            over_temperature(logits[row, start + i - 1], temperatures),
            row,
            temperatures,
            seed + row,
            start + i - 1,
            apply_temperature=False,
        )
        text[row, start + i] = token
        if progress is not None:
            progress((i + 1) * rows, max_new_tokens * rows)
    ids = [text[b, s : s + max_new_tokens].tolist() for b, s in enumerate(start.tolist())]
    return ids, max_new_tokens


class Captured:
    """A draft step as a CUDA graph: arguments are copied into buffers of its own and replayed."""

    def __init__(self, step: StepFunction) -> None:
        self.step = step
        self.shapes: list[torch.Size] = []

    def __call__(self, *arguments: Tensor) -> Tensor:
        shapes = [x.shape for x in arguments]
        if shapes != self.shapes:
            self.shapes = shapes
            self.buffers = tuple(x.clone() for x in arguments)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step(*self.buffers)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.tokens = self.step(*self.buffers)
        for buffer, x in zip(self.buffers, arguments, strict=True):
            buffer.copy_(x)
        self.graph.replay()
        arguments[6].copy_(self.buffers[6])  # the logits cache
        return self.tokens


class Progress:
    """The time of all that ran inside, on standard error; a bar before, if that is a terminal."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Callable[[int, int], None]:
        self.start = time.perf_counter()
        return self.show

    def show(self, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        print(f"\r{self.name:20s} [{bar}] {done}/{total}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        name = "" if sys.stderr.isatty() else f"{self.name:20s}"
        print(f"{name}  {self.seconds:.1f} s", file=sys.stderr)


def by_position(result: Generation, num_steps: int) -> list[float]:
    """Share of the rounds in which drafted token i stands, i = 1..N."""
    counts = [count for row in result.accepted for count in row]
    return [sum(count > i for count in counts) / len(counts) for i in range(num_steps)]


def same_distribution(ids: Tensor, other: Tensor) -> tuple[float, int]:
    """Two-sample chi-square test on equally many token ids each, i64 [K].

    Returns (p-value, degrees of freedom). Of 0 degrees nothing is compared: the p-value is NaN.
    """
    vocab = int(torch.cat((ids, other)).max()) + 1
    counts = torch.stack([torch.bincount(x, minlength=vocab) for x in (ids, other)]).double()
    is_rare = counts.sum(0) < COMMON
    # Rare tokens share cells, by a hash that knows nothing of the samples.
    num_cells = min(max(int(counts[:, is_rare].sum()) // (2 * COMMON), 1), MAX_RARE_CELLS)
    cell = (is_rare.nonzero()[:, 0] * 0x9E3779B1 & 0xFFFFFFFF) * num_cells >> 32
    rare = counts.new_zeros(2, num_cells).index_add_(1, cell, counts[:, is_rare])
    cells = torch.cat((counts[:, ~is_rare], rare), dim=1)
    cells = cells[:, cells.sum(0) > 0]
    expected = cells.sum(0, keepdim=True) / 2
    statistic = ((cells - expected) ** 2 / expected).sum()
    freedom = cells.shape[1] - 1
    if freedom == 0:
        return math.nan, 0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic.cpu() / 2)), freedom


def compare_samples(
    plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]], alarm: float
) -> tuple[list[str], list[str]]:
    """What each position shows, and why those fail that do. Token 0 is the target's own draw."""
    notes, reasons = [], []
    for i in range(1, 1 + POSITIONS):
        p, freedom = same_distribution(
            *(torch.tensor([ids[i] for ids in x]) for x in (plain, other))
        )
        notes.append(f"{p:.3f} ({freedom} dof)" if freedom > 0 else "too few samples")
        if freedom == 0:
            reasons.append(
                f"token {i + 1}: too few samples, pass --samples {2 * len(plain)} or more"
            )
        elif p < alarm:
            reasons.append(f"token {i + 1}: samples follow another distribution")
    return notes, reasons


def print_bars(shares: dict[str, list[float]]) -> None:
    print("\naccepted, by position in the draft:")
    for i in range(len(next(iter(shares.values())))):
        for name, values in shares.items():
            print(f"    {i + 1}  {name:9s} {'█' * round(40 * values[i])} {values[i]:.0%}")


def write_picture(path: Path, shares: dict[str, list[float]]) -> None:
    """A bar for each position and method, as SVG."""
    colours = ("#4c72b0", "#dd8452")
    width, height, group = 640, 320, 560 // len(next(iter(shares.values())))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="60" y="22">Drafted tokens that stand, by position</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = 280 - 230 * share
        parts.append(f'<line x1="55" x2="{width - 10}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="48" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for index, ((name, values), colour) in enumerate(zip(shares.items(), colours, strict=True)):
        for i, value in enumerate(values):
            x = 65 + i * group + index * group * 0.4
            top = 280 - 230 * value
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{group * 0.38:.1f}" '
                f'height="{230 * value:.1f}" fill="{colour}"/>'
            )
        parts.append(
            f'<rect x="{380 + 110 * index}" y="11" width="12" height="12" ',
        )
        parts[-1] += f'fill="{colour}"/><text x="{398 + 110 * index}" y="22">{name}</text>'
    for i in range(len(next(iter(shares.values())))):
        parts.append(f'<text x="{65 + i * group + group * 0.35:.0f}" y="300">{i + 1}</text>')
    path.write_text("\n".join([*parts, "</svg>\n"]))


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="speculative against plain decoding")
    parser.add_argument("--tokens", type=int, default=48, help="of a greedy continuation")
    parser.add_argument("--samples", type=int, default=256, help="continuations of one prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="draw accepted tokens by position there")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.samples < 20:
        parser.error(
            f"--tokens must be at least 1 and --samples at least 20; got {options.tokens} and "
            f"{options.samples}"
        )
    on_gpu = torch.cuda.is_available()
    # In fp32 a row's logits depend on its neighbours by rounding alone; bf16 would flip near ties.
    pair = load_pair(Path(__file__).parent / "pair", "cuda" if on_gpu else "cpu", torch.float32)
    draft = DraftStep(pair.draft)
    step: StepFunction = torch.compile(draft, backend="dspark", fullgraph=True, dynamic=True)
    if on_gpu:
        step = Captured(step)
    n = pair.draft.config.block_size
    failed = []

    # Greedy
    with Progress("plain, greedy") as progress:
        plain, forwards = decode_plainly(pair, PROMPTS, options.tokens, 0.0, progress=progress)
    with Progress("compiling") as progress:
        generate(pair, PROMPTS, options.tokens, 0.0, step, progress=progress)
    for method in METHODS:
        with Progress(f"{method}, greedy") as progress:
            result = generate(
                pair, PROMPTS, options.tokens, 0.0, step,
                verify_round=verify_with(method), progress=progress,
            )  # fmt: skip
        same = result.token_ids == plain
        if not same:
            failed.append(f"the greedy text of {method} differs from plain decoding")
        print(
            f"{method}, greedy: {'the same text' if same else 'ANOTHER TEXT'}; "
            f"{len(result.rounds) + 1} forwards of the target instead of {forwards}, "
            f"{result.mean_accepted:.2f} accepted a round"
        )
    print(f"\n{PROMPTS[0]}{result.texts[0]}")

    # Sampled
    prompts = [PROMPTS[1]] * options.samples
    length = POSITIONS + n
    seeds = iter(range(options.seed + 1, 10**9, options.samples))
    with Progress("plain, sampled") as progress:
        plain, forwards = decode_plainly(pair, prompts, length, 1.0, next(seeds), progress)
    shares, means = {}, {}
    alarm = FALSE_ALARM / len(METHODS) / POSITIONS
    for method in METHODS:
        with Progress(f"{method}, sampled") as progress:
            result = generate(
                pair, prompts, length, 1.0, step, next(seeds), verify_with(method), progress
            )
        notes, reasons = compare_samples(plain, result.token_ids, alarm)
        failed += [f"{method}, {reason}" for reason in reasons]
        shares[method] = by_position(result, n)
        means[method] = result.mean_accepted
        print(
            f"{method}, sampled: p-values of tokens 2 to {1 + POSITIONS} against plain "
            f"{', '.join(notes)}, alarm below {alarm:.1g}; {len(result.rounds) + 1} forwards of "
            f"the target instead of {forwards}"
        )
    print_bars(shares)
    print("accepted a round: " + ", ".join(f"{name} {mean:.2f}" for name, mean in means.items()))
    if options.picture:
        write_picture(options.picture, shares)
        print(f"picture: {options.picture}")
    for reason in failed:
        print(f"FAILED: {reason}")
    if failed:
        sys.exit(1)
    print("greedy text equal, samples of one distribution")


if __name__ == "__main__":
    main()
