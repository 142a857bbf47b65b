"""gumbel_block_argmax: the noised maximum of each vocabulary block, and the logits into the cache.

    value[b, v] = logits[b, v] / temperature[s] + gumbel(seeds[s], pos[b] + offset, v)
    where s = idx_mapping[b]
    block_max[b, k], block_argmax[b, k] = max and argmax of value[b, k * 1024 : (k + 1) * 1024]
    logits_cache[s, cache_col, :V] = logits[b]                       # before temperature

logits [B, V] bf16 | f16 | f32; block_max [B, K] f32 (f64 with ``use_fp64``); block_argmax i64
[B, K] of global ids; K = ceil(V / 1024). Contract: ties go to the lowest id, the first NaN of a
block wins it, a block of only -inf gives its first id, -0.0 equals 0.0. Greedy and inert rows
(``rows.py``) have no noise and no division; inert rows write no cache. Noise does not depend on
the batch (``noise.py``).

Source: the Gumbel-max trick; the two-stage reduction follows vLLM 0.33's V2 sampler.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import is_aligned, launch, on_device, unaligned
from dspark_ops._library import register
from dspark_ops._sampler_call import (
    CACHE_ARGS,
    FLAG_ARGS,
    SAMPLER_ARGS,
    cache_arguments,
    check_sampler,
    checked_offset,
    key_offset,
    row_arguments,
    rows_and_cache_ref,
)
from dspark_ops._serving import Call, Serving, sampler_arguments
from dspark_ops._triton import require_triton, tl, triton
from dspark_ops.health import ACTIVE, count_rows, count_rows_ref
from dspark_ops.noised import noised_logits_ref, noised_values
from dspark_ops.ordered import argmax_first, ordered_key
from dspark_ops.rows import load_row

BLOCK_V = 1024  # part of the contract: K = ceil(V / BLOCK_V) for every batch and device


# 1 reference


def gumbel_block_argmax_ref(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor]:
    arguments = (logits, idx_mapping, temperature, seeds, pos, logits_cache, cache_col, cache_cols)
    rows = rows_and_cache_ref(*arguments, key_offset(pos_offset, is_drafting))
    value = noised_logits_ref(logits, rows, apply_temperature, use_fp64)
    maxima, ids = [], []
    for start in range(0, logits.shape[1], BLOCK_V):
        block = value[:, start : start + BLOCK_V]
        best = block.argmax(-1, keepdim=True)
        maxima.append(block.gather(-1, best))
        ids.append(best + start)
    return torch.cat(maxima, -1), torch.cat(ids, -1)


# 2 kernel


@triton.jit(
    do_not_specialize=["num_slots", "num_cols", "num_blocks", "col", "offset"]
    + ["stride_idx_b", "stride_pos_b", "stride_col_b"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "temperature_ptr", "seeds_ptr"]
    + ["pos_ptr", "col_ptr", "block_max_ptr", "block_argmax_ptr"],
)
def _gumbel_block_argmax_kernel(
    block_max_ptr,
    block_argmax_ptr,
    logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    cache_ptr,
    col_ptr,
    V,
    num_slots,
    num_cols,
    num_blocks,
    col,
    offset,
    stride_logits_b,
    stride_idx_b,
    stride_pos_b,
    stride_col_b,
    stride_cache_s,
    stride_cache_c,
    HAS_CACHE: tl.constexpr,
    HAS_COL_PTR: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
    USE_FP64: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # one axis: the others end at 65535
    row = program // num_blocks
    block = (program % num_blocks).to(tl.int32)
    slot, live, sampled, temperature, seed, pos, column = load_row(
        row,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        pos_ptr,
        col_ptr,
        num_slots,
        col,
        offset,
        stride_idx_b,
        stride_pos_b,
        stride_col_b,
        HAS_COL_PTR,
    )
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    logits = tl.load(logits_ptr + row * stride_logits_b + offs_v, mask=mask_v, other=float("-inf"))
    if HAS_CACHE:
        written = live & (column >= 0) & (column < num_cols)
        cache_row = cache_ptr + slot * stride_cache_s + column * stride_cache_c
        tl.store(cache_row + offs_v, logits, mask=mask_v & written)
        seed ^= column << 32

    value = noised_values(
        logits.to(tl.float32), offs_v, sampled, temperature, seed, pos, APPLY_TEMPERATURE, USE_FP64
    )
    none = -0x8000000000000000 if USE_FP64 else -0x80000000
    _, best_id = argmax_first(ordered_key(value), offs_v, mask_v, none)
    is_best = offs_v == best_id
    # Exactly one lane is not zero, so the sum is that lane, NaN and infinities included.
    best = tl.sum(tl.where(is_best, value, 0.0), axis=0)
    tl.store(block_max_ptr + program, best)
    tl.store(block_argmax_ptr + program, best_id.to(tl.int64))


_gumbel_block_argmax_unaligned_kernel = unaligned(_gumbel_block_argmax_kernel)


# 3 launcher

NUM_WARPS = 4


def _check(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    **_flags: Any,
) -> None:
    _checks.check_logits(logits)
    cache = (logits_cache, cache_col, cache_cols)
    check_sampler(logits, idx_mapping, temperature, seeds, pos, *cache, logits.dtype)


def _outputs(logits: Tensor, use_fp64: bool) -> tuple[Tensor, Tensor]:
    num_blocks = (logits.shape[1] + BLOCK_V - 1) // BLOCK_V
    shape = (logits.shape[0], num_blocks)
    block_max = logits.new_empty(shape, dtype=torch.float64 if use_fp64 else torch.float32)
    return block_max, logits.new_empty(shape, dtype=torch.int64)


def _gumbel_block_argmax_launch(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor]:
    require_triton("gumbel_block_argmax")
    _check(logits, idx_mapping, temperature, seeds, pos, logits_cache, cache_col, cache_cols)
    block_max, block_argmax = _outputs(logits, use_fp64)
    num_rows, num_blocks = block_max.shape
    if num_rows == 0:
        return block_max, block_argmax
    num_cols = stride_cache_s = stride_cache_c = 0
    written = logits
    if logits_cache is not None:
        num_cols = logits_cache.shape[1]
        stride_cache_s, stride_cache_c, _ = logits_cache.stride()
        written = logits_cache
    vocab, stride_logits_b = logits.shape[1], logits.stride(0)
    strides = (stride_logits_b, stride_cache_s, stride_cache_c)
    kernel = _gumbel_block_argmax_unaligned_kernel
    if is_aligned(vocab, *strides, logits.data_ptr(), written.data_ptr()):
        kernel = _gumbel_block_argmax_kernel
    with on_device(logits):
        if ACTIVE:
            cached = (logits_cache, cache_col, cache_cols)
            count_rows("gumbel_block_argmax", logits, idx_mapping, temperature, None, *cached)
        launch(
            None,
            kernel,
            {"num_warps": NUM_WARPS},
            (num_rows * num_blocks, 1, 1),
            block_max_ptr=block_max,
            block_argmax_ptr=block_argmax,
            logits_ptr=logits,
            idx_mapping_ptr=idx_mapping,
            temperature_ptr=temperature,
            seeds_ptr=seeds,
            pos_ptr=pos,
            cache_ptr=written,
            col_ptr=pos if cache_cols is None else cache_cols,
            V=vocab,
            num_slots=temperature.shape[0],
            num_cols=num_cols,
            num_blocks=num_blocks,
            col=cache_col,
            offset=key_offset(pos_offset, is_drafting),
            stride_logits_b=stride_logits_b,
            stride_idx_b=idx_mapping.stride(0),
            stride_pos_b=pos.stride(0),
            stride_col_b=0 if cache_cols is None or cache_cols.dim() == 0 else cache_cols.stride(0),
            stride_cache_s=stride_cache_s,
            stride_cache_c=stride_cache_c,
            HAS_CACHE=logits_cache is not None,
            HAS_COL_PTR=cache_cols is not None,
            APPLY_TEMPERATURE=apply_temperature,
            USE_FP64=use_fp64,
            BLOCK_V=BLOCK_V,
        )
    return block_max, block_argmax


# 4 op


def gumbel_block_argmax(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    logits_cache: Tensor | None = None,
    cache_col: int | Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor]:
    """Noised maximum and its id for each block of 1024 vocabulary entries.

    Args:
        logits: [B, V] bf16, f16 or f32; rows may be strided, columns contiguous.
        idx_mapping: int [B], any stride; request slot of each row. Negative or >= S: inert row.
        temperature: f32 [S]. Below fp32(1e-5), negative, NaN or infinite: greedy.
        seeds: i64 [S]. Equal (seed, pos, column) means equal noise, whatever the row.
        pos: int [B], any stride; position that keys the noise.
        logits_cache: [S, C, >= V] of the dtype of ``logits``, written in place at
            ``[slot, cache_col, :V]`` with the logits before temperature. Must not overlap
            ``logits``.
        cache_col: int >= 0, or int tensor, 0-d or [B]; comes together with ``logits_cache`` and
            enters the seed (``seed ^= col << 32``). A column >= C writes nothing.
        pos_offset: added to ``pos``.
        is_drafting: adds 2^30 to ``pos``, so that draft and target noise never meet.
        apply_temperature: False: temperature only tells which rows are greedy.
        use_fp64: noise and maxima in f64 (an fp32 uniform cannot reach rarer than about 2^-33).

    Returns:
        block_max f32 | f64 [B, K] and block_argmax i64 [B, K] (global ids), K = ceil(V / 1024).

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    rows = row_arguments(logits, idx_mapping, temperature, seeds, pos)
    cache = cache_arguments(logits_cache, cache_col)
    if not (
        type(pos_offset) is int
        and type(is_drafting) is type(apply_temperature) is type(use_fp64) is bool
    ):
        pos_offset = checked_offset(pos_offset, is_drafting, apply_temperature, use_fp64)
    flags = (pos_offset, is_drafting, apply_temperature, use_fp64)
    if cache:
        return torch.ops.dspark.gumbel_block_argmax_cache.default(*rows, *cache, *flags)
    return torch.ops.dspark.gumbel_block_argmax.default(*rows, *flags)


