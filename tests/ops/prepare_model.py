"""prepare_positions and prepare_dflash_inputs in numpy: loops over rows and tokens.

Written from the issue's text and not from dspark_ops. Each model writes into the arrays it is given
as the op writes into its tensors.
"""

from functools import cache
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def prepare_positions_model(x: Arrays, num_tokens: int | None = None) -> None:
    loc = [int(v) for v in x["query_start_loc"]]
    computed = [int(v) for v in x["num_computed_tokens"]]
    for b in range(len(x["seq_lens"])):
        x["seq_lens"][b] = 0
        if b >= len(x["idx_mapping"]):
            continue
        slot = int(x["idx_mapping"][b])
        if slot < 0 or slot >= len(computed):
            continue
        span = 0
        for t in range(loc[b], loc[b + 1]):
            if 0 <= t < len(x["positions"]):
                x["positions"][t] = computed[slot] + span
            span += 1
        x["seq_lens"][b] = computed[slot] + span
    if "is_padding" in x:
        for t in range(len(x["is_padding"])):
            x["is_padding"][t] = not t < (loc[-1] if num_tokens is None else num_tokens)


@cache
def held_before(offset: int, cp_rank: int, cp_size: int, cp_interleave: int) -> int | None:
    """How many of a block's positions before ``offset`` a rank holds; None if not ``offset``."""

    def is_held(o: int) -> bool:
        return (o // cp_interleave) % cp_size == cp_rank

    return sum(is_held(o) for o in range(offset)) if is_held(offset) else None


def slot_model(
    position: int,
    blocks: list[int],
    block_size: int,
    max_model_len: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
) -> int:
    if position < 0 or position >= max_model_len:
        return -1
    column, offset = divmod(position, block_size * cp_size)
    if column >= len(blocks) or blocks[column] <= 0:
        return -1
    held = held_before(offset, cp_rank, cp_size, cp_interleave)
    return -1 if held is None else blocks[column] * block_size + held


def prepare_dflash_inputs_model(
    x: Arrays,
    *,
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
    del max_target_query_len
    written: dict[str, list[Any]] = {"query_start_loc": [0]}
    padding = {"query_slot_mapping": -1, "context_slot_mapping": -1, "sample_idx_mapping": -1}
    loc = [int(v) for v in x["target_query_start_loc"]]
    context = dict.fromkeys(range(len(x["context_positions"])), (0, -1))

    def append(name: str, value: Any) -> None:
        written.setdefault(name, []).append(value)

    for b, slot in enumerate(int(v) for v in x["idx_mapping"]):
        if slot < 0 or slot >= len(x["temperature"]):
            break
        blocks = [int(v) for v in x["block_table"][b]]
        cache_of_row = (blocks, block_size, max_model_len, cp_rank, cp_size, cp_interleave)
        last = None
        for t in range(loc[b], loc[b + 1] - int(x["num_rejected"][b])):
            last = int(x["target_positions"][t])
            context[t] = (last, slot_model(last, *cache_of_row))
        assert last is not None
        for j in range(num_query_per_req):
            position = last + 1 + j
            if j > 0:
                append("input_ids", mask_token_id)
            elif x["num_sampled"][b] > 0:
                append("input_ids", x["last_sampled"][slot])
            else:
                append("input_ids", x["next_prefill_tokens"][slot])
            append("positions", min(position, max_model_len - 1))
            append("is_padding", False)
            append("query_slot_mapping", slot_model(position, *cache_of_row))
            if j > 0 or sample_from_anchor:
                append("sample_indices", len(written["input_ids"]) - 1)
                append("sample_pos", position + 1 if sample_from_anchor else position)
                append("sample_idx_mapping", slot)
        append("query_start_loc", len(written["input_ids"]))
        append("seq_lens", min(last + 1 + num_query_per_req, max_model_len))
        x["out_temperature"][slot] = x["temperature"][slot]
        x["out_seeds"][slot] = x["seeds"][slot]

    padding["query_start_loc"] = written["query_start_loc"][-1]
    written["context_positions"] = [position for position, _ in context.values()]
    written["context_slot_mapping"] = [cache_slot for _, cache_slot in context.values()]
    for name in (
        "input_ids",
        "positions",
        "is_padding",
        "query_slot_mapping",
        "query_start_loc",
        "seq_lens",
        "context_positions",
        "context_slot_mapping",
        "sample_indices",
        "sample_pos",
        "sample_idx_mapping",
    ):
        if name in x:
            values = written.get(name, [])
            padded = True if name == "is_padding" else padding.get(name, 0)
            x[name][:] = values + [padded] * (len(x[name]) - len(values))
