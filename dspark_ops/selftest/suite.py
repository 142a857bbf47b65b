"""The runs of a self-test: each toy by each method, and each way to draft."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_ops.selftest.checks import (
    FALSE_ALARM,
    Check,
    check_block_accepts_more,
    check_record,
    check_same,
)
from dspark_ops.selftest.decoding import (
    CompiledDecoder,
    Decoder,
    Record,
    UnfusedDecoder,
    join,
    why_not_compiled,
)
from dspark_ops.selftest.faults import Fault
from dspark_ops.selftest.toys import TEMPERATURES, Toy, toys

METHODS = ("standard", "block")
# Of 17 requests 8 at each temperature that samples, and a greedy one.
PATTERN = (*TEMPERATURES[:2] * 8, TEMPERATURES[2])
# Requests of a batch; on a CPU as many as stay in its cache.
BATCH = {"cpu": 17 * 480, "cuda": 17 * 7680}


@dataclass(frozen=True)
class Settings:
    device: str
    draws: int  # sampled requests of each toy and method
    seed: int
    methods: tuple[str, ...] = METHODS
    compiled_toys: tuple[str, ...] = tuple(toy.name for toy in toys())

    @property
    def num_requests(self) -> int:
        return -(-self.draws // (len(PATTERN) - 1)) * len(PATTERN)

    @property
    def batch(self) -> int:
        return min(BATCH[torch.device(self.device).type], self.num_requests)

    @property
    def num_statistical(self) -> int:
        """Four for each toy and method, and one that compares the methods."""
        return len(toys()) * (4 * len(self.methods) + (self.methods == METHODS))

    @property
    def alpha(self) -> float:
        """False-alarm rate of each statistical check."""
        return FALSE_ALARM / self.num_statistical


class Progress:
    """A line on a terminal: what is done of a number of batches, seconds gone and left."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.start = title, total, 0, time.monotonic()

    def advance(self, note: str) -> None:
        self.done += 1
        gone = time.monotonic() - self.start
        left = gone / self.done * (self.total - self.done)
        bar = "#" * (24 * self.done // self.total)
        self._draw(f"{self.title} [{bar:24s}] {gone:4.0f}s +{left:4.0f}s  {note}")

    def clear(self) -> None:
        self._draw("")

    def _draw(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:79.79s}\r", end="", file=sys.stderr, flush=True)


def requests(settings: Settings, index: int) -> tuple[Tensor, Tensor]:
    """Seeds i64 and temperatures f32 of the requests of a toy, the same for both methods."""
    generator = torch.Generator().manual_seed(settings.seed * 64 + index)
    num = settings.num_requests
    seeds = torch.randint(-(2**62), 2**62, (num,), generator=generator)
    return seeds, torch.tensor(PATTERN).repeat(num // len(PATTERN))


def run_clean(settings: Settings, say: Callable[[str], None]) -> Iterator[Check]:
    """Check drafting by ``gumbel_sample``, and that the other ways give the same texts."""
    ways: dict[str, type[Decoder]] = {"unfused": UnfusedDecoder, "compiled": CompiledDecoder}
    why = why_not_compiled(settings.device)
    if why:
        say(f"skipped, the compiled step: {why}")
        del ways["compiled"]
    return _run(settings, "self-test", Decoder, ways)


def run_planted(settings: Settings, fault: type[Fault]) -> Iterator[Check]:
    return _run(settings, fault.name, fault, {})


def _run(
    settings: Settings, title: str, decoder: type[Decoder], ways: dict[str, type[Decoder]]
) -> Iterator[Check]:
    def ways_of(toy: Toy) -> dict[str, type[Decoder]]:
        is_compiled = toy.name in settings.compiled_toys
        return {name: way for name, way in ways.items() if name != "compiled" or is_compiled}

    num_batches = -(-settings.num_requests // settings.batch)
    each = [num_batches + len(ways_of(toy)) for toy in toys()]
    progress = Progress(title, len(settings.methods) * sum(each))
    for index, toy in enumerate(toys()):
        state = requests(settings, index)
        records = {}
        for method in settings.methods:
            one = decoder(toy, method, settings.device)
            batches = list(_decode(one, state, settings.batch, progress))
            records[method] = join(batches)
            checks = check_record(toy, method, records[method])
            for name, way in ways_of(toy).items():
                other = way(toy, method, settings.device)
                record = next(_decode(other, state, settings.batch, progress, name))
                note = ""
                # What is sampled filtered has no add before the sampler that could be fused.
                steps = toy.num_steps if toy.top_k_top_p is None else 0
                if isinstance(other, CompiledDecoder) and other.num_fused != steps:
                    note = f"{other.num_fused} of {steps} steps fused: {other.reasons}"
                checks.append(check_same(toy, method, name, batches[0], record, note))
            progress.clear()
            yield from checks
        if settings.methods == METHODS:
            yield check_block_accepts_more(toy, records["standard"], records["block"])


def _decode(
    decoder: Decoder,
    requests: tuple[Tensor, Tensor],
    size: int,
    progress: Progress,
    way: str = "",
) -> Iterator[Record]:
    """The record of each batch of ``size`` requests."""
    for batch in zip(*(x.split(size) for x in requests), strict=True):
        record = decoder.decode(*batch)
        progress.advance(f"{decoder.toy.name}, {decoder.method} {way}")
        yield record
