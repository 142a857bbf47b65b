"""prepare_positions and prepare_dflash_inputs on a GPU: the model's bytes, launches, capture."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dspark_ops

from ..ops.prepare_batches import (
    Batch,
    dflash_batch,
    dflash_batch_of,
    positions_batch,
    positions_batch_of,
    put_any_values,
    without_outputs,
)
from .compilations import compilations
from .test_capture import capture
from .test_launch import misaligned

I32, I64 = torch.int32, torch.int64


def compiled_dflash_batch(seed: int) -> Batch:
    """In one of 24 forms: a second of compilation each."""
    return dflash_batch(seed, num_forms=24)


OPS = {
    "prepare_positions": (dspark_ops.prepare_positions, positions_batch),
    "prepare_dflash_inputs": (dspark_ops.prepare_dflash_inputs, compiled_dflash_batch),
}


def run_all(batches: list[Batch], op: Callable[..., None]) -> list[np.ndarray]:
    """The memory that each batch leaves; one copy to the GPU and one back for all of them."""
    memories = [batch.memory() for batch in batches]
    ends = np.cumsum([0, *(len(memory) for memory in memories)])
    on_gpu = torch.from_numpy(np.concatenate(memories)).cuda()
    for batch, start, end in zip(batches, ends, ends[1:], strict=False):
        batch.run(op, on_gpu[start:end])
    return np.split(on_gpu.cpu().numpy(), ends[1:-1])


@pytest.mark.parametrize("name", OPS)
def test_equals_the_model(name: str) -> None:
    """Every byte of every output of 2000 random batches, of what lies around, and of the inputs."""
    op, make = OPS[name]
    batches = [make(seed) for seed in range(2000)]
    for seed, (batch, actual) in enumerate(zip(batches, run_all(batches, op), strict=True)):
        expected = batch.expected()
        if not np.array_equal(actual, expected):
            raise AssertionError(f"batch {seed}: {batch.differing(actual, expected)} wrong")


def test_any_values_stay_within_bounds() -> None:
    """Integers of any size in every input: nothing but outputs is written, nothing faults."""
    batches = [compiled_dflash_batch(seed) for seed in range(500)]
    for seed, batch in enumerate(batches):
        put_any_values(batch, seed)
    for batch, actual in zip(
        batches, run_all(batches, dspark_ops.prepare_dflash_inputs), strict=True
    ):
        kept = without_outputs(batch, batch.memory())
        assert np.array_equal(without_outputs(batch, actual), kept)


def assert_equals(batch: Batch, memory: Tensor, expected: np.ndarray) -> None:
    actual = memory.cpu().numpy()
    assert np.array_equal(actual, expected), batch.differing(actual, expected)


# Capture

ROWS = 8
BATCHES = (5, 8, 2, 1, 7, 0)  # a bigger one, a smaller one, one request, a bigger one again, none


def positions_of(rows: int, seed: int) -> Batch:
    """``rows`` live ones of ROWS; prefills and decodes by turns, at most 800 tokens."""
    spans = [1 + (seed + b) % 2 * 99 if b < rows else 0 for b in range(ROWS)]
    return positions_batch_of(live_slots(rows, seed), spans, 100 * ROWS + 5, seed=seed)


def dflash_of(rows: int, seed: int) -> Batch:
    spans = [1 + (seed + b) % 2 * 99 if b < rows else 0 for b in range(ROWS)]
    kwargs: dict[str, Any] = {"num_targets": 100 * ROWS, "extra": 600, "seed": seed}
    return dflash_batch_of(live_slots(rows, seed), spans, 3, **kwargs)


def live_slots(rows: int, seed: int) -> list[int]:
    slots = np.random.default_rng(seed).permutation(ROWS).tolist()
    return slots[:rows] + [-1] * (ROWS - rows)


CAPTURED = {
    "prepare_positions": (dspark_ops.prepare_positions, positions_of),
    "prepare_dflash_inputs": (dspark_ops.prepare_dflash_inputs, dflash_of),
}


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_replay_follows_its_inputs(name: str, poisoned: bool) -> None:
    """Into poisoned buffers, and into what the replay before left: nothing stale survives."""
    op, make = CAPTURED[name]
    first = make(3, 99)
    memory = torch.from_numpy(first.memory()).cuda()
    graph, _ = capture(lambda: first.run(op, memory))
    for seed, rows in enumerate(BATCHES):
        batch = make(rows, seed)
        assert batch.places == first.places
        assert batch.scalars.keys() == first.scalars.keys()
        batch.scalars = first.scalars
        before = batch.memory()
        if not poisoned:
            left = memory.cpu().numpy()
            for place, array in batch.views(left).items():
                if place in batch.inputs:
                    array[...] = batch.views(before)[place]
            before = left
        memory.copy_(torch.from_numpy(before))
        graph.replay()
        expected = before.copy()
        batch.model(batch.views(expected), **batch.scalars)
        assert_equals(batch, memory, expected)


def test_a_captured_num_tokens_stays() -> None:
    """The number is the host's: a replay keeps it, whatever the batch."""
    batch = positions_of(4, 1)
    batch.scalars["num_tokens"] = 17
    memory = torch.from_numpy(batch.memory()).cuda()
    graph, _ = capture(lambda: batch.run(dspark_ops.prepare_positions, memory))
    batch.views(memory)["query_start_loc"].zero_()
    batch.views(memory)["is_padding"].fill_(True)
    graph.replay()
    padding = batch.views(memory)["is_padding"].tolist()
    assert padding == [t >= 17 for t in range(len(padding))]


