"""Random batches for prepare_positions and prepare_dflash_inputs, each in one piece of memory.

All arguments of a batch are views of its memory, with a few poisoned bytes around each, so that one
comparison of the memory sees every byte of every output, what lies beside the outputs, and the
inputs. Addresses are multiples of the element size and of nothing more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .prepare_model import prepare_dflash_inputs_model, prepare_positions_model

POISON = 0xA5
INDEX_DTYPES = ("int32", "int64", "int16", "int8", "uint8")


@dataclass
class Place:
    dtype: str
    start: int  # in elements of the memory seen as dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Batch:
    model: Callable[..., None]
    places: dict[str, Place] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    size: int = 0

    def add(
        self,
        name: str,
        dtype: str,
        shape: int | tuple[int, ...],
        values: Any = None,
        strides: int | tuple[int, ...] = 1,
        guard: int = 2,
    ) -> None:
        """A tensor behind ``guard`` elements, an input if it has ``values``."""
        shape = shape if isinstance(shape, tuple) else (shape,)
        strides = strides if isinstance(strides, tuple) else (strides,)
        item = np.dtype(dtype).itemsize
        start = -(-self.size // item) + guard
        extent = shape[0] * strides[0]
        self.places[name] = Place(dtype, start, shape, strides)
        self.size = (start + extent) * item
        if values is not None:
            self.inputs[name] = values

    def views(self, memory: Any) -> dict[str, Any]:
        """The tensors (arrays) of a batch whose memory is a tensor (an array) of bytes."""
        views = {}
        for name, place in self.places.items():
            is_tensor = isinstance(memory, torch.Tensor)
            typed = memory.view(getattr(torch if is_tensor else np, place.dtype))
            flat = typed[place.start : place.start + place.shape[0] * place.strides[0]]
            if len(place.shape) == 1:
                views[name] = flat[:: place.strides[0]]
            else:
                rows = flat.reshape(place.shape[0], place.strides[0])
                views[name] = rows[:, :: place.strides[1]][:, : place.shape[1]]
        return views

    def memory(self) -> np.ndarray:
        """Poison, and the inputs in it."""
        memory = np.full(-(-self.size // 16) * 16 + 16, POISON, np.uint8)
        views = self.views(memory)
        for name, values in self.inputs.items():
            views[name][...] = np.asarray(values).reshape(views[name].shape)
        return memory

    def expected(self) -> np.ndarray:
        memory = self.memory()
        self.model(self.views(memory), **self.scalars)
        return memory

    def run(self, op: Callable[..., None], memory: torch.Tensor) -> None:
        op(**self.views(memory), **self.scalars)

    def differing(self, actual: np.ndarray, expected: np.ndarray) -> list[str]:
        """Names of the arguments that differ, 'around' if it is what lies between them."""
        views = self.views(actual), self.views(expected)
        names = [n for n in self.places if not np.array_equal(views[0][n], views[1][n])]
        return names or ["around"]


def assert_equals_model(op: Callable[..., None], batch: Batch, device: str, seed: int) -> None:
    expected = batch.expected()
    memory = torch.from_numpy(batch.memory()).to(device)
    batch.run(op, memory)
    actual = memory.cpu().numpy()
    if not np.array_equal(actual, expected):
        raise AssertionError(f"batch {seed}: {batch.differing(actual, expected)} wrong")


class Dice:
    """Python numbers from a numpy generator."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def int(self, low: int, high: int) -> int:
        """In [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def ints(self, low: int, high: int, size: int) -> list[int]:
        return [int(v) for v in self.rng.integers(low, high + 1, size)]

    def one_of(self, *values: Any) -> Any:
        return values[self.int(0, len(values) - 1)]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def spans(self, size: int, least: int) -> list[int]:
        """Decodes, prefills or both; few prefills are longer than a block of the kernels."""
        prefill = self.one_of(0.0, 0.3, 1.0)
        longest = 1300 if self.chance(0.06) else 40
        return [
            self.int(least, longest) if self.chance(prefill) else self.int(least, 4)
            for _ in range(size)
        ]

    def slots(self, size: int, num_slots: int) -> list[int]:
        """Slots in any order."""
        return [int(v) for v in self.rng.permutation(num_slots)[:size]]

    def no_slot(self, num_slots: int, dtype: str) -> int:
        info = np.iinfo(dtype)
        values = (-1, -1, -7, num_slots, num_slots + 3, info.min, info.max)
        fitting = [v for v in values if info.min <= v <= info.max and not 0 <= v < num_slots]
        return self.one_of(*fitting)


def positions_batch(seed: int) -> Batch:
    """Any metadata that is allowed, any values: spans that end outside, before they start, ..."""
    dice = Dice(seed)
    batch = Batch(prepare_positions_model)
    num_rows = dice.one_of(0, 1, 1, 2, 3, dice.int(4, 12))
    num_slots = num_rows + dice.int(0, 4)
    dtype = dice.one_of(*INDEX_DTYPES)
    slots = dice.slots(num_rows, num_slots)
    for row in range(num_rows):
        if dice.chance(0.2):
            slots[row] = dice.no_slot(num_slots, dtype)
    starts = [dice.one_of(0, 0, 0, 0, 3, -5)]
    for span in dice.spans(num_rows, 0):
        starts.append(starts[-1] + span)
    if num_rows and dice.chance(0.1):
        starts[-1] = starts[-2] - dice.int(1, 4)  # its row is the last: no span overlaps another
    end = max(starts)
    num_positions = max(0, end + dice.one_of(0, 0, 0, 3, 9, -2, -(end // 2)))
    buffer_rows = num_rows + dice.one_of(0, 0, 1, 5, 1100 if dice.chance(0.02) else 2)
    computed = dice.ints(0, dice.one_of(10, 2**20, 2**31 - 4000), num_slots)

    batch.add("idx_mapping", dtype, num_rows, slots, dice.int(1, 3))
    batch.add("query_start_loc", "int32", num_rows + 1, starts, dice.int(1, 3))
    batch.add("num_computed_tokens", "int32", num_slots, computed, dice.int(1, 2))
    batch.add("positions", "int64", num_positions, strides=dice.int(1, 2))
    batch.add("seq_lens", "int32", buffer_rows, strides=dice.int(1, 2), guard=dice.int(1, 4))
    if dice.chance(0.7):
        num_paddings = max(0, num_positions + dice.one_of(0, 0, 7, -3, 1500))
        batch.add("is_padding", "bool", num_paddings, strides=dice.int(1, 2), guard=dice.int(1, 9))
        if dice.chance(0.5):
            choices = (0, num_paddings, num_paddings + 5, dice.int(0, num_paddings), max(end, 0))
            batch.scalars["num_tokens"] = dice.one_of(*choices)
    return batch


def dflash_batch(seed: int, num_forms: int | None = None) -> Batch:
    """Batches that keep the preconditions; behind the live rows anything.

    form: what a kernel is compiled for; ``num_forms`` limits how many there are over all seeds.
    """
    dice = Dice(seed)
    form = dice if num_forms is None else Dice(seed % num_forms)
    batch = Batch(prepare_dflash_inputs_model)
    num_rows = dice.one_of(0, 1, 1, 2, 3, dice.int(4, 12))
    num_live = dice.one_of(num_rows, num_rows, dice.int(0, num_rows))
    num_slots = num_rows + dice.int(0, 4)
    dtype = form.one_of(*INDEX_DTYPES)
    slots = dice.slots(num_rows, num_slots)
    spans = dice.spans(num_live, 1)
    starts = [dice.one_of(0, 0, 0, 0, 0, 2)]
    for span in spans:
        starts.append(starts[-1] + span)
    end = starts[-1]
    rejected = [dice.one_of(0, dice.int(0, span - 1), span - 1) for span in spans]
    num_dead = num_rows - num_live
    if num_dead:
        slots[num_live] = dice.no_slot(num_slots, dtype)
        stale = dice.one_of((end, end), (0, 0), (-9, 900))
        starts += dice.ints(*stale, num_dead)
        rejected += dice.ints(*dice.one_of((0, 0), (-5, 40)), num_dead)

    num_steps = form.one_of(1, 2, 3, 7)
    from_anchor = form.chance(0.5)
    num_queries = num_steps if from_anchor else num_steps + 1
    buffer_rows = num_rows + dice.one_of(0, 0, 1, 3, 520 if dice.chance(0.05) else 2)
    num_tokens = max(num_rows, dice.one_of(buffer_rows, num_rows)) * num_queries + dice.int(0, 9)
    num_targets = end + dice.one_of(0, 0, 1, 5)
    num_context = end + dice.one_of(0, 1, 9, 700 if dice.chance(0.05) else 30)

    cp_size = form.one_of(1, 1, 2, 4)
    cp_interleave = form.one_of(1, 1, 2, 4)
    block_size = cp_interleave * form.one_of(1, 2, 4)
    targets = dice.ints(-9, 900, num_targets)
    for row, span in enumerate(spans):
        first = dice.one_of(0, dice.int(0, 60), dice.int(0, 400))
        targets[starts[row] : starts[row] + span] = range(first, first + span)
    longest = max([0, *targets[starts[0] : end]])
    max_model_len = dice.one_of(10_000, longest + 1, longest + 3, max(1, longest // 2))
    blocks = longest // (block_size * cp_size) + 2
    num_columns = dice.one_of(blocks, blocks, blocks // 2, blocks + 3, dice.int(0, 1))
    table = dice.rng.integers(1, dice.one_of(100, 2**31 - 1), (num_rows, num_columns))
    table[dice.rng.random(table.shape) < 0.1] = dice.one_of(0, 0, -1)
    column_stride = dice.one_of(1, 1, 2)
    row_stride = max(1, num_columns * column_stride + dice.int(0, 3))

    batch.add("idx_mapping", dtype, num_rows, slots, dice.int(1, 3))
    batch.add("target_query_start_loc", "int32", num_rows + 1, starts)
    batch.add("target_positions", "int64", num_targets, targets)
    batch.add("num_sampled", "int32", num_rows, dice.ints(0, 2, num_rows), dice.int(1, 2))
    batch.add("num_rejected", "int32", num_rows, rejected, dice.int(1, 2))
    ids = dice.ints(0, 2**31 - 1, 2 * num_slots)
    batch.add("last_sampled", "int64", num_slots, ids[:num_slots])
    prefill_dtype = form.one_of("int32", "int64")
    batch.add("next_prefill_tokens", prefill_dtype, num_slots, ids[num_slots:], guard=3)
    batch.add("temperature", "float32", num_slots, dice.rng.random(num_slots))
    batch.add("seeds", "int64", num_slots, dice.ints(-(2**63), 2**63 - 2, num_slots))
    batch.add(
        "block_table", "int32", (num_rows, num_columns), table, (row_stride, column_stride), guard=1
    )
    batch.add("input_ids", "int32", num_tokens, guard=3)
    batch.add("positions", "int64", num_tokens)
    batch.add("query_slot_mapping", "int64", num_tokens)
    batch.add("query_start_loc", "int32", buffer_rows + 1, guard=dice.int(1, 2))
    batch.add("seq_lens", "int32", buffer_rows)
    batch.add("context_positions", "int64", num_context)
    batch.add("context_slot_mapping", "int64", num_context)
    for name in ("sample_indices", "sample_pos", "sample_idx_mapping"):
        batch.add(name, "int64", buffer_rows * num_steps)
    batch.add("out_temperature", "float32", num_slots, guard=dice.int(1, 2))
    batch.add("out_seeds", "int64", num_slots)
    if form.chance(0.7):
        batch.add("is_padding", "bool", num_tokens, guard=dice.int(1, 9))
    batch.scalars = {
        "max_target_query_len": max(spans, default=0) + dice.one_of(0, 5),
        "mask_token_id": dice.one_of(0, 151_669, 2**31 - 1),
        "block_size": block_size,
        "num_query_per_req": num_queries,
        "num_steps": num_steps,
        "max_model_len": max_model_len,
        "sample_from_anchor": from_anchor,
    }
    if cp_size > 1 or form.chance(0.3):
        batch.scalars["cp_rank"] = dice.int(0, cp_size - 1)
        batch.scalars["cp_size"] = cp_size
        batch.scalars["cp_interleave"] = cp_interleave
    return batch


def positions_batch_of(slots: list[int], spans: list[int], num_tokens: int, seed: int = 0) -> Batch:
    """A batch of known size, whose layout depends on the numbers of rows and tokens only."""
    batch = Batch(prepare_positions_model)
    num_rows, num_slots = len(slots), len(slots) + 1
    batch.add("idx_mapping", "int32", num_rows, slots)
    batch.add("query_start_loc", "int32", num_rows + 1, np.cumsum([0, *spans]))
    computed = Dice(seed).ints(0, 2**20, num_slots)
    batch.add("num_computed_tokens", "int32", num_slots, computed)
    batch.add("positions", "int64", num_tokens)
    batch.add("seq_lens", "int32", num_rows + 3)
    batch.add("is_padding", "bool", num_tokens)
    return batch


def dflash_batch_of(
    slots: list[int],
    spans: list[int],
    num_steps: int,
    *,
    num_targets: int | None = None,
    num_columns: int | None = None,
    extra: int = 0,
    seed: int = 0,
) -> Batch:
    """A batch of known size, whose layout depends on the numbers of rows, steps and tokens only.

    Row b's context starts at position b + ``seed``; blocks of 16; every third row rejects a token.
    """
    dice = Dice(seed)
    batch = Batch(prepare_dflash_inputs_model)
    num_rows = len(slots)
    starts = np.cumsum([0, *spans])
    num_targets = int(starts[-1]) if num_targets is None else num_targets
    targets = np.zeros(num_targets)
    for row, span in enumerate(spans):
        targets[starts[row] : starts[row + 1]] = row + seed + np.arange(span)
    num_slots = num_rows + 1
    if num_columns is None:
        num_columns = (num_rows + num_targets) // 16 + 2
    num_tokens = num_rows * (num_steps + 1) + extra
    rejected = [int(row % 3 == 2 and span > 1) for row, span in enumerate(spans)]
    table = dice.rng.integers(0, 1000, (num_rows, num_columns))

    batch.add("idx_mapping", "int32", num_rows, slots)
    batch.add("target_query_start_loc", "int32", num_rows + 1, starts)
    batch.add("target_positions", "int64", num_targets, targets)
    batch.add("num_sampled", "int32", num_rows, dice.ints(0, 2, num_rows))
    batch.add("num_rejected", "int32", num_rows, rejected)
    batch.add("last_sampled", "int64", num_slots, dice.ints(0, 2**31 - 1, num_slots))
    batch.add("next_prefill_tokens", "int32", num_slots, dice.ints(0, 2**31 - 1, num_slots))
    batch.add("temperature", "float32", num_slots, dice.rng.random(num_slots))
    batch.add("seeds", "int64", num_slots, dice.ints(-(2**63), 2**63 - 2, num_slots))
    batch.add("block_table", "int32", (num_rows, num_columns), table, (num_columns, 1))
    batch.add("input_ids", "int32", num_tokens)
    batch.add("positions", "int64", num_tokens)
    batch.add("query_slot_mapping", "int64", num_tokens)
    batch.add("query_start_loc", "int32", num_rows + 1)
    batch.add("seq_lens", "int32", num_rows)
    batch.add("context_positions", "int64", num_targets + extra)
    batch.add("context_slot_mapping", "int64", num_targets + extra)
    for name in ("sample_indices", "sample_pos", "sample_idx_mapping"):
        batch.add(name, "int64", num_rows * num_steps)
    batch.add("out_temperature", "float32", num_slots)
    batch.add("out_seeds", "int64", num_slots)
    batch.add("is_padding", "bool", num_tokens)
    batch.scalars = {
        "max_target_query_len": max(spans),
        "mask_token_id": 99,
        "block_size": 16,
        "num_query_per_req": num_steps + 1,
        "num_steps": num_steps,
        "max_model_len": 5000,
        "sample_from_anchor": False,
    }
    return batch


def put_any_values(batch: Batch, seed: int) -> None:
    """Integers of any size, and small ones, in every input but the slots."""
    dice = Dice(seed)
    for name in batch.inputs:
        place = batch.places[name]
        if place.dtype != "float32" and name != "idx_mapping":
            info = np.iinfo(place.dtype)
            values = dice.rng.integers(info.min, info.max, place.shape, place.dtype)
            small = dice.rng.integers(-50, 50, place.shape, place.dtype)
            batch.inputs[name] = np.where(dice.rng.random(place.shape) < 0.5, values, small)


def without_outputs(batch: Batch, memory: np.ndarray) -> np.ndarray:
    """Its inputs, and what lies beside the tensors."""
    memory = memory.copy()
    for name, array in batch.views(memory).items():
        if name not in batch.inputs:
            array[...] = np.zeros((), array.dtype)
    return memory
