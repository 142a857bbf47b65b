"""prepare_positions: equal to the numpy model on every byte, and each clause of its contract."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dspark_ops

from .conftest import Kernel, Reference, op_module
from .prepare_batches import assert_equals_model, positions_batch

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
OLD = -9


def test_reference_equals_the_model() -> None:
    for seed in range(2000):
        assert_equals_model(Reference.prepare_positions, positions_batch(seed), "cpu", seed)


def test_kernel_equals_the_model() -> None:
    for seed in range(10_000, 10_600):
        assert_equals_model(Kernel.prepare_positions, positions_batch(seed), Kernel.device, seed)


def arguments(
    device: str,
    slots: list[int],
    starts: list[int],
    computed: list[int],
    num_positions: int = 12,
    buffer_rows: int | None = None,
    num_paddings: int | None = None,
    dtype: torch.dtype = I32,
) -> dict[str, Any]:
    """Contiguous tensors; outputs are full of OLD, ``is_padding`` of True and False by turns."""
    buffer_rows = len(slots) if buffer_rows is None else buffer_rows
    given: dict[str, Any] = {
        "idx_mapping": torch.tensor(slots, dtype=dtype, device=device),
        "query_start_loc": torch.tensor(starts, dtype=I32, device=device),
        "num_computed_tokens": torch.tensor(computed, dtype=I32, device=device),
        "positions": torch.full((num_positions,), OLD, device=device),
        "seq_lens": torch.full((buffer_rows,), OLD, dtype=I32, device=device),
    }
    if num_paddings is not None:
        given["is_padding"] = torch.arange(num_paddings, device=device) % 2 == 0
    return given


def outputs(given: dict[str, Any]) -> tuple[list[int], list[int], int | None]:
    """positions, seq_lens and where the padding begins."""
    padding = given.get("is_padding")
    boundary = None
    if padding is not None:
        boundary = int((~padding).sum())
        assert padding.tolist() == [t >= boundary for t in range(len(padding))]
    return given["positions"].tolist(), given["seq_lens"].tolist(), boundary


def test_values(ops) -> None:
    """Two decodes and a prefill in slots of their own order."""
    given = arguments(ops.device, [2, 0, 1], [0, 1, 2, 6], [40, 0, 7], num_paddings=9)
    ops.prepare_positions(**given)
    positions, seq_lens, boundary = outputs(given)
    assert positions == [7, 40, 0, 1, 2, 3] + [OLD] * 6
    assert seq_lens == [8, 41, 4]
    assert boundary == 6


def test_without_is_padding(ops) -> None:
    given = arguments(ops.device, [0], [0, 2], [5])
    assert ops.prepare_positions(**given) is None
    assert outputs(given) == ([5, 6] + [OLD] * 10, [7], None)


@pytest.mark.parametrize("slot", [-1, -5, 4, 2**31 - 1])
def test_b3_01_inert_rows_write_nothing(ops, slot: int) -> None:
    """Rows left over from a larger batch: their spans stay as they were, their length is 0."""
    given = arguments(ops.device, [0, 1, slot, slot], [0, 2, 4, 6, 8], [10, 20, 30, 40])
    ops.prepare_positions(**given)
    assert outputs(given) == ([10, 11, 20, 21] + [OLD] * 8, [12, 22, 0, 0], None)


def test_b3_04_lengths_of_padded_rows_are_0(ops) -> None:
    """Lengths 9 and 4, drafts accepted [1, 0] and a bonus token each, padded to 4 rows."""
    given = arguments(ops.device, [0, 1, -1, -1], [0, 2, 3, 3, 3], [9, 4], buffer_rows=6)
    ops.prepare_positions(**given)
    assert outputs(given)[1] == [11, 5, 0, 0, 0, 0]


def test_b3_05_the_boundary_follows_the_batch(ops) -> None:
    """55 requests of 9 tokens in buffers for 56, then spans of [1, 3, 2] in the same buffers."""
    slots = [*range(55), -1]
    starts = [9 * min(row, 55) for row in range(57)]
    given = arguments(ops.device, slots, starts, [100] * 56, 56 * 9, 56, 56 * 9)
    ops.prepare_positions(**given)
    positions, seq_lens, boundary = outputs(given)
    assert positions == list(range(100, 109)) * 55 + [OLD] * 9
    assert seq_lens == [109] * 55 + [0]
    assert boundary == 495
    given["idx_mapping"][3:] = -1
    given["query_start_loc"].copy_(torch.tensor([0, 1, 4] + [6] * 54))
    ops.prepare_positions(**given)
    positions, seq_lens, boundary = outputs(given)
    assert positions[:7] == [100, 100, 101, 102, 100, 101, 106]
    assert seq_lens == [101, 103, 102] + [0] * 53
    assert boundary == 6


def test_b3_08_spans_are_clipped_to_the_buffer(ops) -> None:
    """8 requests of 16 queries in a buffer of 64: nothing is written behind it."""
    given = arguments(ops.device, list(range(8)), [16 * b for b in range(9)], [3] * 8)
    buffer = torch.full((72,), OLD, device=ops.device)
    given["positions"] = buffer[4:68]
    ops.prepare_positions(**given)
    assert buffer.tolist() == [OLD] * 4 + list(range(3, 19)) * 4 + [OLD] * 4
    assert outputs(given)[1] == [19] * 8


def test_spans_below_0_are_clipped(ops) -> None:
    given = arguments(ops.device, [0, 1], [-3, 2, 4], [50, 60])
    buffer = torch.full((12,), OLD, device=ops.device)
    given["positions"] = buffer[4:]
    ops.prepare_positions(**given)
    assert buffer.tolist() == [OLD] * 4 + [53, 54, 60, 61] + [OLD] * 4
    assert outputs(given)[1] == [55, 62]


def test_a_span_that_ends_before_it_starts_is_empty(ops) -> None:
    given = arguments(ops.device, [0, 1], [0, 4, 2], [50, 60], num_paddings=6)
    ops.prepare_positions(**given)
    assert outputs(given) == ([50, 51, 52, 53] + [OLD] * 8, [54, 60], 2)


def test_b3_17_stale_entries_everywhere(ops) -> None:
    """Rows behind the live one hold what is no slot, no offset and no count."""
    big = 2**31 - 1
    given = arguments(
        ops.device, [1, big, -big], [0, 3, big, -big], [big, 5], 12, 5, 7, dtype=torch.int64
    )
    ops.prepare_positions(**given)
    assert outputs(given) == ([5, 6, 7] + [OLD] * 9, [8, 0, 0, 0, 0], 0)


def test_nothing_stale_survives_a_smaller_batch(ops) -> None:
    given = arguments(ops.device, [0, 1, 2], [0, 4, 8, 12], [1, 2, 3], 12, 5, 20)
    ops.prepare_positions(**given)
    given["idx_mapping"].copy_(torch.tensor([2, -1, -1]))
    given["query_start_loc"].copy_(torch.tensor([0, 1, 1, 1]))
    ops.prepare_positions(**given)
    positions, seq_lens, boundary = outputs(given)
    assert positions[0] == 3
    assert seq_lens == [4, 0, 0, 0, 0]
    assert boundary == 1


def test_no_rows(ops) -> None:
    """Lengths and padding are written all the same; the boundary is the only offset there is."""
    given = arguments(ops.device, [], [4], [1, 2], 12, 3, 10)
    ops.prepare_positions(**given)
    assert outputs(given) == ([OLD] * 12, [0, 0, 0], 4)
    given = arguments(ops.device, [], [0], [], 0, 0, 0)
    ops.prepare_positions(**given)
    assert outputs(given) == ([], [], 0)
    given = arguments(ops.device, [-1, 0], [0, 1, 2], [], 3)  # no slot at all
    ops.prepare_positions(**given)
    assert outputs(given) == ([OLD] * 3, [0, 0], None)


@pytest.mark.parametrize(
    ("num_tokens", "boundary"), [(0, 0), (1, 1), (4, 4), (5, 5), (9, 9), (10, 9), (2**40, 9)]
)
def test_num_tokens_is_the_boundary(ops, num_tokens: int, boundary: int) -> None:
    """Below, at and beyond the end of the spans, 4, and of the buffer, 9: as two fills give it."""
    given = arguments(ops.device, [0, 1], [0, 2, 4], [7, 8], num_paddings=9)
    filled = given["is_padding"].clone()
    filled[:num_tokens].fill_(False)
    filled[num_tokens:].fill_(True)
    ops.prepare_positions(**given, num_tokens=num_tokens)
    assert outputs(given) == ([7, 8, 8, 9] + [OLD] * 8, [9, 10], boundary)
    assert torch.equal(given["is_padding"], filled)


def test_wide_buffers(ops) -> None:
    """Spans, lengths and padding of more than a program's block, boundaries inside a block."""
    block = op_module("prepare_positions").BLOCK_T
    for end in (block - 1, block, block + 1, 2 * block + 3):
        given = arguments(ops.device, [0, 1], [0, 5, end], [0, 100], end + 2, block + 7, 3 * block)
        ops.prepare_positions(**given)
        positions, seq_lens, boundary = outputs(given)
        assert positions == [*range(5), *range(100, 95 + end), OLD, OLD]
        assert seq_lens == [5, 95 + end] + [0] * (block + 5)
        assert boundary == end


