"""What the nodes between a sort and the masked logits mean, each said by one small record.

    values, ids = sort(logits)            Logits(in_place=False)  Ids(0, V)
    probs       = softmax(values)         Probs(of the values)
    mass        = cumsum(probs)           Mass(of the values)
    mask        = mass > p                Mask(MassTest(mass, p))
    mask'       = scatter(_, ids, mask)   Mask(MassTest(mass, p), in_place=True)
    masked      = where(mask', -inf, x)   Logits(cuts=(Nucleus(p),), in_place=True)

``in_place``: entry i is token i; otherwise it is the i-th of the order that the sort made.
"""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class Rate:
    """The p of each row: a number, a tensor of one entry or one for each row, or 1 minus that."""

    source: float | Node
    complement: bool = False

    @property
    def number(self) -> float | None:
        if isinstance(self.source, Node):
            return None
        return 1 - self.source if self.complement else self.source


@dataclass(frozen=True)
class Count:
    """The k of each row: a number, or a tensor as in `Rate`."""

    source: Any  # int, SymInt or Node
    is_positive: bool


@dataclass(frozen=True)
class Nucleus:
    p: Rate


@dataclass(frozen=True)
class TopK:
    k: Any  # as Count's


Cut = Nucleus | TopK


@dataclass(frozen=True)
class Logits:
    """[B, V], -inf where ``cuts`` removed a token."""

    in_place: bool
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True)
class Probs:
    of: Logits


@dataclass(frozen=True)
class Mass:
    """Of all entries up to each; ``before``: without itself."""

    of: Logits
    before: bool = False


@dataclass(frozen=True)
class Ids:
    """Token ids at places [low, high) of the order."""

    low: Any
    high: Any


@dataclass(frozen=True)
class Ranks:
    """The place of each token in the order."""


@dataclass(frozen=True)
class TopIds:
    k: Any


@dataclass(frozen=True)
class TopValues:
    k: Any


@dataclass(frozen=True)
class KeptValue:
    """[B] or [B, 1]: one of the largest logits of each row."""


@dataclass(frozen=True)
class Pair:
    """What a sort or topk returns."""

    values: Any
    indices: Any


@dataclass(frozen=True)
class MassTest:
    mass: Mass
    threshold: Rate
    equal_is_removed: bool


@dataclass(frozen=True)
class RankTest:
    k: Count


@dataclass(frozen=True)
class Mask:
    """``removes``: what True means. ``shifted``: entry i + 1 has the outcome of the test at i.

    ``guarded``: the first of the descending order is kept whatever the test says.
    """

    test: MassTest | RankTest
    removes: bool
    in_place: bool = False
    shifted: bool = False
    guarded: bool = False
    is_bool: bool = True


@dataclass(frozen=True)
class Part:
    """Entries [low, high) of ``whole`` in the vocabulary dimension."""

    whole: Any
    low: Any
    high: Any


@dataclass(frozen=True)
class Constant:
    value: Any
