"""The calls that a server makes, one for each kernel variant: what ``warmup`` has ops compile.

A variant depends on dtypes, on which optional arguments there are, and on whether all rows of
logits can be read in vectors (``_launch.unaligned``); not on sizes, strides and addresses beyond
that. An op yields its calls from ``serving_calls(serving)``, on small tensors of zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


class NotWarmed(Exception):
    """From ``serving_calls``: why there are none, which the report says."""


@dataclass(frozen=True)
class Serving:
    """What ``warmup`` was told of the server, on a device that is the current one."""

    device: torch.device
    vocab_sizes: tuple[int, ...]
    num_steps: int
    dtypes: tuple[torch.dtype, ...]  # of the draft's logits, bias, cache and embedding
    target_dtypes: tuple[torch.dtype, ...]
    index_dtypes: tuple[torch.dtype, ...]
    pos_dtypes: tuple[torch.dtype, ...]
    id_dtypes: tuple[torch.dtype, ...]
    col_dtypes: tuple[torch.dtype, ...]
    use_fp64: tuple[bool, ...]
    markov_rank: int | None
    block_size: int | None
    sample_from_anchor: bool
    cp_size: int
    cp_interleave: int

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def rows(self, *shape: int, dtype: torch.dtype, aligned: bool) -> Tensor:
        """Contiguous zeros; unless ``aligned`` they start an element into their memory."""
        if aligned:
            return self.zeros(*shape, dtype=dtype)
        size = torch.Size(shape)
        return self.zeros(size.numel() + 1, dtype=dtype)[1:].view(size)

    def rows_of(self, vocab: int) -> tuple[bool, ...]:
        """Whether rows of ``vocab`` entries may be aligned: if it isn't, none are."""
        return (True, False) if vocab % 16 == 0 else (False,)

    def cache_dtypes(self) -> tuple[torch.dtype, ...]:
        """Of sums of logits and bias."""
        sums = (torch.promote_types(*pair) for pair in product(self.dtypes, repeat=2))
        return tuple(dict.fromkeys((*self.dtypes, *sums)))

    def block_steps(self) -> Iterator[int]:
        """A number of draft steps for each power of two that a kernel rounds it up to."""
        block = 16
        yield min(block, self.num_steps)
        while block < self.num_steps:
            block *= 2
            yield min(block, self.num_steps)


def sampler_arguments(
    serving: Serving, with_bias: bool
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """(arguments, keywords) of a sampler: draft logits with every option, then the target's."""
    temperature = serving.zeros(2, dtype=torch.float32)
    seeds = serving.zeros(2, dtype=torch.int64)
    columns = [0, *(serving.zeros(dtype=dtype) for dtype in serving.col_dtypes)]
    for vocab, index_dtype, pos_dtype in product(
        serving.vocab_sizes, serving.index_dtypes, serving.pos_dtypes
    ):
        idx_mapping = serving.zeros(2, dtype=index_dtype)
        state = (idx_mapping, temperature, seeds, serving.zeros(2, dtype=pos_dtype))
        for aligned, apply_temperature, use_fp64 in product(
            serving.rows_of(vocab), (True, False), serving.use_fp64
        ):
            flags = {"apply_temperature": apply_temperature, "use_fp64": use_fp64}
            row = {"aligned": aligned}
            for dtype, bias_dtype in product(
                serving.dtypes, (None, *serving.dtypes) if with_bias else (None,)
            ):
                args = (serving.rows(2, vocab, dtype=dtype, **row), *state)
                kwargs: dict[str, Any] = dict(flags)
                if bias_dtype is not None:
                    kwargs["bias"] = serving.rows(2, vocab, dtype=bias_dtype, **row)
                    dtype = torch.promote_types(dtype, bias_dtype)
                yield args, kwargs
                cache = serving.rows(2, 1, vocab, dtype=dtype, **row)
                for column in columns:
                    yield args, {**kwargs, "logits_cache": cache, "cache_col": column}
            for dtype in serving.target_dtypes:
                yield (serving.rows(2, vocab, dtype=dtype, **row), *state), flags


def request_arguments(serving: Serving) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(arguments, keywords) of ``rejection_sample`` but for its method."""
    state = (serving.zeros(2, dtype=torch.float32), serving.zeros(2, dtype=torch.int64))
    starts = serving.zeros(3, dtype=torch.int32)
    for vocab, steps, target_dtype, draft_dtype in product(
        serving.vocab_sizes,
        serving.block_steps(),
        serving.target_dtypes,
        (None, *serving.cache_dtypes()),
    ):
        for aligned, id_dtype, pos_dtype, index_dtype, use_fp64 in product(
            serving.rows_of(vocab),
            serving.id_dtypes,
            serving.pos_dtypes,
            serving.index_dtypes,
            serving.use_fp64,
        ):
            target = serving.rows(2, vocab, dtype=target_dtype, aligned=aligned)
            draft = None
            if draft_dtype is not None:
                draft = serving.rows(2, 1, vocab, dtype=draft_dtype, aligned=aligned)
                draft = draft.expand(-1, steps, -1)
            ids = serving.zeros(2, dtype=id_dtype)
            pos = serving.zeros(2, dtype=pos_dtype)
            idx_mapping = serving.zeros(2, dtype=index_dtype)
            args = (target, draft, ids, starts, pos, idx_mapping, *state)
            yield args, {"num_steps": steps, "use_fp64": use_fp64}