# 5 CPU


def _cpu(**arguments: Any) -> tuple[Tensor, Tensor]:
    _check(**arguments)
    if ACTIVE:
        count_rows_ref("gumbel_block_argmax", **arguments)
    return gumbel_block_argmax_ref(**arguments)


# 6 fake


def _fake(**arguments: Any) -> tuple[Tensor, Tensor]:
    _check(**arguments)
    return _outputs(arguments["logits"], arguments.get("use_fp64", False))


for _name, _cache in (("gumbel_block_argmax", ""), ("gumbel_block_argmax_cache", CACHE_ARGS)):
    register(
        f"{_name}({SAMPLER_ARGS}{_cache}{FLAG_ARGS}) -> (Tensor, Tensor)",
        cpu=_cpu,
        cuda=_gumbel_block_argmax_launch,
        fake=_fake,
    )


# 7 samples and serving calls


def sampler_state(device: torch.device | str, num_slots: int) -> tuple[Tensor, Tensor]:
    """temperature f32 [S] with greedy, one and other values; seeds i64 [S]."""
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.6, -1.0], device=device).repeat(num_slots)
    seeds = torch.arange(num_slots, device=device, dtype=torch.int64) * 0x9E3779B97F4A7C1 - 5
    return temperature[:num_slots].contiguous(), seeds


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): typical, every option, strided rows, B = 0, odd V."""
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []
    generator = torch.Generator(device).manual_seed(1)
    temperature, seeds = sampler_state(device, 5)

    def add(num_rows: int, vocab: int, dtype: torch.dtype, strided: bool, **kwargs: Any) -> None:
        logits = torch.randn(num_rows, 2, vocab, device=device, generator=generator).to(dtype)
        steps = torch.arange(3, device=device)
        pos = torch.arange(num_rows, device=device)[:, None] * 7 + steps
        idx_mapping = (torch.arange(num_rows, device=device)[:, None] + 0 * steps).int() - 1
        row: tuple[Tensor, ...] = (logits[:, 1], idx_mapping[:, 1], pos[:, 1])
        if num_rows == 0:  # a slice of it has strides that a clone can't have
            row = tuple(x.new_empty(x.shape) for x in row)
        base, idx, key = row if strided else tuple(x.contiguous() for x in row)
        name = "gumbel_block_argmax"
        if "cache_col" in kwargs or "cache_cols" in kwargs:
            name += "_cache"
            kwargs = {"cache_col": 0, "cache_cols": None, **kwargs}
            kwargs["logits_cache"] = torch.full((5, 3, vocab + 3), 7.0, device=device, dtype=dtype)[
                ..., 1:
            ]
        samples.append((name, (base, idx, temperature, seeds, key), kwargs))

    add(3, 1500, torch.bfloat16, strided=False)
    add(3, 1500, torch.bfloat16, strided=True, cache_col=1, is_drafting=True)
    add(2, 1025, torch.float16, strided=True, cache_cols=torch.tensor(2, device=device))
    add(2, 7, torch.float32, True, cache_cols=torch.tensor([0, 9], device=device), pos_offset=-1)
    add(2, 1, torch.float32, strided=False, apply_temperature=False, use_fp64=True)
    add(0, 1024, torch.float32, strided=False, cache_col=0)
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    for args, kwargs in sampler_arguments(serving, with_bias=False):
        yield functools.partial(gumbel_block_argmax, *args, **kwargs)
