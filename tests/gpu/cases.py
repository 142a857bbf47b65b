"""Inputs of the sampler ops on a GPU, and the unfused step that they are compared with."""

import math

import torch
from torch import Tensor

import dspark_ops

from ..ops.cases import Inputs

INF, NAN = math.inf, math.nan
TEMPERATURES = (1.0, 0.7, 0.0, 1.6, -1.0, 1e-3, 1.0)
NUM_KINDS = 8


def put_special_rows(logits: Tensor, first_kind: int = 0) -> None:
    """Rows by turns usual, tied, coarse, with NaN, of -inf, with inf and NaN, sparse, of one id."""
    vocab = logits.shape[1]
    middle, last = vocab // 2, vocab - 1
    for row in range(logits.shape[0]):
        x = logits[row]
        match (first_kind + row) % NUM_KINDS:
            case 1:
                x.zero_()
            case 2:
                x.copy_((x * 2).round() * 2.0**14)
            case 3:
                x[last], x[middle] = NAN, NAN
            case 4:
                x.fill_(-INF)
            case 5:
                x[0], x[middle], x[last] = INF, INF, NAN
            case 6:
                x[::2] = -INF
            case 7:
                x.fill_(-INF)
                x[last] = -1.0


def make_inputs(
    rows: int, vocab: int, dtype: torch.dtype, seed: int = 0, first_kind: int | None = None
) -> Inputs:
    """Row-strided logits, strided columns of idx_mapping and pos; every fifth row is inert."""
    generator = torch.Generator("cuda").manual_seed(seed)
    slots = rows + 1
    logits = torch.randn(rows, 2, vocab, device="cuda", generator=generator) * 3
    logits = logits.to(dtype)[:, 1]
    if first_kind is not None:
        put_special_rows(logits, first_kind)
    idx_mapping = torch.full((rows, 3), -7, dtype=torch.int32, device="cuda")
    idx_mapping[:, 1] = torch.randperm(slots, device="cuda", generator=generator)[:rows].int()
    idx_mapping[4::5, 1] = -1
    pos = torch.randint(0, 100_000, (rows, 3), device="cuda", generator=generator)
    temperature = torch.tensor(TEMPERATURES, device="cuda").repeat(slots // 7 + 1)[:slots]
    seeds = torch.randint(-(2**62), 2**62, (slots,), device="cuda", generator=generator)
    return Inputs(logits, idx_mapping[:, 1], temperature.contiguous(), seeds, pos[:, 1])


def make_bias(rows: int, vocab: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, vocab, device="cuda", generator=generator).to(dtype)


def make_cache(slots: int, vocab: int, dtype: torch.dtype, cols: int = 2) -> Tensor:
    return torch.full((slots, cols, vocab + 3), 7.0, dtype=dtype, device="cuda")


def unfused(inputs: Inputs, bias: Tensor | None = None, **kwargs) -> Tensor:
    """add, gumbel_block_argmax, argmax, gather: what a user writes."""
    logits = inputs.logits if bias is None else torch.add(inputs.logits, bias)
    block_max, block_argmax = dspark_ops.gumbel_block_argmax(logits, *inputs.args[1:], **kwargs)
    best = block_max.argmax(-1, keepdim=True)
    return block_argmax.gather(-1, best).view(-1)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bits, but for the payload of a NaN: an addition may set it as it likes."""
    if x.is_floating_point():
        nan = x.isnan()
        if not torch.equal(nan, y.isnan()):
            return False
        x, y = x.masked_fill(nan, 0), y.masked_fill(nan, 0)
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