def test_positions_beyond_int32(ops) -> None:
    given = arguments(ops.device, [0], [0, 4], [2**31 - 2])
    ops.prepare_positions(**given)
    assert outputs(given)[0][:5] == [2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, OLD]


@pytest.mark.parametrize("dtype", [I32, I64, torch.int16, torch.int8, torch.uint8])
def test_dtypes_of_idx_mapping(ops, dtype: torch.dtype) -> None:
    last = 255 if dtype == torch.uint8 else -1
    given = arguments(ops.device, [1, last], [0, 1, 2], [7, 8], dtype=dtype)
    ops.prepare_positions(**given)
    assert outputs(given) == ([8] + [OLD] * 11, [9, 0], None)


def test_strided_arguments(ops) -> None:
    """Each in a column of a wider buffer, whose other columns stay as they were."""
    given = arguments(ops.device, [1, 0, -1], [0, 3, 4, 6], [7, 8], 9, 4, 8)
    wanted = {k: v.clone() for k, v in given.items()}
    ops.prepare_positions(**wanted)
    buffers = {k: torch.stack([v, v, v], 1) for k, v in given.items()}
    before = {k: v.clone() for k, v in buffers.items()}
    ops.prepare_positions(**{k: v[:, 1] for k, v in buffers.items()})
    for name, buffer in buffers.items():
        assert torch.equal(buffer[:, 1], wanted[name]), name
        assert torch.equal(buffer[:, ::2], before[name][:, ::2]), name


