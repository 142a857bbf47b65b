"""What prepare_dflash_inputs refuses: metadata on any device, values of spans on a CPU.

``arguments`` holds the op's arguments by name; ``is_padding`` may be absent or None.
"""

from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._vector_checks import MAX_INT32, check_vector

MAX_ENTRIES = 2**30  # offsets of a block past the end stay in int32
_I32, _I64, _F32, _BOOL = (torch.int32,), (torch.int64,), (torch.float32,), (torch.bool,)

# Dtypes and shape. The first ones give its size to each letter, which the others have to match.
_SIZING = {
    "input_ids": (_I32, "[Tm]"),
    "idx_mapping": (_checks.INDEX_DTYPES, "[B]"),
    "seq_lens": (_I32, "[Bm]"),
    "temperature": (_F32, "[S]"),
    "context_positions": (_I64, "[Tc]"),
    "target_positions": (_I64, "[T]"),
}
_SIZED = {
    "target_query_start_loc": (_I32, "[B + 1]"),
    "num_sampled": (_I32, "[B]"),
    "num_rejected": (_I32, "[B]"),
    "last_sampled": (_I64, "[S]"),
    "next_prefill_tokens": (_checks.ID_DTYPES, "[S]"),
    "seeds": (_I64, "[S]"),
    "positions": (_I64, "[Tm]"),
    "query_slot_mapping": (_I64, "[Tm]"),
    "query_start_loc": (_I32, "[Bm + 1]"),
    "context_slot_mapping": (_I64, "[Tc]"),
    "sample_indices": (_I64, "[Bm * N]"),
    "sample_pos": (_I64, "[Bm * N]"),
    "sample_idx_mapping": (_I64, "[Bm * N]"),
    "out_temperature": (_F32, "[S]"),
    "out_seeds": (_I64, "[S]"),
    "is_padding": (_BOOL, "[Tm]"),
}
SHAPES = {**_SIZING, **_SIZED}  # but of block_table
_MAY_BE_STRIDED = ("idx_mapping", "num_sampled", "num_rejected")


def check_metadata(arguments: dict[str, Any]) -> None:
    """Raise for shapes, dtypes, strides, devices and numbers that do not fit, before any write."""
    num_queries, num_steps = arguments["num_query_per_req"], arguments["num_steps"]
    _check_numbers(arguments)
    device = arguments["input_ids"].device
    sizes: dict[str, Any] = {}
    for name, (dtypes, letters) in _SIZING.items():
        x = arguments[name]
        check_vector(name, x, dtypes, letters, None, "input_ids", device)
        if name not in _MAY_BE_STRIDED and not x.is_contiguous():
            _checks.check_last_stride(name, x)
        sizes[letters] = x.shape[0]
    num_rows, num_buffer_rows, num_tokens = sizes["[B]"], sizes["[Bm]"], sizes["[Tm]"]
    sizes["[B + 1]"] = num_rows + 1
    sizes["[Bm + 1]"] = num_buffer_rows + 1
    sizes["[Bm * N]"] = num_buffer_rows * num_steps
    for name, (dtypes, letters) in _SIZED.items():
        if name == "is_padding" and arguments.get(name) is None:
            continue
        x = arguments[name]
        check_vector(name, x, dtypes, letters, sizes[letters], "input_ids", device)
        if name not in _MAY_BE_STRIDED and not x.is_contiguous():
            _checks.check_last_stride(name, x)
    _check_block_table(arguments["block_table"], num_rows, device)

    if num_rows > num_buffer_rows:
        raise ValueError(
            f"seq_lens must have an entry for each row of idx_mapping, [Bm] = [>= {num_rows}]; "
            f"got {tuple(arguments['seq_lens'].shape)}"
        )
    if num_rows * num_queries > num_tokens:
        raise ValueError(
            "input_ids must have room for num_query_per_req tokens a row of idx_mapping, "
            f"[Tm] = [>= {num_rows} * {num_queries}]; got {tuple(arguments['input_ids'].shape)}"
        )
    for name, letters in (
        ("input_ids", "[Tm]"),
        ("context_positions", "[Tc]"),
        ("sample_indices", "[Bm * N]"),
    ):
        if sizes[letters] > MAX_ENTRIES:
            raise ValueError(f"{name} must have at most 2^30 entries; got {sizes[letters]}")


def _check_block_table(block_table: Tensor, num_rows: Any, device: torch.device) -> None:
    _checks.check_dtype("block_table", block_table, _I32)
    if block_table.dim() != 2 or block_table.shape[0] != num_rows:
        raise ValueError(
            f"block_table must have shape [B, n] = [{num_rows}, n]; got {tuple(block_table.shape)}"
        )
    if block_table.device != device:
        raise ValueError(
            f"block_table must be on {device}, where input_ids is; got {block_table.device}"
        )


def _check_numbers(arguments: dict[str, Any]) -> None:
    for name, least in (
        ("max_target_query_len", 0),
        ("mask_token_id", 0),
        ("block_size", 1),
        ("num_query_per_req", 1),
        ("num_steps", 1),
        ("max_model_len", 1),
        ("cp_size", 1),
        ("cp_interleave", 1),
    ):
        value = arguments[name]
        # A number that is not known yet is checked when the op runs.
        if isinstance(value, int) and not least <= value <= MAX_INT32:
            raise ValueError(f"{name} must be in [{least}, 2^31); got {value}")
    num_steps, from_anchor = arguments["num_steps"], arguments["sample_from_anchor"]
    wanted = num_steps if from_anchor else num_steps + 1
    if arguments["num_query_per_req"] != wanted:
        raise ValueError(
            f"num_query_per_req must be {wanted} for num_steps={num_steps} and "
            f"sample_from_anchor={from_anchor}; got {arguments['num_query_per_req']}"
        )
    cp_rank, cp_size = arguments["cp_rank"], arguments["cp_size"]
    block_size, interleave = arguments["block_size"], arguments["cp_interleave"]
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, cp_size) = [0, {cp_size}); got {cp_rank}")
    if block_size * cp_size > MAX_INT32 or interleave * cp_size > MAX_INT32:
        raise ValueError(
            "cp_size must keep block_size * cp_size and cp_interleave * cp_size below 2^31; got "
            f"{cp_size} with block_size={block_size} and cp_interleave={interleave}"
        )
    if cp_size > 1 and block_size % interleave != 0:
        raise ValueError(
            f"cp_interleave must divide block_size={block_size}, else a slot would lie outside its "
            f"block; got {interleave}"
        )


def check_spans(
    starts: list[int], rejected: list[int], num_targets: int, max_target_query_len: int
) -> None:
    """Raise for values of live rows that a GPU could not refuse without a synchronization."""
    for row, num_rejected in enumerate(rejected):
        first, end = starts[row], starts[row + 1]
        if not 0 <= first <= end <= num_targets:
            raise ValueError(
                "target_query_start_loc must rise from >= 0 to at most the shorter of "
                f"target_positions and context_positions, {num_targets}; got {first} to {end} in "
                f"row {row}"
            )
        if end - first > max_target_query_len:
            raise ValueError(
                f"max_target_query_len must be at least the longest span; got "
                f"{max_target_query_len} and a span of {end - first} in row {row}"
            )
        if not 0 <= num_rejected < end - first:
            raise ValueError(
                "num_rejected must leave a valid token in each live row, 0 <= num_rejected < span; "
                f"got {num_rejected} of {end - first} in row {row}"
            )
