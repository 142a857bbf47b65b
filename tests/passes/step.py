"""One draft step of `Inputs`, and the collection of its spellings that must be fused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspark_ops import gumbel_block_argmax

from .inputs import Inputs


@dataclass(frozen=True)
class Spelling:
    function: Callable[[Inputs], Any]
    sites: int


FUSED: dict[str, Spelling] = {}


def fused(sites: int = 1) -> Callable[..., Any]:
    def add(function: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
        FUSED[function.__name__] = Spelling(function, sites)
        return function

    return add


def block_op(logits: Tensor, x: Inputs, i: int = 0, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Block maxima of ``logits``, which are cached in column i."""
    options = {"logits_cache": x.logits_cache, "cache_col": i, "is_drafting": True, **kwargs}
    return gumbel_block_argmax(
        logits, x.idx_mapping[:, i], x.temperature, x.seeds, x.pos[:, i] - 1, **options
    )


def block_op_uncached(logits: Tensor, x: Inputs, i: int = 0, **kwargs: Any):
    return gumbel_block_argmax(
        logits, x.idx_mapping[:, i], x.temperature, x.seeds, x.pos[:, i] - 1, **kwargs
    )


def choose(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    """The token of each row."""
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)


def sample(logits: Tensor, x: Inputs, i: int = 0, **kwargs: Any) -> Tensor:
    return choose(*block_op(logits, x, i, **kwargs))


def at_position(x, pos, **kwargs):
    options = {"logits_cache": x.logits_cache, "cache_col": 0, "is_drafting": True, **kwargs}
    return choose(
        *gumbel_block_argmax(
            x.base[:, 0] + x.bias, x.idx_mapping[:, 0], x.temperature, x.seeds, pos, **options
        )
    )
