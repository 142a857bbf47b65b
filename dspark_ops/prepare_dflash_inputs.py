"""prepare_dflash_inputs: all inputs of a DFlash draft forward, from the target's, in one launch.

Each live row b of slot s asks Q queries behind its last valid target position:

    end     = target_query_start_loc[b + 1] - num_rejected[b];  last = target_positions[end - 1]
    input_ids[b Q]     = last_sampled[s] if num_sampled[b] > 0 else next_prefill_tokens[s]
    input_ids[b Q + j] = mask_token_id                                                # 0 < j < Q
    positions[b Q + j] = min(last + 1 + j, max_model_len - 1);  slot of last + 1 + j
    seq_lens[b]        = min(last + 1 + Q, max_model_len);  query_start_loc[b] = b Q
    context_positions[t] = target_positions[t] and its slot, start <= t < end
    sample_indices[b N + i] = b Q + i + (Q - N);  sample_pos = last + 2 + i;  its slot s
    slot of p: block_table[b, p // (block_size cp_size)] block_size + what this rank holds below p

The live rows are those before the first whose slot is negative or not below S. Everything behind
them is padding and is written too, so that nothing stale survives a replay. Shapes and dtypes are
those of the public function. Bytes that must move, with Bm rows and Tm and Tc tokens of buffer: 21
a query token, 16 a context token (8 more where it is live), 8 a row, 24 a sample. At the 4.24 TB/s
of an H200 that is 0.6 us for 1024 rows and 65536 tokens; the rest is one launch and, behind one
another, the loads of a query token's start, target position and block.

Source: the kernel of vLLM 0.33's DFlash proposer.
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
from dspark_ops._serving import Call, NotWarmed, Serving
from dspark_ops._triton import require_triton
from dspark_ops._vector_checks import MAX_INT32
from dspark_ops.prepare_dflash_inputs_checks import SHAPES, check_metadata, check_spans
from dspark_ops.prepare_dflash_inputs_kernel import _prepare_dflash_inputs_kernel

# 1 reference


def _fill(buffer: Tensor, values: Tensor, padding: int | bool, first: int = 0) -> None:
    buffer.fill_(padding)
    buffer[first : first + values.numel()] = values.flatten()


def prepare_dflash_inputs_ref(
    *,
    idx_mapping: Tensor,
    target_query_start_loc: Tensor,
    target_positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    out_temperature: Tensor,
    out_seeds: Tensor,
    max_target_query_len: int,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_steps: int,
    max_model_len: int,
    sample_from_anchor: bool,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_interleave: int = 1,
    is_padding: Tensor | None = None,
) -> None:
    slots = idx_mapping.long()
    dead = ((slots < 0) | (slots >= temperature.shape[0])).nonzero().flatten().tolist()
    num_live = dead[0] if dead else slots.shape[0]
    slots, rejected = slots[:num_live], num_rejected[:num_live].long()
    starts = target_query_start_loc[: num_live + 1].long()
    num_targets = min(target_positions.shape[0], context_positions.shape[0])
    check_spans(starts.tolist(), rejected.tolist(), num_targets, max_target_query_len)
    rows = torch.arange(num_live, device=slots.device)

    table = torch.nn.functional.pad(block_table, (0, 1))  # column n: the null block

    def slot_of(position: Tensor, row: Tensor) -> Tensor:
        column = position // (block_size * cp_size)
        is_cached = (position >= 0) & (position < max_model_len) & (column < block_table.shape[1])
        block = table[row, torch.where(is_cached, column, block_table.shape[1])].long()
        offset = position % (block_size * cp_size)
        is_here = offset // cp_interleave % cp_size == cp_rank
        local = offset // (cp_interleave * cp_size) * cp_interleave + offset % cp_interleave
        return torch.where((block > 0) & is_here, block * block_size + local, -1)

    last = target_positions[starts[1:] - rejected - 1]
    position = last[:, None] + 1 + torch.arange(num_query_per_req, device=last.device)  # [live, Q]
    token = torch.full_like(position, mask_token_id)
    token[:, 0] = torch.where(
        num_sampled[:num_live] > 0, last_sampled[slots], next_prefill_tokens[slots].long()
    )
    _fill(input_ids, token, 0)
    _fill(positions, position.clamp(max=max_model_len - 1), 0)
    _fill(query_slot_mapping, slot_of(position, rows[:, None]), -1)
    if is_padding is not None:
        _fill(is_padding, torch.zeros_like(token, dtype=torch.bool), True)
    _fill(query_start_loc, rows * num_query_per_req, num_live * num_query_per_req)
    _fill(seq_lens, (last + 1 + num_query_per_req).clamp(max=max_model_len), 0)

    context = torch.arange(int(starts[0]), int(starts[-1]), device=last.device)
    row = torch.repeat_interleave(rows, starts.diff())
    is_valid = context < (starts[1:] - rejected)[row]
    target = target_positions[context]
    _fill(context_positions, torch.where(is_valid, target, 0), 0, int(starts[0]))
    slot = torch.where(is_valid, slot_of(target, row), -1)
    _fill(context_slot_mapping, slot, -1, int(starts[0]))

    # With the anchor query j samples the position after its own; without, query j + 1 its own.
    step = torch.arange(num_steps, device=last.device)
    query = rows[:, None] * num_query_per_req + step + (0 if sample_from_anchor else 1)
    _fill(sample_indices, query, 0)
    _fill(sample_pos, last[:, None] + 2 + step, 0)
    _fill(sample_idx_mapping, slots[:, None].expand(-1, num_steps), -1)
    out_temperature[slots] = temperature[slots]
    out_seeds[slots] = seeds[slots]


# 2 kernel: prepare_dflash_inputs_kernel.py

# 3 launcher

# H200, us in graph replay at B = 1, 64, 256, by BLOCK_T, warps and BLOCK_B:
#                   buffers 256 / 8192   1024 / 65536
#    128, 4,  256:  1.75  1.99  2.17     2.10  2.39  2.72
#    128, 4,  512:  1.84  2.07  2.14     2.06  2.35  2.53
#    128, 4, 1024:  1.91  2.15  2.23     2.22  2.58  2.71
#    256, 4,  256:  1.78  2.17  2.25     2.16  2.62  2.68
#    256, 8, 1024:  1.82  2.20  2.28     2.23  2.65  2.78
#    512, 4, 1024:  2.24  2.64  2.71     2.67  3.04  3.13  (another run)
BLOCK_T = 128  # tokens, samples or rows of a program
BLOCK_B = 512  # rows that a program looks through at once
NUM_WARPS = 4

# By what decides the compiled code: sizes and strides do not, as long as they fit an int32.
_variants: dict[tuple[Any, ...], Any] = {}


def _prepare_dflash_inputs_launch(
    idx_mapping: Tensor,
    target_query_start_loc: Tensor,
    target_positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    out_temperature: Tensor,
    out_seeds: Tensor,
    max_target_query_len: int,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_steps: int,
    max_model_len: int,
    sample_from_anchor: bool,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_interleave: int = 1,
    is_padding: Tensor | None = None,
) -> None:
    arguments = dict(locals())
    require_triton("prepare_dflash_inputs")
    check_metadata(arguments)
    num_buffer_rows, num_tokens = seq_lens.shape[0], input_ids.shape[0]
    num_context_tokens = context_positions.shape[0]
    num_row_programs = num_buffer_rows // BLOCK_T + 1  # query_start_loc has an entry more
    num_sample_programs = (num_buffer_rows * num_steps + BLOCK_T - 1) // BLOCK_T
    num_query_programs = (num_tokens + BLOCK_T - 1) // BLOCK_T
    num_programs = num_row_programs + num_sample_programs + num_query_programs
    num_programs += (num_context_tokens + BLOCK_T - 1) // BLOCK_T
    sizes = (
        idx_mapping.shape[0],
        num_buffer_rows,
        temperature.shape[0],
        target_positions.shape[0],
        num_tokens,
        num_context_tokens,
        block_table.shape[1],
        num_row_programs,
        num_sample_programs,
        num_query_programs,
        mask_token_id,
        max_model_len,
        cp_rank,
        idx_mapping.stride(0),
        num_sampled.stride(0),
        num_rejected.stride(0),
        *block_table.stride(),
    )
    options = {"num_warps": NUM_WARPS, **launch_options(input_ids)}
    flags = (
        is_padding is not None,
        num_query_per_req,
        num_steps,
        block_size,
        cp_size,
        cp_interleave,
        options.pop("LAUNCH_PDL"),
        BLOCK_T,
        BLOCK_B,
    )
    dtypes = (idx_mapping.dtype, next_prefill_tokens.dtype)
    fits = max(sizes) <= MAX_INT32
    key = (input_ids.get_device(), *dtypes, *flags, fits)
    # fmt: off
    tensors = (
        input_ids, positions, input_ids if is_padding is None else is_padding, query_slot_mapping,
        query_start_loc, seq_lens, context_positions, context_slot_mapping, sample_indices,
        sample_pos, sample_idx_mapping, out_temperature, out_seeds,
        idx_mapping, target_query_start_loc, target_positions, num_sampled, num_rejected,
        last_sampled, next_prefill_tokens, temperature, seeds, block_table,
    )
    # fmt: on
    with on_device(input_ids):
        variant = launch(
            _variants.get(key),
            _prepare_dflash_inputs_kernel,
            options,
            (num_programs, 1, 1),
            *tensors,
            *sizes,
            *flags,
        )
    if variant is not None and fits:
        _variants[key] = variant


# 4 op

_INPUTS = (
    "Tensor idx_mapping, Tensor target_query_start_loc, Tensor target_positions"
    ", Tensor num_sampled, Tensor num_rejected, Tensor last_sampled, Tensor next_prefill_tokens"
    ", Tensor temperature, Tensor seeds, Tensor block_table"
)
_OUTPUTS = (
    "Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) query_slot_mapping"
    ", Tensor(d!) query_start_loc, Tensor(e!) seq_lens, Tensor(f!) context_positions"
    ", Tensor(g!) context_slot_mapping, Tensor(h!) sample_indices, Tensor(i!) sample_pos"
    ", Tensor(j!) sample_idx_mapping, Tensor(k!) out_temperature, Tensor(l!) out_seeds"
)
_SCALARS = (
    "SymInt max_target_query_len, int mask_token_id, int block_size, int num_query_per_req"
    ", int num_steps, int max_model_len, bool sample_from_anchor, int cp_rank, int cp_size"
    ", int cp_interleave"
)


def _names(arguments: str) -> list[str]:
    return [argument.split()[1] for argument in arguments.split(", ")]


_TENSORS = _names(_INPUTS) + _names(_OUTPUTS)
_NUMBERS = _names(_SCALARS)


def prepare_dflash_inputs(
    *,
    idx_mapping: Tensor,
    target_query_start_loc: Tensor,
    target_positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    out_temperature: Tensor,
    out_seeds: Tensor,
    is_padding: Tensor | None = None,
    max_target_query_len: int,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_steps: int,
    max_model_len: int,
    sample_from_anchor: bool,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_interleave: int = 1,
) -> None:
    """Write all inputs of a draft forward of Q queries a row, and what is sampled from it.

    Live rows are those before the first of ``idx_mapping`` that is negative or >= S, so that a
    graph captured for B rows serves fewer. All entries of all outputs are written on every call,
    with the padding value beyond the live rows, but for ``out_temperature`` and ``out_seeds``.

    Args:
        idx_mapping: int [B], any stride; request slot s of each row.
        target_query_start_loc: i32 [B + 1]; row b's target tokens are ``target_query_start_loc[b]``
            to ``target_query_start_loc[b + 1]``.
        target_positions: i64, the position of each target token.
        num_sampled: i32 [B], any stride; 0: the row is still in its prefill.
        num_rejected: i32 [B], any stride; so many tokens at the end of the row's span are not
            valid. Less than the span of a live row: checked on a CPU only, where it raises.
        last_sampled: i64 [S], ids below 2^31.
        next_prefill_tokens: i32 or i64 [S], likewise.
        temperature: f32 [S].
        seeds: i64 [S].
        block_table: i32 [B, n], any strides; block 0 is the null block.
        input_ids: i32 [Tm], Tm >= B * Q, written: token 0 of a row is ``last_sampled[s]`` if
            ``num_sampled[b] > 0`` else ``next_prefill_tokens[s]``, the others are
            ``mask_token_id``. Padding 0.
        positions: i64 [Tm], written: last valid target position + 1 + j, at most
            ``max_model_len - 1``. Padding 0.
        query_slot_mapping: i64 [Tm], written: slot of that position before the limit. Padding -1.
        query_start_loc: i32 [Bm + 1], Bm >= B, written: b * Q. Padding: live rows * Q.
        seq_lens: i32 [Bm], written: last valid position + 1 + Q, at most ``max_model_len``.
            Padding 0.
        context_positions: i64 [Tc], written at each valid target token: its position. Padding 0,
            also in the place of rejected tokens.
        context_slot_mapping: i64 [Tc], likewise: the position's slot. Padding -1.
        sample_indices: i64 [Bm * N], written: index of the query that the sample is taken from.
            Padding 0.
        sample_pos: i64 [Bm * N], written: the position that is sampled, without the limit: that of
            the query + 1 with ``sample_from_anchor``, else the query's own. Padding 0.
        sample_idx_mapping: i64 [Bm * N], written: s. Padding -1.
        out_temperature: f32 [S], written at the slots of live rows only.
        out_seeds: i64 [S], likewise.
        is_padding: bool [Tm], written: False for live query tokens, whatever their slot.
        max_target_query_len: an upper bound of the spans, which only a CPU looks at: a kernel's
            work does not depend on it.
        mask_token_id: id of the tokens to draft.
        block_size: tokens of a block of the cache on a rank.
        num_query_per_req: Q.
        num_steps: N; Q with ``sample_from_anchor``, else Q - 1.
        max_model_len: positions from it on have no slot.
        sample_from_anchor: whether query 0, the last sampled token, is sampled from too.
        cp_rank, cp_size, cp_interleave: context parallelism. Of ``block_size * cp_size`` positions
            a rank holds every ``cp_size``-th run of ``cp_interleave``; those of other ranks have
            slot -1.

    Slots are -1 also in block 0, beyond the columns of ``block_table`` and from ``max_model_len``
    on. Where no stride is mentioned a tensor is contiguous. What is written must not overlap any
    other argument. Query sizes, ``num_steps``, ``block_size`` and the sizes of context parallelism
    are compiled in.

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then. On a CPU
            also spans and ``num_rejected`` that do not; on a GPU such rows get values of no use,
            within bounds.
    """
    # fmt: off
    tensors = (
        idx_mapping, target_query_start_loc, target_positions, num_sampled, num_rejected,
        last_sampled, next_prefill_tokens, temperature, seeds, block_table,
        input_ids, positions, query_slot_mapping, query_start_loc, seq_lens, context_positions,
        context_slot_mapping, sample_indices, sample_pos, sample_idx_mapping, out_temperature,
        out_seeds,
    )
    numbers: list[Any] = [
        max_target_query_len, mask_token_id, block_size, num_query_per_req, num_steps,
        max_model_len, sample_from_anchor, cp_rank, cp_size, cp_interleave,
    ]
    # fmt: on
    for name, x in zip(_TENSORS, tensors, strict=True):
        if not isinstance(x, Tensor):
            _checks.check_is_tensor(name, x)
    for i, (name, value) in enumerate(zip(_NUMBERS, numbers, strict=True)):
        if name == "sample_from_anchor":
            _checks.check_is_bool(name, value)
        elif type(value) is not int:
            numbers[i] = _checks.as_int(name, value)
    padding: tuple[Tensor, ...] = ()
    if is_padding is not None:
        _checks.check_is_tensor("is_padding", is_padding)
        padding = (is_padding,)
    if is_plain_gpu_call(input_ids):
        return _prepare_dflash_inputs_launch(*tensors, *numbers, *padding)
    ops = torch.ops.dspark
    op = ops.prepare_dflash_inputs_padding if padding else ops.prepare_dflash_inputs
    return op.default(*tensors, *numbers, *padding)


# 5 CPU


def _cpu(**arguments: Any) -> None:
    check_metadata(arguments)
    prepare_dflash_inputs_ref(**arguments)


# 6 fake


def _fake(**arguments: Any) -> None:
    check_metadata(arguments)


# An optional mutated argument crashes the compiler, so that there are two ops.
for _name, _padding in (
    ("prepare_dflash_inputs", ""),
    ("prepare_dflash_inputs_padding", ", Tensor(m!) is_padding"),
):
    register(
        f"{_name}({_INPUTS}, {_OUTPUTS}, {_SCALARS}{_padding}) -> ()",
        cpu=_cpu,
        cuda=_prepare_dflash_inputs_launch,
        fake=_fake,
    )


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): typical, rejected, inert and prefill rows, strided, B = 0."""
    samples: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    num_slots = 5

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, device=device, dtype=dtype)

    def add(
        slots: list[int],
        spans: list[int],
        rejected: list[int],
        num_steps: int,
        sample_from_anchor: bool,
        has_padding: bool,
        strided: bool = False,
        cp: tuple[int, int, int] = (0, 1, 1),
    ) -> None:
        num_rows, num_buffer_rows = len(slots), len(slots) + 2
        num_queries = num_steps if sample_from_anchor else num_steps + 1
        num_tokens = num_buffer_rows * num_queries + 1
        starts = [sum(spans[:row]) for row in range(num_rows + 1)]
        first = [7 * row + 3 for row in range(num_rows)]
        targets = [first[row] + i for row in range(num_rows) for i in range(spans[row])]
        table = torch.arange(num_rows * 6, device=device, dtype=torch.int32).view(num_rows, 6)
        idx_mapping, sampled = ints(slots), ints([row % 2 for row in range(num_rows)])
        if strided:
            table = table[:, ::2]
            idx_mapping = torch.stack([idx_mapping, idx_mapping], 1)[:, 0]
            sampled = torch.stack([sampled, sampled], 1)[:, 1]

        def buffer(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((size,), -9, device=device, dtype=dtype)

        arguments = (
            idx_mapping,
            ints(starts),
            ints([*targets, 0, 0], torch.int64),
            sampled,
            ints(rejected),
            ints([11, 12, 13, 14, 15], torch.int64),
            ints([21, 22, 23, 24, 25], torch.int64 if strided else torch.int32),
            torch.linspace(0.5, 1.5, num_slots, device=device),
            ints([1, 2, 3, 4, 5], torch.int64),
            table,
            buffer(num_tokens, torch.int32),
            buffer(num_tokens),
            buffer(num_tokens),
            buffer(num_buffer_rows + 1, torch.int32),
            buffer(num_buffer_rows, torch.int32),
            buffer(len(targets) + 3),
            buffer(len(targets) + 3),
            buffer(num_buffer_rows * num_steps),
            buffer(num_buffer_rows * num_steps),
            buffer(num_buffer_rows * num_steps),
            buffer(num_slots, torch.float32),
            buffer(num_slots),
            max(spans, default=0),
            99,
            4,
            num_queries,
            num_steps,
            20,
            sample_from_anchor,
            *cp,
        )
        if has_padding:
            is_padding = torch.zeros(num_tokens, device=device, dtype=torch.bool)
            is_padding[: num_tokens // 2] = True
            samples.append(("prepare_dflash_inputs_padding", (*arguments, is_padding), {}))
        else:
            samples.append(("prepare_dflash_inputs", arguments, {}))

    add([2, 0, 4], [1, 3, 2], [0, 1, 0], 3, sample_from_anchor=False, has_padding=True)
    add([2, 0, -1], [1, 3, 2], [0, 2, 9], 3, True, has_padding=False, strided=True)
    add([1, 3, 0], [2, 1, 9], [1, 0, 3], 2, True, True, strided=True, cp=(1, 2, 2))
    add([3], [5], [0], 1, sample_from_anchor=False, has_padding=False)
    add([], [], [], 2, sample_from_anchor=False, has_padding=True)
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    if serving.block_size is None:
        raise NotWarmed("tell block_size, which is compiled in")
    steps = serving.num_steps
    queries = steps if serving.sample_from_anchor else steps + 1
    sizes = {"[Tm]": queries, "[B]": 1, "[Bm]": 1, "[S]": 1, "[Tc]": 1, "[T]": 1}
    sizes |= {"[B + 1]": 2, "[Bm + 1]": 2, "[Bm * N]": steps}
    tensors: dict[str, Any] = {
        name: serving.zeros(sizes[letters], dtype=dtypes[0])
        for name, (dtypes, letters) in SHAPES.items()
    }
    tensors["block_table"] = serving.zeros(1, 1, dtype=torch.int32)
    is_padding = tensors.pop("is_padding")
    for index_dtype, id_dtype, has_padding in product(
        serving.index_dtypes, serving.id_dtypes, (False, True)
    ):
        tensors["idx_mapping"] = serving.zeros(1, dtype=index_dtype)
        tensors["next_prefill_tokens"] = serving.zeros(1, dtype=id_dtype)
        yield functools.partial(
            prepare_dflash_inputs,
            **tensors,
            is_padding=is_padding if has_padding else None,
            max_target_query_len=1,
            mask_token_id=0,
            block_size=serving.block_size,
            num_query_per_req=queries,
            num_steps=steps,
            max_model_len=1,
            sample_from_anchor=serving.sample_from_anchor,
            cp_size=serving.cp_size,
            cp_interleave=serving.cp_interleave,
        )
