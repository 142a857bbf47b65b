"""What every rewrite shares: decide first, then edit, and say what happened to each candidate.

A fusion finds its candidates, and for each makes a plan or raises `LeftAlone` with a reason that a
user understands. Nothing is edited while a plan is made, so a refused site stays as it was found.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_passes.calls import Call
from inductor_passes.sites import Site
from inductor_passes.source_lines import described, source_line
from inductor_passes.storage import reads_only_sizes

log = logging.getLogger("inductor_passes")


class LeftAlone(Exception):
    """The reason why a candidate is not rewritten."""


class Fusion(ABC):
    """One rewrite. ``candidates`` and ``decide`` only read the graph; ``edit`` must not fail."""

    name: str
    # The op that the rewrite writes, where it keeps the distribution but not every bit.
    lossless_only: str | None = None

    @abstractmethod
    def candidates(self, graph: Graph) -> list[Node]: ...

    @abstractmethod
    def decide(self, call: Call) -> Any:
        """A plan for ``edit``, or raise `LeftAlone`."""

    @abstractmethod
    def edit(self, plan: Any) -> int:
        """Rewrite; return how many launches of the eager program are gone."""

    def apply(self, graph: Graph, strict: bool, numerics: str) -> list[Site]:
        sites = []
        for node in self.candidates(graph):
            file, line = source_line(node)
            # Read now: rewriting an earlier candidate may have changed the arguments.
            call = Call.of(node)
            if call is None:
                continue
            try:
                plan = self.decide(call)
                if self.lossless_only is not None and numerics != "lossless":
                    raise LeftAlone(
                        f"numerics={numerics!r}: would become {self.lossless_only} with "
                        "numerics='lossless'"
                    )
            except LeftAlone as reason:
                sites.append(Site(self.name, False, str(reason), file, line, 0))
            except Exception as error:
                if strict:
                    raise
                log.exception("%s: internal error at %s", self.name, described(node))
                reason_text = f"internal error: {type(error).__name__}: {error}"
                sites.append(Site(self.name, False, reason_text, file, line, 0))
            else:
                sites.append(Site(self.name, True, None, file, line, self.edit(plan)))
        return sites


def value_of(node: Any, what: str) -> FakeTensor:
    """The fake value of ``node``."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, FakeTensor):
        raise LeftAlone(f"the shape of {what} is not known to the compiler here")
    return value


def same_shape(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Whether both shapes are equal for every value of their symbols; adds no guard."""
    return len(x) == len(y) and all(map(_same_size, x, y))


def _same_size(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def readers(node: Node) -> list[Node]:
    """Users that read the data, not only the shape."""
    return [user for user in node.users if not reads_only_sizes(user)]


def stream_of(node: Node) -> Any:
    return (node.meta.get("custom") or {}).get("stream", 0)


def erase_unread(nodes: Sequence[Node]) -> None:
    """Erase those of ``nodes``, given in the order of the graph, that nobody reads any more."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)
