"""prepare_positions: positions, sequence lengths and padding of a batch, in one launch.

    s = idx_mapping[b];  first, end = query_start_loc[b], query_start_loc[b + 1]
    positions[first + i] = num_computed_tokens[s] + i                  # 0 <= i < end - first
    seq_lens[b]          = num_computed_tokens[s] + end - first        # 0 past B and of inert rows
    is_padding[t]        = t >= (num_tokens or, without it, query_start_loc[B])

positions i64 [T], seq_lens i32 [>= B], is_padding bool [T']. Contract: a row is inert when its slot
is negative or not below S; positions outside the spans of live rows are untouched; a span is
clipped to [0, T), one that ends before it starts counts as empty; the boundary is read on the
device, so that a captured graph follows the batch, unless ``num_tokens`` is given.
Bytes that must move: 8 a position, 4 an entry of seq_lens, 1 an entry of is_padding.

Source: the positions kernel of vLLM 0.33's V2 model runner, and the two fills beside it.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import launch, launch_options, on_device
from dspark_ops._library import is_plain_gpu_call, register
from dspark_ops._serving import Call, Serving
from dspark_ops._triton import require_triton, tl, triton
from dspark_ops._vector_checks import MAX_INT32, check_entries_differ, check_vector

# 1 reference


def prepare_positions_ref(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    *,
    is_padding: Tensor | None = None,
    num_tokens: int | None = None,
) -> None:
    starts = query_start_loc.tolist()
    tokens = torch.arange(positions.shape[0], device=positions.device)
    seq_lens.zero_()
    for row, slot in enumerate(idx_mapping.tolist()):
        if not 0 <= slot < num_computed_tokens.shape[0]:
            continue
        first, end = starts[row], max(starts[row], starts[row + 1])
        computed = num_computed_tokens[slot].long()
        seq_lens[row] = computed + (end - first)
        span = tokens[max(first, 0) : max(end, 0)]
        positions[span] = computed + (span - first)
    if is_padding is not None:
        tokens = torch.arange(is_padding.shape[0], device=is_padding.device)
        is_padding.copy_(tokens >= (starts[-1] if num_tokens is None else num_tokens))


# 2 kernel


@triton.jit(
    do_not_specialize=["num_rows", "num_zero_programs", "num_slots", "num_positions"]
    + ["num_seq_lens", "num_paddings", "num_tokens", "stride_positions_t", "stride_seq_lens_b"]
    + ["stride_padding_t", "stride_idx_b", "stride_start_b", "stride_computed_s"],
    do_not_specialize_on_alignment=["positions_ptr", "seq_lens_ptr", "is_padding_ptr"]
    + ["idx_mapping_ptr", "query_start_loc_ptr", "num_computed_ptr"],
)
def _prepare_positions_kernel(
    positions_ptr,
    seq_lens_ptr,
    is_padding_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_ptr,
    num_rows,
    num_zero_programs,
    num_slots,
    num_positions,
    num_seq_lens,
    num_paddings,
    num_tokens,
    stride_positions_t,
    stride_seq_lens_b,
    stride_padding_t,
    stride_idx_b,
    stride_start_b,
    stride_computed_s,
    HAS_PADDING: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # a row, or a block past the rows, or one of padding
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if program < num_rows:
        slot = tl.load(idx_mapping_ptr + program * stride_idx_b).to(tl.int64)
        start_ptr = query_start_loc_ptr + program * stride_start_b
        start = tl.load(start_ptr).to(tl.int64)
        end = tl.load(start_ptr + stride_start_b).to(tl.int64)
        live = (slot >= 0) & (slot < num_slots)
        computed = tl.load(num_computed_ptr + slot * stride_computed_s, mask=live, other=0)
        seq_len = tl.where(live, computed + tl.maximum(end - start, 0), 0)
        tl.store(seq_lens_ptr + program * stride_seq_lens_b, seq_len.to(tl.int32))
        last = tl.where(live, tl.minimum(end, num_positions), 0)
        for first in range(tl.maximum(start, 0), last, BLOCK_T):
            offs_t = first + tl.arange(0, BLOCK_T)
            position_ptrs = positions_ptr + offs_t * stride_positions_t
            tl.store(position_ptrs, computed - start + offs_t, mask=offs_t < last)
    elif program < num_rows + num_zero_programs:
        offs_b = num_rows + (program - num_rows) * BLOCK_T + tl.arange(0, BLOCK_T)
        zeros = tl.zeros((BLOCK_T,), tl.int32)
        tl.store(seq_lens_ptr + offs_b * stride_seq_lens_b, zeros, mask=offs_b < num_seq_lens)
    elif HAS_PADDING:
        boundary = num_tokens.to(tl.int64)
        if num_tokens < 0:
            last_start_ptr = query_start_loc_ptr + num_rows.to(tl.int64) * stride_start_b
            boundary = tl.load(last_start_ptr).to(tl.int64)
        block = program - num_rows - num_zero_programs
        offs_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        padding_ptrs = is_padding_ptr + offs_t * stride_padding_t
        tl.store(padding_ptrs, offs_t >= boundary, mask=offs_t < num_paddings)


# 3 launcher

BLOCK_T = 1024
NUM_WARPS = 4


def _check(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    is_padding: Tensor | None = None,
    num_tokens: int | torch.SymInt | None = None,
) -> None:
    at = ("positions", positions.device)
    check_vector("positions", positions, (torch.int64,), "[T]", None, *at)
    check_vector("idx_mapping", idx_mapping, _checks.INDEX_DTYPES, "[B]", None, *at)
    num_rows = idx_mapping.shape[0]
    starts = ("query_start_loc", query_start_loc, (torch.int32,), "[B + 1]", num_rows + 1)
    check_vector(*starts, *at)
    check_vector("num_computed_tokens", num_computed_tokens, (torch.int32,), "[S]", None, *at)
    check_vector("seq_lens", seq_lens, (torch.int32,), "[>= B]", None, *at)
    if seq_lens.shape[0] < num_rows:
        raise ValueError(
            f"seq_lens must have an entry for each row of idx_mapping, [>= B] = [>= {num_rows}]; "
            f"got {tuple(seq_lens.shape)}"
        )
    check_entries_differ("positions", positions)
    check_entries_differ("seq_lens", seq_lens)
    if is_padding is not None:
        check_vector("is_padding", is_padding, (torch.bool,), "[T']", None, *at)
        check_entries_differ("is_padding", is_padding)
    # A number that is not known yet is checked when the op runs: a guard would compile again.
    if isinstance(num_tokens, int) and num_tokens < 0:
        raise ValueError(
            f"num_tokens must be the number of tokens before the padding, >= 0; got {num_tokens}"
        )


# By what decides the compiled code: sizes and strides do not, as long as they fit an int32.
_variants: dict[tuple[Any, ...], Any] = {}


def _prepare_positions_launch(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    is_padding: Tensor | None = None,
    num_tokens: int | None = None,
) -> None:
    require_triton("prepare_positions")
    outputs = (positions, seq_lens, is_padding)
    _check(idx_mapping, query_start_loc, num_computed_tokens, *outputs, num_tokens)
    num_rows = idx_mapping.shape[0]
    num_zero_programs = (seq_lens.shape[0] - num_rows + BLOCK_T - 1) // BLOCK_T
    num_paddings = 0 if is_padding is None else is_padding.shape[0]
    num_programs = num_rows + num_zero_programs + (num_paddings + BLOCK_T - 1) // BLOCK_T
    if num_programs == 0:
        return
    sizes = (
        num_rows,
        num_zero_programs,
        num_computed_tokens.shape[0],
        positions.shape[0],
        seq_lens.shape[0],
        num_paddings,
        -1 if num_tokens is None else min(num_tokens, num_paddings),
        positions.stride(0),
        seq_lens.stride(0),
        0 if is_padding is None else is_padding.stride(0),
        idx_mapping.stride(0),
        query_start_loc.stride(0),
        num_computed_tokens.stride(0),
    )
    fits = max(sizes) <= MAX_INT32
    key = (positions.get_device(), idx_mapping.dtype, is_padding is None, fits)
    options = {"num_warps": NUM_WARPS, **launch_options(positions)}
    pdl = options.pop("LAUNCH_PDL")
    with on_device(positions):
        variant = launch(
            _variants.get(key),
            _prepare_positions_kernel,
            options,
            (num_programs, 1, 1),
            positions,
            seq_lens,
            positions if is_padding is None else is_padding,
            idx_mapping,
            query_start_loc,
            num_computed_tokens,
            *sizes,
            is_padding is not None,
            pdl,
            BLOCK_T,
        )
    if variant is not None and fits:
        _variants[key] = variant


# 4 op


def prepare_positions(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    *,
    is_padding: Tensor | None = None,
    num_tokens: int | None = None,
) -> None:
    """Write the positions and sequence lengths of a batch, and which of its tokens are padding.

    Args:
        idx_mapping: int [B]; request slot of each row. Negative or >= S: inert row.
        query_start_loc: i32 [B + 1]; row b's tokens are ``query_start_loc[b]`` to
            ``query_start_loc[b + 1]``. Spans must not overlap; one that ends before it starts
            counts as empty.
        num_computed_tokens: i32 [S]; tokens of each request before this batch.
        positions: i64 [T], written in place over the span of each live row, clipped to [0, T), and
            nowhere else: ``num_computed_tokens[slot] + 0, 1, ...``.
        seq_lens: i32 [>= B], written in place: ``num_computed_tokens[slot] + span`` for live rows,
            0 for inert rows and past B.
        is_padding: bool [T'], written in place: False before the boundary, True from it on. Without
            it nothing of the kind is touched.
        num_tokens: the boundary, int >= 0, also where it differs from the end of the spans; beyond
            T' nothing is padding. Without it the boundary is ``query_start_loc[B]``, read on the
            device.

    Every tensor may have any stride. What is written must not overlap any other argument.

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    for name, x in (
        ("idx_mapping", idx_mapping),
        ("query_start_loc", query_start_loc),
        ("num_computed_tokens", num_computed_tokens),
        ("positions", positions),
        ("seq_lens", seq_lens),
    ):
        if not isinstance(x, Tensor):
            _checks.check_is_tensor(name, x)
    if isinstance(num_tokens, Tensor):
        raise TypeError("num_tokens must be an int, got a Tensor; without it the device is asked")
    if num_tokens is not None and type(num_tokens) is not int:
        num_tokens = _checks.as_int("num_tokens", num_tokens)
    arguments = (idx_mapping, query_start_loc, num_computed_tokens, positions, seq_lens)
    if is_padding is None:
        if num_tokens is not None:
            raise ValueError(
                "num_tokens must be given with is_padding, where it is the boundary; got "
                f"num_tokens={num_tokens} and is_padding=None"
            )
        if is_plain_gpu_call(positions):
            return _prepare_positions_launch(*arguments)
        return torch.ops.dspark.prepare_positions.default(*arguments)
    _checks.check_is_tensor("is_padding", is_padding)
    if is_plain_gpu_call(positions):
        return _prepare_positions_launch(*arguments, is_padding, num_tokens)
    return torch.ops.dspark.prepare_positions_padding.default(*arguments, is_padding, num_tokens)


# 5 CPU


def _cpu(**arguments: Any) -> None:
    _check(**arguments)
    prepare_positions_ref(**arguments)


# 6 fake


def _fake(**arguments: Any) -> None:
    _check(**arguments)


_ARGS = (
    "Tensor idx_mapping, Tensor query_start_loc, Tensor num_computed_tokens"
    ", Tensor(a!) positions, Tensor(b!) seq_lens"
)
# An optional mutated argument crashes the compiler, so that there are two ops.
for _name, _padding in (
    ("prepare_positions", ""),
    ("prepare_positions_padding", ", Tensor(c!) is_padding, SymInt? num_tokens=None"),
):
    register(
        f"{_name}({_ARGS}{_padding}) -> ()",
        cpu=_cpu,
        cuda=_prepare_positions_launch,
        fake=_fake,
    )


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): typical, inert rows, strided, each boundary, B = 0."""
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []

    def ints(values: list[int], dtype: torch.dtype, stride: int) -> Tensor:
        buffer = torch.full((len(values), stride), -9, device=device, dtype=dtype)
        buffer[:, 0] = torch.tensor(values, device=device, dtype=dtype)
        return buffer[:, 0]

    def add(
        slots: list[int],
        starts: list[int],
        padding: int | None = None,
        stride: int = 1,
        dtype: torch.dtype = torch.int32,
        **kwargs: Any,
    ) -> None:
        arguments = (
            ints(slots, dtype, stride),
            ints(starts, torch.int32, stride),
            ints([40, 0, 7, 1000], torch.int32, stride),
            ints([-9] * 11, torch.int64, stride),
            ints([-9] * (len(slots) + 2), torch.int32, stride),
        )
        name = "prepare_positions"
        if padding is not None:
            name += "_padding"
            buffer = torch.zeros(padding, stride, device=device, dtype=torch.bool)
            buffer[::2] = True
            kwargs["is_padding"] = buffer[:, 0]
        samples.append((name, arguments, kwargs))

    add([2, 0, 1], [0, 3, 4, 9])
    add([2, -1, 4], [0, 3, 4, 9], stride=3, dtype=torch.int64)
    add([3, 1], [1, 4, 20], padding=13)
    add([3], [0, 5], padding=9, stride=2, dtype=torch.int16, num_tokens=3)
    add([0, 1], [0, 1, 2], padding=5, num_tokens=7)
    add([], [4], padding=6)
    add([], [0])
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    for index_dtype, has_padding in product(serving.index_dtypes, (False, True)):
        yield functools.partial(
            prepare_positions,
            serving.zeros(2, dtype=index_dtype),
            serving.zeros(3, dtype=torch.int32),
            serving.zeros(2, dtype=torch.int32),
            serving.zeros(2, dtype=torch.int64),
            serving.zeros(2, dtype=torch.int32),
            is_padding=serving.zeros(2, dtype=torch.bool) if has_padding else None,
        )