# Launches


def sliced(batch: Batch, skip: int) -> dict[str, Any]:
    """Each argument alone in a buffer that starts ``skip`` elements before it."""
    views = batch.views(torch.from_numpy(batch.memory()).cuda())
    return {name: misaligned(x, skip) for name, x in views.items()}


@pytest.mark.parametrize("name", OPS)
def test_serving_shapes_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6-01, B6-02: after one warm-up no batch size, buffer size, boundary, stride or address
    compiles; the hook is seen to fire before and after."""
    module = importlib.import_module(f"dspark_ops.{name}")
    kernel = getattr(module, f"_{name}_kernel")
    kernel.device_caches.clear()

    def call(rows: int, skip: int = 0, **scalars: Any) -> None:
        monkeypatch.setattr(module, "_variants", {})  # each call asks Triton
        spans = [1 + rows * b % 5 for b in range(rows)]
        if name == "prepare_positions":
            batch = positions_batch_of(list(range(rows)), spans, sum(spans) + rows, seed=rows)
        else:
            batch = dflash_batch_of(list(range(rows)), spans, 7, extra=16 * rows, seed=rows)
        given = sliced(batch, skip)
        if skip:  # columns of a wider buffer
            given["idx_mapping"] = torch.stack([given["idx_mapping"]] * skip, 1)[:, -1]
        OPS[name][0](**given, **{**batch.scalars, **scalars})

    with compilations() as seen:
        call(2)
    assert len(seen) == 1
    assert f"_{name}_kernel[" in seen[0]
    with compilations() as seen:
        for rows in [*range(1, 34), 48, 64, 100, 128, 256]:
            call(rows)
            call(rows, skip=1 + rows % 3)
        if name == "prepare_positions":
            for num_tokens in (0, 1, 2, 16, 17, 2**40):
                call(5, num_tokens=num_tokens)
        else:
            for number in (1, 16, 17, 1024):
                call(5, max_target_query_len=number, mask_token_id=number, max_model_len=number)
    assert seen == []
    monkeypatch.setattr(module, "NUM_WARPS", 2)
    with compilations() as seen:
        call(2)
    assert len(seen) == 1


@pytest.mark.parametrize("name", OPS)
def test_one_launch_and_no_memory(name: str) -> None:
    op, make = CAPTURED[name]
    batch = make(5, 0)
    memory = torch.from_numpy(batch.memory()).cuda()
    batch.run(op, memory)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch.run(op, memory)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1, names
    assert f"_{name}_kernel" in names[0]
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("name", OPS)
def test_nothing_synchronizes(name: str) -> None:
    op, make = CAPTURED[name]
    batch = make(5, 0)
    memory = torch.from_numpy(batch.memory()).cuda()
    batch.run(op, memory)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.run(op, memory)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equals(batch, memory, batch.expected())


@pytest.mark.parametrize("name", OPS)
def test_launches_on_the_current_stream(name: str) -> None:
    """Inputs that become ready late on a side stream are waited for there."""
    op, make = CAPTURED[name]
    batch = make(6, 0)
    late = torch.from_numpy(batch.memory()).cuda()
    memory = torch.zeros_like(late)
    batch.run(op, memory)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        memory.copy_(late)
        batch.run(op, memory)
    stream.synchronize()
    assert_equals(batch, memory, batch.expected())


@pytest.mark.parametrize("name", OPS)
def test_back_to_back_calls_do_not_overtake_each_other(name: str) -> None:
    """A launch overlaps the end of the one before, whose outputs it writes again."""
    op, make = CAPTURED[name]
    batches = [make(rows, seed) for seed, rows in enumerate((8, 1, 8, 3))]
    memories = [torch.from_numpy(batch.memory()).cuda() for batch in batches]
    views = [batch.views(memory) for batch, memory in zip(batches, memories, strict=True)]
    outputs = {k: v for k, v in views[-1].items() if k not in batches[-1].inputs}
    for batch, view in zip(batches, views, strict=True):
        for _ in range(20):
            op(**{**view, **outputs}, **batch.scalars)
    wanted = batches[-1].views(batches[-1].expected())
    for output in ("seq_lens", "is_padding"):
        assert outputs[output].tolist() == wanted[output].tolist()


def test_arguments_on_another_device_than_the_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for op, make in CAPTURED.values():
        batch = make(5, 0)
        memory = torch.from_numpy(batch.memory()).to("cuda:1")
        batch.run(op, memory)
        assert_equals(batch, memory, batch.expected())


def test_bad_metadata_on_a_gpu_writes_nothing() -> None:
    for name, (op, make) in CAPTURED.items():
        batch = make(5, 0)
        memory = torch.from_numpy(batch.memory()).cuda()
        before = memory.clone()
        where = "positions" if name == "prepare_positions" else "input_ids"
        for argument, x in batch.views(memory).items():
            if argument == where:
                continue
            given = {**batch.views(memory), **batch.scalars, argument: x.cpu()}
            with pytest.raises(ValueError, match=f"{argument} must be on cuda:0, where {where} is"):
                op(**given)
        given = {**batch.views(memory), **batch.scalars}
        given["query_start_loc"] = given["query_start_loc"][:-1]
        with pytest.raises(ValueError, match="query_start_loc must have shape"):
            op(**given)
        assert torch.equal(memory, before)


@pytest.mark.parametrize("name", OPS)
def test_compiled_equals_eager(name: str) -> None:
    """Through Inductor, with the mutations in the caller's buffers."""
    torch._dynamo.reset()
    op, make = CAPTURED[name]
    compiled = torch.compile(lambda given: op(**given), fullgraph=True)
    for rows in (5, 8, 1):
        batch = make(rows, rows)
        views = batch.views(torch.from_numpy(batch.memory()).cuda())
        given = {k: v.clone() for k, v in views.items()}
        compiled({**given, **batch.scalars})
        wanted = batch.views(batch.expected())
        for argument, x in given.items():
            assert np.array_equal(x.cpu().numpy(), wanted[argument]), argument


