"""prepare_dflash_inputs: equal to the numpy model on every byte; each clause of its contract."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dspark_ops

from .conftest import Kernel, Reference, op_module
from .prepare_batches import (
    assert_equals_model,
    dflash_batch,
    dflash_batch_of,
    put_any_values,
    without_outputs,
)

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
OLD = -9
MASK = 99
OUTPUTS = (
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
    "out_temperature",
    "out_seeds",
)


def test_reference_equals_the_model() -> None:
    for seed in range(2000):
        batch = dflash_batch(seed)
        assert_equals_model(Reference.prepare_dflash_inputs, batch, "cpu", seed)


def test_kernel_equals_the_model() -> None:
    for seed in range(10_000, 10_500):
        batch = dflash_batch(seed)
        assert_equals_model(Kernel.prepare_dflash_inputs, batch, Kernel.device, seed)


def arguments(
    device: str,
    slots: list[int],
    spans: list[list[int]],
    rejected: list[int] | None = None,
    *,
    sampled: list[int] | None = None,
    num_steps: int = 2,
    sample_from_anchor: bool = False,
    buffer_rows: int | None = None,
    num_slots: int = 5,
    num_columns: int = 8,
    extra: int = 2,
    **scalars: Any,
) -> dict[str, Any]:
    """A batch whose row b has target tokens at the positions ``spans[b]`` and blocks 10 b + 1, ...

    Outputs are full of OLD, ``is_padding`` of True and False by turns, and ``extra`` entries longer
    than needed. Blocks of 4, max_model_len 100.
    """
    num_rows = len(slots)
    buffer_rows = num_rows if buffer_rows is None else buffer_rows
    num_queries = num_steps if sample_from_anchor else num_steps + 1
    targets = [position for span in spans for position in span]
    starts = np.cumsum([0] + [len(span) for span in spans]).tolist()

    def ints(values: list[int], dtype: torch.dtype = I32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def buffer(size: int, dtype: torch.dtype = I64) -> Tensor:
        return torch.full((size,), OLD, dtype=dtype, device=device)

    table = torch.arange(1, num_columns + 1) + 10 * torch.arange(num_rows)[:, None]
    num_tokens = buffer_rows * num_queries + extra
    given = {
        "idx_mapping": ints(slots),
        "target_query_start_loc": ints(starts),
        "target_positions": ints(targets, I64),
        "num_sampled": ints([1] * num_rows if sampled is None else sampled),
        "num_rejected": ints([0] * num_rows if rejected is None else rejected),
        "last_sampled": torch.arange(num_slots, device=device) + 50,
        "next_prefill_tokens": torch.arange(num_slots, device=device, dtype=I32) + 70,
        "temperature": torch.arange(num_slots, device=device) / 4,
        "seeds": torch.arange(num_slots, device=device) + 2**40,
        "block_table": table.to(I32).to(device),
        "input_ids": buffer(num_tokens, I32),
        "positions": buffer(num_tokens),
        "query_slot_mapping": buffer(num_tokens),
        "query_start_loc": buffer(buffer_rows + 1, I32),
        "seq_lens": buffer(buffer_rows, I32),
        "context_positions": buffer(len(targets) + extra),
        "context_slot_mapping": buffer(len(targets) + extra),
        "sample_indices": buffer(buffer_rows * num_steps),
        "sample_pos": buffer(buffer_rows * num_steps),
        "sample_idx_mapping": buffer(buffer_rows * num_steps),
        "out_temperature": buffer(num_slots, torch.float32),
        "out_seeds": buffer(num_slots),
        "is_padding": torch.arange(num_tokens, device=device) % 2 == 0,
        "max_target_query_len": max((len(span) for span in spans), default=0),
        "mask_token_id": MASK,
        "block_size": 4,
        "num_query_per_req": num_queries,
        "num_steps": num_steps,
        "max_model_len": 100,
        "sample_from_anchor": sample_from_anchor,
    }
    return {**given, **scalars}


def lists(given: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: given[name].tolist() for name in OUTPUTS if name in given}


def in_other_buffers(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}


def test_values(ops) -> None:
    """A decode whose last of three tokens was rejected, and a prefill of five tokens."""
    given = arguments(
        ops.device,
        [3, 1],
        [[20, 21, 22], [0, 1, 2, 3, 4]],
        [1, 0],
        sampled=[2, 0],
        buffer_rows=3,
        max_target_query_len=99,
    )
    assert ops.prepare_dflash_inputs(**given) is None
    assert lists(given) == {
        "input_ids": [53, MASK, MASK, 71, MASK, MASK] + [0] * 5,
        "positions": [22, 23, 24, 5, 6, 7] + [0] * 5,
        "is_padding": [False] * 6 + [True] * 5,
        # Row 0: position 22 is in column 5, block 6; row 1: position 5 in column 1, block 12.
        "query_slot_mapping": [26, 27, 28, 49, 50, 51] + [-1] * 5,
        "query_start_loc": [0, 3, 6, 6],
        "seq_lens": [25, 8, 0],
        "context_positions": [20, 21, 0, 0, 1, 2, 3, 4, 0, 0],
        "context_slot_mapping": [24, 25, -1, 44, 45, 46, 47, 48, -1, -1],
        "sample_indices": [1, 2, 4, 5, 0, 0],
        "sample_pos": [23, 24, 6, 7, 0, 0],
        "sample_idx_mapping": [3, 3, 1, 1, -1, -1],
        "out_temperature": [OLD, 0.25, OLD, 0.75, OLD],
        "out_seeds": [OLD, 2**40 + 1, OLD, 2**40 + 3, OLD],
    }


def test_values_sampling_from_the_anchor(ops) -> None:
    given = arguments(ops.device, [0], [[6]], sample_from_anchor=True, num_steps=3)
    ops.prepare_dflash_inputs(**given)
    wanted = {
        "input_ids": [50, MASK, MASK, 0, 0],
        "positions": [7, 8, 9, 0, 0],
        "query_start_loc": [0, 3],
        "seq_lens": [10],
        "sample_indices": [0, 1, 2],
        "sample_pos": [8, 9, 10],
        "sample_idx_mapping": [0, 0, 0],
    }
    assert {name: given[name].tolist() for name in wanted} == wanted


def test_without_is_padding(ops) -> None:
    given = arguments(ops.device, [0, 2], [[6], [7, 8]])
    wanted = in_other_buffers(given)
    ops.prepare_dflash_inputs(**wanted)
    del given["is_padding"], wanted["is_padding"]
    ops.prepare_dflash_inputs(**given)
    assert lists(given) == lists(wanted)


@pytest.mark.parametrize("dead", [-1, -7, 5, 2**31 - 1])
def test_b3_01_live_rows_are_a_prefix(ops, dead: int) -> None:
    """Behind the first row without a slot everything is padding, whatever its index says: a graph
    captured for four rows serves one as if it were alone."""
    given = arguments(ops.device, [2, dead, 2, 4], [[8], [1, 2], [3], [4]], [0, 0, 0, 0])
    ops.prepare_dflash_inputs(**given)
    alone = arguments(ops.device, [2], [[8]], buffer_rows=4, extra=2)
    for name in ("context_positions", "context_slot_mapping"):
        alone[name] = torch.full_like(given[name], OLD)
    ops.prepare_dflash_inputs(**alone)
    assert lists(given) == lists(alone)
    assert given["out_seeds"].tolist() == [OLD, OLD, 2**40 + 2, OLD, OLD]


def test_b3_04_lengths_of_padded_rows_are_0(ops) -> None:
    given = arguments(ops.device, [0, 1, -1, -1], [[9], [3, 4], [], []], buffer_rows=6)
    ops.prepare_dflash_inputs(**given)
    assert given["seq_lens"].tolist() == [13, 8, 0, 0, 0, 0]


def test_b3_05_offsets_have_one_layout(ops) -> None:
    """55 rows in buffers for 56 and then 3: an entry for each row, rising, the last repeated."""
    slots = [*range(55), -1]
    given = arguments(
        ops.device, slots, [[b] for b in range(55)] + [[]], num_steps=8, num_slots=56, extra=0
    )
    ops.prepare_dflash_inputs(**given)
    assert given["query_start_loc"].tolist() == [9 * b for b in range(56)] + [495]
    assert given["is_padding"].tolist() == [False] * 495 + [True] * 9
    given["idx_mapping"][3:] = -1
    ops.prepare_dflash_inputs(**given)
    assert given["query_start_loc"].tolist() == [0, 9, 18] + [27] * 54
    assert given["is_padding"].tolist() == [False] * 27 + [True] * 477


def test_b3_07_positions_end_at_max_model_len(ops) -> None:
    """max_model_len 32, last position 30, K = 4: queries at 31 to 35, one of which has a slot."""
    given = arguments(ops.device, [0], [[29, 30]], num_steps=4, max_model_len=32, num_columns=50)
    ops.prepare_dflash_inputs(**given)
    assert given["positions"].tolist() == [31] * 5 + [0, 0]
    assert given["query_slot_mapping"].tolist() == [8 * 4 + 3] + [-1] * 6
    assert given["is_padding"].tolist() == [False] * 5 + [True] * 2
    assert given["seq_lens"].tolist() == [32]
    # What is sampled keys the noise, so that it has a position of its own for each step.
    assert given["sample_pos"].tolist() == [32, 33, 34, 35]


def test_b3_07_slots_end_at_the_block_table(ops) -> None:
    """Two columns of 4: positions from 8 on have no slot, of queries and of context."""
    given = arguments(ops.device, [0, 1], [[5, 6, 7, 8], [30]], num_columns=2)
    ops.prepare_dflash_inputs(**given)
    assert given["query_slot_mapping"].tolist() == [-1] * 8
    assert given["context_slot_mapping"].tolist() == [9, 10, 11, -1, -1, -1, -1]
    assert given["context_positions"].tolist() == [5, 6, 7, 8, 30, 0, 0]
    given = arguments(ops.device, [0], [[0]], num_columns=0)
    ops.prepare_dflash_inputs(**given)
    assert given["context_slot_mapping"].tolist() == [-1] * 3


def test_the_null_block_has_no_slots(ops) -> None:
    given = arguments(ops.device, [0], [[2, 3, 4, 8]], num_columns=3)
    given["block_table"].copy_(torch.tensor([[7, 0, -1]]))
    ops.prepare_dflash_inputs(**given)
    assert given["context_slot_mapping"].tolist() == [30, 31, -1, -1, -1, -1]
    assert given["query_slot_mapping"].tolist() == [-1] * 5


def test_b3_08_too_small_a_buffer_is_refused() -> None:
    """max_reqs 8, K = 15, room for 64 tokens: all 8 requests ask 128 queries."""
    given = arguments("cpu", list(range(8)), [[b] for b in range(8)], num_steps=15, num_slots=8)
    for name in ("input_ids", "positions", "query_slot_mapping", "is_padding"):
        given[name] = given[name][:64]
    text = r"input_ids must have room for .*\[Tm\] = \[>= 8 \* 16\]; got \(64,\)"
    assert_refused(dspark_ops.prepare_dflash_inputs, given, ValueError, text)


def test_b3_17_stale_values_behind_the_live_row(ops) -> None:
    """Offsets, counts, ids, blocks and positions that a larger batch left are not looked at."""
    big = 2**31 - 1
    given = arguments(ops.device, [3, -1, 1, 2], [[4, 5], [6], [7], [8]], [1, 0, 0, 0])
    wanted = in_other_buffers(given)
    ops.prepare_dflash_inputs(**wanted)
    given["idx_mapping"][1:] = torch.tensor([big, -big, 2])
    given["target_query_start_loc"][2:] = torch.tensor([big, -big, 1])
    given["num_sampled"][1:] = -big
    given["num_rejected"][1:] = torch.tensor([big, -big, big])
    given["block_table"][1:] = big
    given["target_positions"][2:] = torch.tensor([2**62, -(2**62), -1])
    given["last_sampled"][:3] = 2**62
    ops.prepare_dflash_inputs(**given)
    assert lists(given) == lists(wanted)


def test_nothing_stale_survives_a_smaller_batch(ops) -> None:
    """The second call leaves what it would have written into fresh buffers."""
    given = arguments(ops.device, [0, 1, 2], [[3, 4, 5], [6], [7, 8]], buffer_rows=5)
    fresh = in_other_buffers(given)
    ops.prepare_dflash_inputs(**given)
    for case in (given, fresh):
        case["idx_mapping"].copy_(torch.tensor([4, -1, -1]))
        case["target_query_start_loc"].copy_(torch.tensor([0, 1, 1, 1]))
        case["out_temperature"].fill_(OLD)  # only slots of live rows are written
        case["out_seeds"].fill_(OLD)
        ops.prepare_dflash_inputs(**case)
    assert lists(given) == lists(fresh)
    assert given["context_positions"].tolist() == [3] + [0] * 7


def test_no_rows(ops) -> None:
    given = arguments(ops.device, [], [], buffer_rows=2)
    ops.prepare_dflash_inputs(**given)
    assert lists(given) == {
        "input_ids": [0] * 8,
        "positions": [0] * 8,
        "is_padding": [True] * 8,
        "query_slot_mapping": [-1] * 8,
        "query_start_loc": [0] * 3,
        "seq_lens": [0] * 2,
        "context_positions": [0] * 2,
        "context_slot_mapping": [-1] * 2,
        "sample_indices": [0] * 4,
        "sample_pos": [0] * 4,
        "sample_idx_mapping": [-1] * 4,
        "out_temperature": [OLD] * 5,
        "out_seeds": [OLD] * 5,
    }
    given = arguments(ops.device, [], [], buffer_rows=0, num_slots=0, extra=0)
    ops.prepare_dflash_inputs(**given)
    assert given["query_start_loc"].tolist() == [0]
    given = arguments(ops.device, [0, 1], [[1], [2]], num_slots=0)  # no slot at all
    ops.prepare_dflash_inputs(**given)
    assert given["seq_lens"].tolist() == [0, 0]


def test_context_that_does_not_start_at_0(ops) -> None:
    given = arguments(ops.device, [0, 1], [[1, 2], [3]], [0, 0])
    given["target_query_start_loc"].copy_(torch.tensor([1, 2, 3]))
    ops.prepare_dflash_inputs(**given)
    assert given["context_positions"].tolist() == [0, 2, 3, 0, 0]
    assert given["positions"].tolist()[:6] == [3, 4, 5, 4, 5, 6]


def test_values_beyond_int32(ops) -> None:
    """Positions far beyond the limit keep their 64 bits; a slot is 64 bits wide."""
    given = arguments(ops.device, [0, 1], [[2**40], [3]], max_model_len=2**31 - 1, num_columns=2)
    given["block_table"][1, 1] = 2**31 - 1
    ops.prepare_dflash_inputs(**given)
    assert given["positions"].tolist() == [2**31 - 2] * 3 + [4, 5, 6, 0, 0]
    assert given["context_positions"].tolist() == [2**40, 3, 0, 0]
    assert given["sample_pos"].tolist() == [2**40 + 2, 2**40 + 3, 5, 6]
    assert given["seq_lens"].tolist() == [2**31 - 1, 7]
    slots = [4 * (2**31 - 1) + i for i in range(3)]
    assert given["query_slot_mapping"].tolist() == [-1] * 3 + slots + [-1] * 2


@pytest.mark.parametrize(("cp_size", "interleave"), [(2, 1), (2, 4), (3, 2), (4, 8)])
def test_each_position_is_held_by_one_rank(ops, cp_size: int, interleave: int) -> None:
    """The ranks share the context's positions; what one holds fills its blocks from the start."""
    num_targets = 8 * cp_size * 3
    given = arguments(ops.device, [0], [list(range(num_targets))], block_size=8, num_columns=4)
    given.update(cp_size=cp_size, cp_interleave=interleave)
    held = []
    for rank in range(cp_size):
        ops.prepare_dflash_inputs(**given, cp_rank=rank)
        slots = given["context_slot_mapping"][:num_targets]
        held.append(slots >= 0)
        # Blocks 1, 2, 3 of 8 slots.
        assert slots[slots >= 0].tolist() == list(range(8, 32))
    assert torch.stack(held).sum(0).tolist() == [1] * num_targets
    first = torch.arange(num_targets) // interleave % cp_size
    assert torch.equal(torch.stack(held).int().argmax(0).cpu(), first)