# Compiled


def step(given: dict[str, Any], num_tokens: int | None = None) -> None:
    """The op between other mutations of its buffers."""
    given["positions"].add_(1)
    dspark_ops.prepare_positions(**given, num_tokens=num_tokens)
    given["seq_lens"].add_(1)


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_the_same(dynamic: bool, has_padding: bool) -> None:
    """With and without the optional mutated tensor (B4-13), through Inductor."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for slots, starts in (([1, 0], [0, 2, 5]), ([1, -1, 0], [0, 1, 2, 3]), ([0] * 4, [0] * 5)):
        num_paddings = 8 if has_padding else None
        given = arguments("cpu", slots, starts, [3, 4], num_paddings=num_paddings)
        wanted = {k: v.clone() for k, v in given.items()}
        step(wanted)
        compiled(given)
        for name, x in given.items():
            assert torch.equal(x, wanted[name]), name


def test_a_symbolic_num_tokens_compiles_once() -> None:
    """0, inside, the length and beyond are one graph, without a guard on the number's size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (5, 2, 8, 9, 1000, 7):
        given = arguments("cpu", [1, 0], [0, 2, 5], [3, 4], num_paddings=8)
        compiled(given, num_tokens)
        assert outputs(given)[2] == min(num_tokens, 8)
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match=r"num_tokens must be .* >= 0; got -2"):
        compiled(given, -2)
    assert counter.frame_count == 1