# Sizes


def test_b6_07_70000_rows() -> None:
    """More rows than axis 1 of a grid has, and than a program looks through at once."""
    rows = 70_000
    slots = np.random.default_rng(0).permutation(rows).tolist()
    slots[69_000] = -1
    spans = [1 + b % 3 for b in range(rows)]
    batch = positions_batch_of(slots, spans, sum(spans) + 5)
    memory = torch.from_numpy(batch.memory()).cuda()
    batch.run(dspark_ops.prepare_positions, memory)
    assert_equals(batch, memory, batch.expected())
    batch = dflash_batch_of(slots, spans, 1, extra=5, num_columns=3)
    memory = torch.from_numpy(batch.memory()).cuda()
    batch.run(dspark_ops.prepare_dflash_inputs, memory)
    assert_equals(batch, memory, batch.expected())


def test_b6_04_block_table_beyond_2_31_elements() -> None:
    """Rows 2^30 entries apart: row 2 starts at entry 2^31. 8.6 GB."""
    batch = dflash_batch_of([0, 1, 2], [5, 1, 40], 3, seed=4)
    memory = torch.from_numpy(batch.memory()).cuda()
    views = batch.views(memory)
    table = views["block_table"]
    storage = torch.full((2**31 + 4096,), -1, dtype=I32, device="cuda")
    far = storage.as_strided(table.shape, (2**30, 1))
    far.copy_(table)
    dspark_ops.prepare_dflash_inputs(**{**views, "block_table": far}, **batch.scalars)
    assert_equals(batch, memory, batch.expected())
    assert (views["query_slot_mapping"] >= 0).any()


def test_positions_beyond_2_31_elements() -> None:
    """Entries 2^28 apart in a buffer of 2^31 + 8: an index times a stride needs 64 bits. 17 GB."""
    storage = torch.full((2**31 + 8,), -9, dtype=I64, device="cuda")
    positions = storage[:: 2**28]
    assert positions.shape == (9,)
    dspark_ops.prepare_positions(
        torch.tensor([0], device="cuda"),
        torch.tensor([0, 9], dtype=I32, device="cuda"),
        torch.tensor([40], dtype=I32, device="cuda"),
        positions,
        torch.zeros(1, dtype=I32, device="cuda"),
    )
    assert positions.tolist() == list(range(40, 49))
    positions.fill_(-9)
    assert bool((storage == -9).all())