# Sizes that no batch above has


def test_a_prefill_over_many_blocks(ops) -> None:
    """One row of 3000 tokens between decodes."""
    batch = dflash_batch_of([2, 0, 1, 3], [1, 3000, 1, 2], 1, extra=600)
    assert_equals_model(ops.prepare_dflash_inputs, batch, ops.device, 0)


def test_decodes_over_many_blocks(ops) -> None:
    """200 rows: 1600 queries, 1400 samples, of which the last block is padding in part."""
    slots = np.random.default_rng(1).permutation(200).tolist()
    batch = dflash_batch_of(slots[:190] + [-1] * 10, [1 + b % 2 for b in range(200)], 7, extra=600)
    assert_equals_model(ops.prepare_dflash_inputs, batch, ops.device, 0)


@pytest.mark.parametrize("dead", [None, 3, 511, 512, 1023, 1050])
def test_more_rows_than_are_looked_through_at_once(ops, dead: int | None) -> None:
    """1100 rows, spans of 1 to 3: searches over every step, the first dead row in each part."""
    assert op_module("prepare_dflash_inputs").BLOCK_B == 512
    slots = np.random.default_rng(0).permutation(1100).tolist()
    if dead is not None:
        slots[dead] = -1
    batch = dflash_batch_of(slots, [1 + b % 3 for b in range(1100)], 1, extra=5)
    assert_equals_model(ops.prepare_dflash_inputs, batch, ops.device, 0)


