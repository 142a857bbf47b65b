"""Logits to the values whose argmax is the token: logits / temperature + Gumbel noise.

Division is in fp32 after the upcast and skipped at temperature 1; a row that is not sampled is only
upcast. Every kernel takes its values from here, so equal logits give equal bits in all of them.
"""

import torch
from torch import Tensor

from dspark_ops._triton import tl, triton
from dspark_ops.noise import (
    TL_GUMBEL_HIGH_STREAM,
    TL_GUMBEL_STREAM,
    gumbel32,
    gumbel64,
    gumbel_ref,
    hash_finish,
    hash_prefix,
)
from dspark_ops.rows import Rows


def noised_logits_ref(
    logits: Tensor, rows: Rows, apply_temperature: bool, use_fp64: bool
) -> Tensor:
    """[B, V] f32, f64 with ``use_fp64``."""
    value = logits.float()
    if apply_temperature:
        value = value / rows.temperature[:, None]  # 1 where not sampled: exact
    if use_fp64:
        value = value.double()
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_ref(rows.seed[:, None], rows.pos[:, None], ids, use_fp64)
    return torch.where(rows.sampled[:, None], value + noise, value)


@triton.jit
def over_temperature(x, temperature):
    """f32 x / temperature, skipped at exactly 1."""
    if temperature != 1.0:
        x = x / temperature
    return x


@triton.jit
def noised_values(
    x,
    offs_v,
    sampled,
    temperature,
    seed,
    pos,
    APPLY_TEMPERATURE: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    """f32 logits ``x`` of a row's ids ``offs_v`` to their noised values, f32 | f64."""
    if USE_FP64:
        value = x.to(tl.float64)
    else:
        value = x
    if sampled:
        if APPLY_TEMPERATURE:
            x = over_temperature(x, temperature)
        low = hash_finish(hash_prefix(seed, pos, TL_GUMBEL_STREAM), offs_v)
        if USE_FP64:
            high = hash_finish(hash_prefix(seed, pos, TL_GUMBEL_HIGH_STREAM), offs_v)
            value = x.to(tl.float64) + gumbel64(high, low)
        else:
            value = x + gumbel32(low)
    return value
