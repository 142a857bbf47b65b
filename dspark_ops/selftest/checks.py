"""What was decoded against the exact laws: chi-square, and equality where nothing is random.

The statistic is ``2 sum(counts log(counts / expected))``. Its far tail follows chi-square where
Pearson's does not: multinomials with cells of 25 expected counts exceed the quantile of 1e-5 at
most 1.4 times as often as they should, 4.2 times by Pearson's, whose excess grows further out.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dspark_ops.selftest.decoding import Record
from dspark_ops.selftest.laws import greedy_text, length_law, text_law
from dspark_ops.selftest.toys import SAMPLED, Toy

FALSE_ALARM = 1e-6  # of a run
SMALLEST_CELL = 25.0  # expected counts; cells below share one
LARGEST_TABLE = 5000  # cells of the law of several tokens


class Statistic(NamedTuple):
    chi2: float
    dof: int

    @property
    def p_value(self) -> float:
        if self.dof == 0 or self.chi2 <= 0:
            return 1.0
        half = torch.tensor([self.dof / 2, self.chi2 / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(*half))


class Check(NamedTuple):
    """``statistic`` is None where equality was asked for; ``p_value`` is then 1 or 0."""

    toy: str
    method: str
    name: str
    draws: int
    statistic: Statistic | None
    p_value: float
    note: str = ""


def statistical(toy: Toy, method: str, name: str, draws: int, parts: list[Statistic]) -> Check:
    total = Statistic(sum(x.chi2 for x in parts), sum(x.dof for x in parts))
    return Check(toy.name, method, name, draws, total, total.p_value)


def exact(toy: Toy, method: str, name: str, draws: int, is_equal: bool, note: str = "") -> Check:
    return Check(toy.name, method, name, draws, None, float(is_equal), note)


def limit(dof: int, p_value: float) -> float:
    """The chi2 whose p-value is ``p_value``, by bisection."""
    low, high = 0.0, 1e3 + 10.0 * dof
    for _ in range(60):
        middle = (low + high) / 2
        if Statistic(middle, dof).p_value > p_value:
            low = middle
        else:
            high = middle
    return high


def fit(counts: Tensor, expected: Tensor) -> Statistic:
    """Of counts i64 [K] that are multinomial with expectations f64 [K]."""
    possible = expected > 0
    if counts[~possible].any():
        return Statistic(math.inf, 1)
    expected, order = expected[possible].sort()
    counts = counts[possible][order].double()
    small = int((expected < SMALLEST_CELL).sum())
    while 0 < small < len(expected) and expected[:small].sum() < SMALLEST_CELL:
        small += 1
    if small > 0:
        shared = (torch.cat([x[:small].sum()[None], x[small:]]) for x in (counts, expected))
        counts, expected = shared
    chi2 = 2 * float(torch.special.xlogy(counts, counts / expected).sum())
    return Statistic(chi2, max(len(expected) - 1, 0))


def of_temperature(record: Record, temperature: float) -> Record:
    chosen = record.temperature == torch.tensor(temperature)
    return Record(*(x[chosen] for x in record))


def check_tokens(toy: Toy, method: str, record: Record, start: int, length: int) -> Check:
    """Joint law of ``length`` tokens after the first ``start``."""
    digits = toy.vocab ** torch.arange(length).flip(0)
    parts, draws = [], 0
    for temperature in SAMPLED:
        tokens = of_temperature(record, temperature).tokens[:, start : start + length]
        counts = torch.bincount((tokens * digits).sum(1), minlength=toy.vocab**length)
        parts.append(fit(counts, text_law(toy, temperature, start, length) * len(tokens)))
        draws += len(tokens)
    name = f"{'last' if start > 0 else 'first'} {length} tokens"
    if length == toy.num_tokens:
        name = f"all {length} tokens"
    if length == 1:
        name = "first token"
    return statistical(toy, method, name, draws, parts)


def check_lengths(toy: Toy, method: str, record: Record) -> Check:
    """Accepted length of every round, given the token before it."""
    parts, draws = [], 0
    for temperature in SAMPLED:
        some = of_temperature(record, temperature)
        ran = some.lengths >= 0
        cells = some.anchors[ran] * (toy.num_steps + 1) + some.lengths[ran]
        size = toy.vocab * (toy.num_steps + 1)
        counts = torch.bincount(cells, minlength=size).view(toy.vocab, -1)
        expected = length_law(toy, temperature, method) * counts.sum(1, keepdim=True)
        parts += [fit(*row) for row in zip(counts, expected, strict=True)]
        draws += int(ran.sum())
    return statistical(toy, method, "accepted length", draws, parts)


def check_greedy(toy: Toy, method: str, record: Record) -> Check:
    tokens = of_temperature(record, 0.0).tokens
    is_equal = bool((tokens == greedy_text(toy)).all())
    return exact(toy, method, "greedy text", len(tokens), is_equal)


def check_record(toy: Toy, method: str, record: Record) -> list[Check]:
    joint = 2
    while joint < toy.num_tokens and toy.vocab ** (joint + 1) <= LARGEST_TABLE:
        joint += 1
    return [
        check_tokens(toy, method, record, 0, 1),
        check_tokens(toy, method, record, 0, 2),
        check_tokens(toy, method, record, toy.num_tokens - joint, joint),
        check_lengths(toy, method, record),
        check_greedy(toy, method, record),
    ]


def check_block_accepts_more(toy: Toy, standard: Record, block: Record) -> Check:
    """One-sided: mean accepted length of the first round, over the same requests."""
    sampled = standard.temperature > 0
    fewer = (standard.lengths - block.lengths)[sampled, 0].double()
    error = float(fewer.std()) / math.sqrt(len(fewer))
    z = float(fewer.mean()) / error if error > 0 else 0.0
    p_value = math.erfc(z / math.sqrt(2)) / 2
    statistic = Statistic(max(z, 0.0) ** 2, 1)
    return Check(toy.name, "block", "no fewer than standard", len(fewer), statistic, p_value)


def check_same(toy: Toy, method: str, way: str, one: Record, other: Record, note: str) -> Check:
    """Equal texts in equal rounds, drafted in another way; a note says why that is void."""
    is_equal = not note and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    return exact(toy, method, f"same text, {way}", len(one.tokens), is_equal, note)