# Preconditions: values that cannot be refused without a synchronization

BROKEN = {
    "all_rejected": ("num_rejected", [0, 2], r"num_rejected must .*got 2 of 2 in row 1"),
    "more_rejected": ("num_rejected", [9, 0], r"num_rejected must .*got 9 of 1 in row 0"),
    "less_than_none": ("num_rejected", [0, -1], r"num_rejected must .*got -1 of 2 in row 1"),
    "no_span": ("target_query_start_loc", [0, 1, 1], r"num_rejected must .*got 0 of 0 in row 1"),
    "falling": ("target_query_start_loc", [0, 3, 2], r"rise .*, 3; got 3 to 2 in row 1"),
    "below_0": ("target_query_start_loc", [-1, 1, 2], r"rise .*, 3; got -1 to 1 in row 0"),
    "beyond": ("target_query_start_loc", [0, 1, 4], r"rise .*, 3; got 1 to 4 in row 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_reference_refuses_broken_spans(case: str) -> None:
    name, values, text = BROKEN[case]
    given = arguments("cpu", [0, 1], [[3], [4, 5]])
    given[name] = torch.tensor(values, dtype=I32)
    given["max_target_query_len"] = 5
    assert_refused(dspark_ops.prepare_dflash_inputs, given, ValueError, text)
    # Rows without a slot keep no precondition.
    given["idx_mapping"].fill_(-1)
    dspark_ops.prepare_dflash_inputs(**given)
    assert given["seq_lens"].tolist() == [0, 0]


def test_reference_refuses_a_longer_span_than_was_said() -> None:
    given = arguments("cpu", [0, 1], [[3], [4, 5]], max_target_query_len=1)
    text = "max_target_query_len must be at least .*; got 1 and a span of 2 in row 1"
    assert_refused(dspark_ops.prepare_dflash_inputs, given, ValueError, text)
    Kernel.prepare_dflash_inputs(
        **arguments(Kernel.device, [0, 1], [[3], [4, 5]], max_target_query_len=1)
    )


@pytest.mark.parametrize("case", BROKEN)
def test_kernel_stays_within_bounds_for_broken_spans(case: str) -> None:
    """Whatever the broken row gets, what does not depend on its values is right."""
    name, values, _ = BROKEN[case]
    given = arguments(Kernel.device, [0, 1], [[3], [4, 5]])
    wanted = in_other_buffers(given)
    Kernel.prepare_dflash_inputs(**wanted)
    given[name] = torch.tensor(values, dtype=I32, device=Kernel.device)
    Kernel.prepare_dflash_inputs(**given)
    for output in ("input_ids", "is_padding", "query_start_loc", "sample_indices", "out_seeds"):
        assert torch.equal(given[output], wanted[output]), output


def test_kernel_has_no_context_beyond_the_target_positions() -> None:
    given = arguments(Kernel.device, [0, 1], [[3], [4, 5]])
    given["target_query_start_loc"][2] = 5
    Kernel.prepare_dflash_inputs(**given)
    assert given["context_positions"].tolist() == [3, 4, 5, 0, 0]
    assert given["context_slot_mapping"].tolist() == [7, 48, 49, -1, -1]


def test_kernel_stays_within_bounds_for_any_values() -> None:
    """Integers of any size in every input: nothing beside the outputs is written."""
    for seed in range(100):
        batch = dflash_batch(seed)
        put_any_values(batch, seed)
        before = batch.memory()
        memory = torch.from_numpy(before.copy()).to(Kernel.device)
        batch.run(Kernel.prepare_dflash_inputs, memory)
        after = memory.cpu().numpy()
        assert np.array_equal(without_outputs(batch, after), without_outputs(batch, before))


# Compiled


def step(given: dict[str, Any], **scalars: Any) -> None:
    """The op between other mutations of its buffers."""
    given["positions"].add_(1)
    dspark_ops.prepare_dflash_inputs(**{**given, **scalars})
    given["seq_lens"].add_(1)


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_the_same(dynamic: bool, has_padding: bool) -> None:
    """With and without the optional mutated tensor (B4-13), through Inductor."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for slots, spans in (([1, 0], [[3], [4, 5]]), ([2, 1, -1], [[1, 2, 3], [7], [9]])):
        given = arguments("cpu", slots, spans, buffer_rows=4)
        if not has_padding:
            del given["is_padding"]
        wanted = in_other_buffers(given)
        step(wanted)
        compiled(given)
        assert lists(given) == lists(wanted)


def test_max_target_query_len_compiles_once() -> None:
    """It varies from step to step, so that the graph must not depend on its value."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    given = arguments("cpu", [1, 0], [[3], [4, 5]])
    for longest in (2, 3, 16, 1000):
        compiled(given, max_target_query_len=longest)
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match=r"max_target_query_len must be at least .*; got 1"):
        compiled({**given, "max_target_query_len": 1})


def test_b4_02_outputs_in_one_buffer() -> None:
    """Mutated arguments that are views of one tensor: compiled equals eager, or is refused."""
    torch._dynamo.reset()
    given = arguments("cpu", [1, 0], [[3], [4, 5]])
    sizes = {name: given[name].numel() * given[name].element_size() for name in OUTPUTS}

    def views(buffer: Tensor) -> None:
        outputs, start = {}, 0
        for name, size in sizes.items():
            outputs[name] = buffer[start : start + size].view(given[name].dtype)
            start += -(-size // 8) * 8
        dspark_ops.prepare_dflash_inputs(**{**given, **outputs})

    buffers = [torch.zeros(sum(sizes.values()) + 8 * len(sizes), dtype=torch.uint8)] * 2
    buffers = [buffer.clone() for buffer in buffers]
    views(buffers[0])
    try:
        torch.compile(views, fullgraph=True, backend="aot_eager")(buffers[1])
    except RuntimeError:
        return
    assert torch.equal(*buffers)


# Refused


def zeros(*shape: int, dtype: torch.dtype = I32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, Any]:
    return arguments("cpu", [0, 1], [[3], [4, 5]], buffer_rows=3)


# argument: dtype, letters and size; each is given another dtype, rank, size, device and stride.
VECTORS = {
    "idx_mapping": (I32, r"\[B\]", None),
    "target_query_start_loc": (I32, r"\[B \+ 1\] = \[3\]", 3),
    "target_positions": (I64, r"\[T\]", None),
    "num_sampled": (I32, r"\[B\] = \[2\]", 2),
    "num_rejected": (I32, r"\[B\] = \[2\]", 2),
    "last_sampled": (I64, r"\[S\] = \[5\]", 5),
    "next_prefill_tokens": (I32, r"\[S\] = \[5\]", 5),
    "temperature": (torch.float32, r"\[S\]", None),
    "seeds": (I64, r"\[S\] = \[5\]", 5),
    "input_ids": (I32, r"\[Tm\]", None),
    "positions": (I64, r"\[Tm\] = \[11\]", 11),
    "is_padding": (BOOL, r"\[Tm\] = \[11\]", 11),
    "query_slot_mapping": (I64, r"\[Tm\] = \[11\]", 11),
    "query_start_loc": (I32, r"\[Bm \+ 1\] = \[4\]", 4),
    "seq_lens": (I32, r"\[Bm\]", None),
    "context_positions": (I64, r"\[Tc\]", None),
    "context_slot_mapping": (I64, r"\[Tc\] = \[5\]", 5),
    "sample_indices": (I64, r"\[Bm \* N\] = \[6\]", 6),
    "sample_pos": (I64, r"\[Bm \* N\] = \[6\]", 6),
    "sample_idx_mapping": (I64, r"\[Bm \* N\] = \[6\]", 6),
    "out_temperature": (torch.float32, r"\[S\] = \[5\]", 5),
    "out_seeds": (I64, r"\[S\] = \[5\]", 5),
}
MAY_BE_STRIDED = ("idx_mapping", "num_sampled", "num_rejected")


def refused_vectors() -> list[Any]:
    cases: list[Any] = []
    for name, (dtype, letters, size) in VECTORS.items():
        like = good()[name]
        n = like.shape[0]
        wrong = torch.float64 if dtype == torch.float32 else torch.float32
        cases += [
            (name, like.tolist(), TypeError, "be a Tensor, got list: "),
            (name, like.to(wrong), TypeError, f"have dtype .*; got {wrong}"),
            (name, like[None], ValueError, rf"have shape {letters}; got \(1, {n}\)"),
            (name, like[0], ValueError, rf"have shape {letters}; got \(\)"),
        ]
        where = "input_ids" if name != "input_ids" else None
        if where is not None:
            text = "be on cpu, where input_ids is; got meta"
            cases.append((name, like.to("meta"), ValueError, text))
        if size is not None:
            longer = zeros(n + 1, dtype=dtype)
            cases.append((name, longer, ValueError, rf"have shape {letters}; got \({n + 1},\)"))
        if name not in MAY_BE_STRIDED:
            spread = torch.stack([like, like], 1)[:, 0]
            cases.append((name, spread, ValueError, r"be contiguous .* strides \(2,\)"))
    return cases


REFUSED = [
    *refused_vectors(),
    ("block_table", None, TypeError, "be a Tensor, got NoneType: None"),
    ("block_table", zeros(2, 8, dtype=I64), TypeError, "have dtype int32; got torch.int64"),
    ("block_table", zeros(16), ValueError, r"have shape \[B, n\] = \[2, n\]; got \(16,\)"),
    ("block_table", zeros(3, 8), ValueError, r"have shape \[B, n\] = \[2, n\]; got \(3, 8\)"),
    ("block_table", zeros(2, 8).to("meta"), ValueError, "be on cpu.*; got meta"),
    ("max_target_query_len", -1, ValueError, r"be in \[0, 2\^31\); got -1"),
    ("max_target_query_len", 1.0, TypeError, "be an int, got float: 1.0"),
    ("mask_token_id", -1, ValueError, r"be in \[0, 2\^31\); got -1"),
    ("mask_token_id", 2**31, ValueError, r"be in \[0, 2\^31\); got 2147483648"),
    ("mask_token_id", None, TypeError, "be an int, got NoneType: None"),
    ("block_size", 0, ValueError, r"be in \[1, 2\^31\); got 0"),
    ("block_size", True, TypeError, "be an int, got bool: True"),
    ("num_query_per_req", 0, ValueError, r"be in \[1, 2\^31\); got 0"),
    (
        "num_query_per_req",
        2,
        ValueError,
        "be 3 for num_steps=2 and sample_from_anchor=False; got 2",
    ),
    (
        "num_query_per_req",
        4,
        ValueError,
        "be 3 for num_steps=2 and sample_from_anchor=False; got 4",
    ),
    ("num_steps", 0, ValueError, r"be in \[1, 2\^31\); got 0"),
    ("max_model_len", 0, ValueError, r"be in \[1, 2\^31\); got 0"),
    ("max_model_len", 2**31, ValueError, r"be in \[1, 2\^31\); got 2147483648"),
    ("sample_from_anchor", 1, TypeError, "be True or False, got int: 1"),
    (
        "sample_from_anchor",
        np.False_,
        TypeError,
        "be True or False, got (bool|ndarray).*; pass bool",
    ),
    ("cp_rank", 1, ValueError, r"be in \[0, cp_size\) = \[0, 1\); got 1"),
    ("cp_rank", -1, ValueError, r"be in \[0, cp_size\) = \[0, 1\); got -1"),
    ("cp_size", 0, ValueError, r"be in \[1, 2\^31\); got 0"),
    (
        "cp_size",
        2**30,
        ValueError,
        "keep block_size .* below 2.31; got 1073741824 with block_size=4",
    ),
    ("cp_interleave", 0, ValueError, r"be in \[1, 2\^31\); got 0"),
]


def assert_refused(call: Callable[..., None], given: dict[str, Any], error: Any, text: str) -> None:
    kept = {k: v for k, v in given.items() if isinstance(v, Tensor) and not v.is_meta}
    before = {k: v.clone() for k, v in kept.items()}
    with pytest.raises(error, match=text):
        call(**given)
    for name, x in kept.items():
        assert torch.equal(x, before[name])


@pytest.mark.parametrize(("name", "value", "error", "text"), REFUSED)
def test_refused(name: str, value: Any, error: type[Exception], text: str) -> None:
    given = {**good(), name: value}
    assert_refused(dspark_ops.prepare_dflash_inputs, given, error, f"{name} must {text}")
    if "got list" not in text and not (error is TypeError and not isinstance(value, Tensor)):
        assert_refused(Kernel.prepare_dflash_inputs, given, error, f"{name} must {text}")


@pytest.mark.parametrize(("name", "value", "error", "text"), REFUSED[::3])
def test_refused_when_compiled(name: str, value: Any, error: type[Exception], text: str) -> None:
    """The same text inside whatever exception the compiler wraps it in."""
    torch._dynamo.reset()
    compiled = torch.compile(dspark_ops.prepare_dflash_inputs, fullgraph=True, backend="eager")
    assert_refused(compiled, {**good(), name: value}, Exception, f"(?s){name} must {text}")


def test_numpy_ints_are_numbers() -> None:
    given, wanted = good(), good()
    numbers = {k: np.int64(v) for k, v in given.items() if type(v) is int}
    assert "num_steps" in numbers
    dspark_ops.prepare_dflash_inputs(**{**given, **numbers})
    dspark_ops.prepare_dflash_inputs(**wanted)
    for name in VECTORS:
        assert torch.equal(given[name], wanted[name])


def test_more_rows_than_the_buffers_have_are_refused() -> None:
    given = good()
    given.update(seq_lens=zeros(1), query_start_loc=zeros(2))
    for name in ("sample_indices", "sample_pos", "sample_idx_mapping"):
        given[name] = zeros(2, dtype=I64)
    text = r"seq_lens must have an entry for each row .*>= 2\]; got \(1,\)"
    assert_refused(dspark_ops.prepare_dflash_inputs, given, ValueError, text)


def test_an_interleave_that_does_not_divide_the_block_is_refused() -> None:
    text = "cp_interleave must divide block_size=4, .*; got 3"
    given = {**good(), "cp_size": 2, "cp_interleave": 3}
    assert_refused(dspark_ops.prepare_dflash_inputs, given, ValueError, text)
    given = {**good(), "cp_size": 1, "cp_interleave": 3}  # one rank: any run gives the same slots
    plain = good()
    dspark_ops.prepare_dflash_inputs(**given)
    dspark_ops.prepare_dflash_inputs(**plain)
    assert lists(given) == lists(plain)


def test_more_entries_than_offsets_are_refused() -> None:
    given = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in good().items()}
    for name in ("context_positions", "context_slot_mapping"):
        given[name] = torch.empty(2**30 + 1, dtype=I64, device="meta")
    with pytest.raises(ValueError, match=r"context_positions must have at most .*got 1073741825"):
        dspark_ops.prepare_dflash_inputs(**given)
