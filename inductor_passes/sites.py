"""What the passes did: one `Site` for each candidate, kept for the process, counted and logged."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from torch._dynamo.utils import counters

log = logging.getLogger("inductor_passes")

_KEPT_GRAPHS = 1000


@dataclass(frozen=True)
class Site:
    """One place in the user's program that a pass could have rewritten.

    reason: why it was left alone; None where it was fused. launches_saved: kernel launches of the
    eager program that the rewrite removed.
    """

    pass_name: str
    fused: bool
    reason: str | None
    file: str | None
    line: int | None
    launches_saved: int

    @property
    def place(self) -> str:
        return "?" if self.file is None else f"{self.file}:{self.line}"


@dataclass
class Report:
    """``sites`` in the order of graphs and passes; ``graphs`` is how many graphs the passes saw.

    pass_names: the passes that were switched on.
    """

    sites: list[Site] = field(default_factory=list)
    graphs: int = 0
    notes: list[str] = field(default_factory=list)
    pass_names: tuple[str, ...] = ()

    def add(self, other: "Report") -> None:
        self.sites += other.sites
        self.graphs += other.graphs
        self.notes += [note for note in other.notes if note not in self.notes]
        self.pass_names = other.pass_names

    def __str__(self) -> str:
        rows = [("pass", "outcome", "where", "launches saved", "reason")]
        counted = Counter(self.sites)
        for site, count in counted.items():
            rows.append(
                (
                    site.pass_name,
                    ("fused" if site.fused else "left alone") + (f" x{count}" if count > 1 else ""),
                    f"{Path(site.file).name}:{site.line}" if site.file else "?",
                    str(site.launches_saved * count),
                    site.reason or "",
                )
            )
        found = {site.pass_name for site in self.sites}
        for name in self.pass_names:
            if name not in found:
                rows.append((name, "no candidate", "", "0", ""))
        if len(rows) == 1:
            return "\n".join(self.notes)
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True))])
            + "  "
            + row[4]
            for row in rows
        ]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])


_lock = threading.Lock()
_kept: deque[Report] = deque(maxlen=_KEPT_GRAPHS)
# A dry run (`explain`) collects here; counters, log and `report` are for code that will run.
_collector: ContextVar[Report | None] = ContextVar("inductor_passes_collector", default=None)


@contextmanager
def collecting() -> Iterator[Report]:
    collected = Report()
    token = _collector.set(collected)
    try:
        yield collected
    finally:
        _collector.reset(token)


def record(seen: Report) -> None:
    """Take in what the passes did to one graph."""
    collector = _collector.get()
    if collector is not None:
        collector.add(seen)
        return
    with _lock:
        _kept.append(seen)
        for site in seen.sites:
            counters["dspark"][f"{site.pass_name}.{'fused' if site.fused else 'skipped'}"] += 1
    for site, count in Counter(seen.sites).items():
        times = f" ({count} sites)" if count > 1 else ""
        if site.fused:
            log.info("%s: fused at %s%s", site.pass_name, site.place, times)
        else:
            log.warning(
                "%s: left alone at %s%s: %s", site.pass_name, site.place, times, site.reason
            )


def report() -> Report:
    """The sites of all graphs that were compiled with the passes in this process."""
    with _lock:
        kept = list(_kept)
    total = Report()
    for seen in kept:
        total.add(seen)
    if not kept:
        total.notes.append(
            "no pass ran: all was served from a cache, or nothing was compiled with the passes"
        )
    return total


def clear() -> None:
    """Forget all graphs, so that `report` tells of what is compiled from now on."""
    with _lock:
        _kept.clear()
