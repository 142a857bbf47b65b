"""What a 1-D tensor holds, as runs of one value that follow each other: ``[0, e1) [e1, e2) ...``.

    m = is_padding         [0, 16) kept
    m[:n] = False          [0, n) False   [n, 16) kept
    m[n:] = True           [0, n) False   [n, 16) True

Bounds are ints or ``SymInt``s, which are compared only by what holds for every value of their
symbols: no guard is added, and an order that is not known becomes a minimum and a maximum. So a run
may end before it starts: index i is in the first run that ends beyond i.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true


# Compared by `same`: ``==`` of two symbolic bounds would guard.
@dataclass(frozen=True, eq=False)
class Kept:
    """Index i holds what ``source`` holds at ``i + offset``."""

    source: Node
    offset: Any


@dataclass(frozen=True, eq=False)
class Counting:
    """Index i holds the integer ``first + i``."""

    first: Any


@dataclass(frozen=True, eq=False)
class Unknown:
    """What ``node`` computes."""

    node: Node


Value = bool | Kept | Counting | Unknown


@dataclass(frozen=True, eq=False)
class Run:
    end: Any
    value: Value


@dataclass(frozen=True, eq=False)
class Contents:
    length: Any
    runs: tuple[Run, ...]  # none where nothing is held

    @staticmethod
    def of(value: Value, length: Any) -> "Contents":
        return Contents(length, () if equal(length, 0) else (Run(length, value),))

    def part(self, start: Any, end: Any) -> "Contents":
        """What is held at ``[start, end)``, as a tensor of its own."""
        runs: list[Run] = []
        for run in self.runs:
            if at_most(run.end, start):
                runs = []  # index ``start`` is beyond them all
                continue
            last = at_most(end, run.end)
            bound = end if last else at_least(run.end, start)
            if not last and not at_most(bound, end):
                bound = torch.sym_min(bound, end)
            runs.append(Run(bound - start, _moved(run.value, start)))
            if last:
                break
        return joined([Contents(end - start, tuple(runs))])

    def with_part(self, start: Any, end: Any, part: "Contents") -> "Contents":
        """The same with ``part`` at ``[start, end)``."""
        if equal(end, start):
            return self
        part = Contents(end - start, part.runs)  # its own length may be spelled otherwise
        return joined([self.part(0, start), part, self.part(end, self.length)])

    def constant(self) -> bool | None:
        """The one value that is held everywhere, if that is True or False."""
        if len(self.runs) == 1 and isinstance(self.runs[0].value, bool):
            return self.runs[0].value
        return None


def joined(parts: Sequence[Contents]) -> Contents:
    """One after the other; runs of the same value become one, empty ones none."""
    runs: list[Run] = []
    offset: Any = 0
    for part in parts:
        start = offset
        for run in part.runs:
            end, value = offset + run.end, _moved(run.value, -offset)
            if at_most(end, start):
                continue
            if runs and same(runs[-1].value, value):
                runs.pop()
            runs.append(Run(end, value))
            start = end
        offset = offset + part.length
    return Contents(offset, tuple(runs))


def chosen(condition: Contents, yes: Contents, no: Contents, node: Node) -> Contents:
    """``where(condition, yes, no)``, computed by ``node``."""
    parts = []
    start: Any = 0
    for run in condition.runs:
        if isinstance(run.value, bool):
            parts.append((yes if run.value else no).part(start, run.end))
        else:
            parts.append(Contents.of(Unknown(node), run.end - start))
        start = run.end
    return joined(parts)


def same(x: Value, y: Value) -> bool:
    if isinstance(x, bool) or isinstance(y, bool):
        return x is y
    if isinstance(x, Kept) and isinstance(y, Kept):
        return x.source is y.source and equal(x.offset, y.offset)
    if isinstance(x, Counting) and isinstance(y, Counting):
        return equal(x.first, y.first)
    return isinstance(x, Unknown) and isinstance(y, Unknown) and x.node is y.node


def _moved(value: Value, by: Any) -> Value:
    """``value`` as seen from index ``by``."""
    if isinstance(value, Kept):
        return Kept(value.source, value.offset + by)
    if isinstance(value, Counting):
        return Counting(value.first + by)
    return value


# Bounds


def at_most(x: Any, y: Any) -> bool:
    """Whether ``x <= y`` for every value of their symbols."""
    return x <= y if isinstance(x, int) and isinstance(y, int) else statically_known_true(x <= y)


def equal(x: Any, y: Any) -> bool:
    return x == y if isinstance(x, int) and isinstance(y, int) else statically_known_true(x == y)


def at_least(x: Any, least: Any) -> Any:
    return x if at_most(least, x) else torch.sym_max(x, least)


def window(length: Any, start: Any, end: Any, count: Any) -> tuple[Any, Any] | None:
    """The indices that ``slice(start, end)`` takes of ``length``, known to be ``count``.

    None where that depends on a sign that is not known.
    """
    start = 0 if start is None else start
    if equal(count, 0):
        return 0, 0
    if equal(count, length):
        return 0, length
    to_the_end = end is None or (isinstance(end, int) and end >= sys.maxsize)
    if to_the_end or at_most(length, end):
        return length - count, length
    if at_most(0, start):
        # Either nothing is clamped or, where nothing is taken, it does not matter.
        if not (at_most(start, length) or equal(count, end - start)):
            start = torch.sym_min(start, length)
    elif at_most(start, -1):
        start = at_least(start + length, 0)
    else:
        return None
    return start, start + count