def test_num_tokens_read_from_a_tensor() -> None:
    """An unbacked number, of which nothing is known when the graph is made."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def from_tensor(given: dict[str, Tensor], count: Tensor) -> None:
        dspark_ops.prepare_positions(**given, num_tokens=count.item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for count in (3, 0, 9):
            given = arguments("cpu", [1, 0], [0, 2, 5], [3, 4], num_paddings=8)
            from_tensor(given, torch.tensor(count))
            assert outputs(given)[2] == min(count, 8)
        with pytest.raises(ValueError, match=r"num_tokens must be .* >= 0; got -1"):
            from_tensor(given, torch.tensor(-1))


def test_b4_13_in_a_nested_region() -> None:
    torch._dynamo.reset()

    @torch.compiler.nested_compile_region
    def region(given: dict[str, Tensor]) -> Tensor:
        dspark_ops.prepare_positions(**given, num_tokens=3)
        return given["positions"] + 1

    given = arguments("cpu", [1, 0], [0, 2, 5], [3, 4], num_paddings=8)
    compiled = torch.compile(region, fullgraph=True, backend="aot_eager")
    assert compiled(given).tolist()[:6] == [5, 6, 4, 5, 6, OLD + 1]
    assert outputs(given) == ([4, 5, 3, 4, 5] + [OLD] * 7, [6, 6], 3)


def test_b4_02_outputs_in_one_buffer() -> None:
    """Mutated arguments that are views of one tensor: compiled equals eager, or is refused."""
    torch._dynamo.reset()

    def views(buffer: Tensor) -> None:
        dspark_ops.prepare_positions(
            torch.arange(2),
            torch.tensor([0, 2, 5], dtype=I32),
            torch.tensor([3, 4], dtype=I32),
            buffer[:6],
            buffer[6:8].view(I32),
            is_padding=buffer[8:].view(BOOL),
        )

    eager, compiled = torch.zeros(9, dtype=I64), torch.zeros(9, dtype=I64)
    views(eager)
    try:
        torch.compile(views, fullgraph=True, backend="aot_eager")(compiled)
    except RuntimeError:
        return
    assert torch.equal(eager, compiled)


# Refused


def good() -> dict[str, Any]:
    return arguments("cpu", [0, 1], [0, 1, 2], [1, 2], 12, 3, 8)


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def zeros(*shape: int, dtype: torch.dtype = I32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# argument, value, error, what the text has after "<argument> must"
REFUSED = [
    ("idx_mapping", [0, 1], TypeError, r"be a Tensor, got list: \[0, 1\]"),
    ("idx_mapping", zeros(2).float(), TypeError, "have dtype .*; got torch.float32"),
    ("idx_mapping", zeros(2).bool(), TypeError, "have dtype .*; got torch.bool"),
    ("idx_mapping", zeros(2, 1), ValueError, r"have shape \[B\]; got \(2, 1\)"),
    ("idx_mapping", torch.tensor(0), ValueError, r"have shape \[B\]; got \(\)"),
    ("idx_mapping", meta(2, dtype=I32), ValueError, "be on cpu, where positions is; got meta"),
    ("query_start_loc", None, TypeError, "be a Tensor, got NoneType: None"),
    ("query_start_loc", zeros(3, dtype=I64), TypeError, "have dtype int32; got torch.int64"),
    ("query_start_loc", zeros(2), ValueError, r"have shape \[B \+ 1\] = \[3\]; got \(2,\)"),
    ("query_start_loc", zeros(4), ValueError, r"have shape \[B \+ 1\] = \[3\]; got \(4,\)"),
    ("query_start_loc", meta(3, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("num_computed_tokens", 3, TypeError, "be a Tensor, got int: 3"),
    ("num_computed_tokens", zeros(2, dtype=I64), TypeError, "have dtype int32; got torch.int64"),
    ("num_computed_tokens", zeros(1, 2), ValueError, r"have shape \[S\]; got \(1, 2\)"),
    ("num_computed_tokens", meta(2, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("positions", [1], TypeError, r"be a Tensor, got list: \[1\]"),
    ("positions", zeros(12), TypeError, "have dtype int64; got torch.int32"),
    ("positions", zeros(3, 4, dtype=I64), ValueError, r"have shape \[T\]; got \(3, 4\)"),
    ("positions", zeros(1, dtype=I64).expand(12), ValueError, r"have an address .* strides \(0,\)"),
    ("seq_lens", None, TypeError, "be a Tensor, got NoneType: None"),
    ("seq_lens", zeros(3, dtype=I64), TypeError, "have dtype int32; got torch.int64"),
    ("seq_lens", zeros(1), ValueError, r"have an entry for each row .*>= 2\]; got \(1,\)"),
    ("seq_lens", zeros(3, 1), ValueError, r"have shape \[>= B\]; got \(3, 1\)"),
    ("seq_lens", zeros(1).expand(3), ValueError, r"have an address .* strides \(0,\)"),
    ("seq_lens", meta(3, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("is_padding", [True], TypeError, r"be a Tensor, got list: \[True\]"),
    ("is_padding", zeros(8, dtype=torch.uint8), TypeError, "have dtype bool; got torch.uint8"),
    ("is_padding", zeros(8, 1, dtype=BOOL), ValueError, r"have shape \[T'\]; got \(8, 1\)"),
    ("is_padding", zeros(1, dtype=BOOL).expand(8), ValueError, r"have an address .* \(0,\)"),
    ("is_padding", meta(8, dtype=BOOL), ValueError, "be on cpu.*; got meta"),
    ("num_tokens", -1, ValueError, "be the number of tokens .*, >= 0; got -1"),
    ("num_tokens", -(2**40), ValueError, "be the number of tokens .*, >= 0; got -1099511627776"),
    ("num_tokens", 1.0, TypeError, "be an int, got float: 1.0"),
    ("num_tokens", True, TypeError, "be an int, got bool: True"),
    ("num_tokens", torch.tensor(1), TypeError, "be an int, got a Tensor; without it"),
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
    assert_refused(dspark_ops.prepare_positions, given, error, f"{name} must {text}")
    if isinstance(value, Tensor) and name != "num_tokens":  # the launcher gets no other type
        assert_refused(Kernel.prepare_positions, given, error, f"{name} must {text}")


@pytest.mark.parametrize(("name", "value", "error", "text"), REFUSED)
def test_refused_when_compiled(name: str, value: Any, error: type[Exception], text: str) -> None:
    """The same text inside whatever exception the compiler wraps it in."""
    torch._dynamo.reset()
    compiled = torch.compile(dspark_ops.prepare_positions, fullgraph=True, backend="eager")
    assert_refused(compiled, {**good(), name: value}, Exception, f"(?s){name} must {text}")


def test_a_numpy_int_is_a_number_of_tokens() -> None:
    given, wanted = good(), good()
    dspark_ops.prepare_positions(**{**given, "num_tokens": np.int32(5)})
    dspark_ops.prepare_positions(**{**wanted, "num_tokens": 5})
    assert torch.equal(given["is_padding"], wanted["is_padding"])


def test_num_tokens_without_is_padding_is_refused() -> None:
    given = good()
    del given["is_padding"]
    text = "num_tokens must be given with is_padding.*; got num_tokens=3 and is_padding=None"
    assert_refused(dspark_ops.prepare_positions, {**given, "num_tokens": 3}, ValueError, text)


def test_kernel_refuses_a_negative_num_tokens() -> None:
    assert_refused(
        Kernel.prepare_positions, {**good(), "num_tokens": -1}, ValueError, "num_tokens .*got -1"
    )
