"""gumbel_combine: the id of the largest block maximum, one kernel for argmax + gather.

    token[b] = block_argmax[b, argmax(block_max[b])]

block_max [B, K] f32 | f64, block_argmax i64 [B, K], token i64 [B]. Contract: as ``torch.argmax``,
the first NaN wins, else the first of equal maxima; -0.0 equals 0.0; a row of only -inf gives
block 0's id.

Source: the second stage of a two-stage reduction; compare vllm#57319 (4.43 to 1.55 us on an H100).
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import launch, launch_options, on_device
from dspark_ops._library import register
from dspark_ops._serving import Call, Serving
from dspark_ops._triton import require_triton, tl, triton
from dspark_ops.ordered import argmax_first, ordered_key, pack_key

# 1 reference


def gumbel_combine_ref(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    best = block_max.argmax(-1, keepdim=True)
    return block_argmax.gather(-1, best).view(-1)


# 2 kernel


@triton.jit
def combine_row(value_row_ptr, id_row_ptr, num_blocks, BLOCK_K: tl.constexpr):
    """Id (int64) of the first largest of ``num_blocks`` values (floats, or ordered int64 keys)."""
    best_key = tl.full((), -0x8000000000000000, tl.int64)
    best_id = tl.full((), 0, tl.int64)
    for start in range(0, num_blocks, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < num_blocks
        value = tl.load(value_row_ptr + offs_k, mask=mask_k, other=0)
        ids = tl.load(id_row_ptr + offs_k, mask=mask_k, other=0)
        if value.dtype == tl.float32:
            # Key and offset in one word: one reduction instead of two.
            packed = pack_key(ordered_key(value), offs_k)
            packed = tl.where(mask_k, packed, -0x8000000000000000)
            word = tl.max(packed, axis=0)
            key = word >> 32
            is_best = packed == word
        else:
            if value.dtype == tl.float64:
                value = ordered_key(value)
            key, offset = argmax_first(value, offs_k, mask_k, -0x8000000000000000)
            is_best = offs_k == offset
        # Strictly above: an equal maximum of a later block is not the first. Of the first block the
        # id counts even if its key is the lowest there is.
        if (key > best_key) | (start == 0):
            best_key = key
            best_id = tl.sum(tl.where(is_best, ids, 0), axis=0)
    return best_id


@triton.jit(
    do_not_specialize=["num_blocks", "stride_max_b", "stride_id_b"],
    do_not_specialize_on_alignment=["token_ptr", "block_max_ptr", "block_argmax_ptr"],
)
def _gumbel_combine_kernel(
    token_ptr,
    block_max_ptr,
    block_argmax_ptr,
    num_blocks,
    stride_max_b,
    stride_id_b,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    token = combine_row(
        block_max_ptr + row * stride_max_b,
        block_argmax_ptr + row * stride_id_b,
        num_blocks,
        BLOCK_K,
    )
    tl.store(token_ptr + row, token)


# 3 launcher

BLOCK_K = 256
NUM_WARPS = 2


def _check(block_max: Tensor, block_argmax: Tensor) -> None:
    _checks.check_dtype("block_max", block_max, (torch.float32, torch.float64))
    _checks.check_dtype("block_argmax", block_argmax, (torch.int64,))
    if block_max.dim() != 2 or block_max.shape[1] < 1:
        raise ValueError(f"block_max must have shape [B, K >= 1]; got {tuple(block_max.shape)}")
    if block_argmax.shape != block_max.shape:
        raise ValueError(
            f"block_argmax must have the shape of block_max, {tuple(block_max.shape)}; "
            f"got {tuple(block_argmax.shape)}"
        )
    if block_argmax.device != block_max.device:
        raise ValueError(
            f"block_argmax must be on {block_max.device}, where block_max is; "
            f"got {block_argmax.device}"
        )
    _checks.check_last_stride("block_max", block_max)
    _checks.check_last_stride("block_argmax", block_argmax)


def _gumbel_combine_launch(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    require_triton("gumbel_combine")
    _check(block_max, block_argmax)
    num_rows, num_blocks = block_max.shape
    token = block_argmax.new_empty(num_rows)
    if num_rows > 0:
        options = launch_options(block_max)
        pdl = options.pop("LAUNCH_PDL")
        with on_device(block_max):
            launch(
                None,
                _gumbel_combine_kernel,
                {"num_warps": NUM_WARPS, **options},
                (num_rows, 1, 1),
                token_ptr=token,
                block_max_ptr=block_max,
                block_argmax_ptr=block_argmax,
                num_blocks=num_blocks,
                stride_max_b=block_max.stride(0),
                stride_id_b=block_argmax.stride(0),
                LAUNCH_PDL=pdl,
                BLOCK_K=BLOCK_K,
            )
    return token


# 4 op


def gumbel_combine(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    """Token of each row from the block maxima of ``gumbel_block_argmax``.

    Args:
        block_max: [B, K] f32 or f64, columns contiguous, rows may be strided.
        block_argmax: i64 [B, K], likewise.

    Returns:
        i64 [B]: ``block_argmax`` at the first largest ``block_max``; NaN counts as the largest.

    Raises:
        TypeError, ValueError: metadata that does not fit.
    """
    _checks.check_is_tensor("block_max", block_max)
    _checks.check_is_tensor("block_argmax", block_argmax)
    return torch.ops.dspark.gumbel_combine.default(block_max, block_argmax)


# 5 CPU


def _cpu(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    _check(block_max, block_argmax)
    return gumbel_combine_ref(block_max, block_argmax)


# 6 fake


def _fake(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    _check(block_max, block_argmax)
    return block_argmax.new_empty(block_max.shape[0])


register(
    "gumbel_combine(Tensor block_max, Tensor block_argmax) -> Tensor",
    cpu=_cpu,
    cuda=_gumbel_combine_launch,
    fake=_fake,
)


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, object]]]:
    """(op name, arguments, keywords): typical, f64 strided, one block, B = 0, many blocks."""
    generator = torch.Generator(device).manual_seed(2)
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, object]]] = []
    for num_rows, num_blocks, dtype, pad in (
        (3, 149, torch.float32, 0),
        (2, 243, torch.float64, 5),
        (2, 1, torch.float32, 3),
        (0, 7, torch.float32, 0),
        (2, 1025, torch.float32, 1),
    ):
        shape = (num_rows, num_blocks + pad)
        block_max = torch.randn(shape, device=device, generator=generator).to(dtype)
        block_argmax = torch.randint(0, 1 << 40, shape, device=device, generator=generator)
        arguments = (block_max[:, :num_blocks], block_argmax[:, :num_blocks])
        samples.append(("gumbel_combine", arguments, {}))
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    for use_fp64 in serving.use_fp64:
        block_max = serving.zeros(2, 2, dtype=torch.float64 if use_fp64 else torch.float32)
        yield functools.partial(gumbel_combine, block_max, block_max.long())
