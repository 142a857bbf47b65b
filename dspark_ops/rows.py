"""What a row of a sampler is: inert or live, greedy or sampled, and the key of its noise.

A row is *inert* when its ``idx_mapping`` is negative or not below S: nothing is read through it, no
cache is written, its id is the argmax without noise. It is *greedy* when inert or when its
temperature is below fp32(1e-5), negative, NaN or infinite. Every other row is *sampled*.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_ops._triton import tl, triton

GREEDY_BELOW = 9.999999747378752e-06  # fp32(1e-5)


class Rows(NamedTuple):
    """Per-row state of the reference, each [B]."""

    slot: Tensor  # i64, 0 where inert
    live: Tensor  # bool
    sampled: Tensor  # bool
    temperature: Tensor  # f32, 1 where not sampled
    seed: Tensor  # i64, the column mixed in
    pos: Tensor  # i64


def rows_ref(
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    key_offset: int,
    cache_col: Tensor | None,
) -> Rows:
    """Read each row's slot; ``cache_col`` is i64 [B] or None."""
    num_slots = temperature.shape[0]
    idx_mapping = idx_mapping.long()  # a narrow dtype may not hold num_slots
    live = (idx_mapping >= 0) & (idx_mapping < num_slots)
    if num_slots == 0:
        slot = torch.zeros_like(idx_mapping)
        temperature, seeds = temperature.new_zeros(1), seeds.new_zeros(1)
    else:
        slot = torch.where(live, idx_mapping, 0)
    row_temperature = temperature[slot]
    sampled = live & (row_temperature >= GREEDY_BELOW) & (row_temperature < float("inf"))
    seed = seeds[slot]
    if cache_col is not None:
        seed = seed ^ (cache_col << 32)
    return Rows(
        slot,
        live,
        sampled,
        torch.where(sampled, row_temperature, 1.0),
        seed,
        pos.long() + key_offset,
    )


@triton.jit
def load_row(
    row,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    col_ptr,
    num_slots,
    col,
    key_offset,
    stride_idx_b,
    stride_pos_b,
    stride_col_b,
    HAS_COL_PTR: tl.constexpr,
):
    """(slot i64, live, sampled, temperature f32, seed, pos, column i64) of int64 ``row``."""
    slot = tl.load(idx_mapping_ptr + row * stride_idx_b).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    sampled = (temperature >= 9.999999747378752e-06) & (temperature < float("inf"))
    seed = tl.load(seeds_ptr + slot, mask=live, other=0)
    pos = tl.load(pos_ptr + row * stride_pos_b).to(tl.int64) + key_offset
    if HAS_COL_PTR:
        column = tl.load(col_ptr + row * stride_col_b).to(tl.int64)
    else:
        column = tl.full((), 0, tl.int64) + col
    return slot, live, sampled, temperature, seed, pos, column
