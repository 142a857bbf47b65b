"""By ``backend="dspark"`` with generated code: what is read and written in which memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import inductor_passes
from dspark_ops import prepare_positions

from .compiling import SLOT, Compiled, generated_code_of
from .inputs import DEVICE, assert_as_eager, copied
from .padding_inputs import PADDING, Batch, make_batch, prepare
from .padding_spellings import FUSED, fills, first_entries, op_first

NAMES = (
    "fills",
    "op_first",
    "setitem",
    "whole_then_head",
    "first_entries",
    "compared",
    "half_filled_read",
    "half_filled_copied",
    "read_before_the_op",
    "returned",
)


@pytest.mark.parametrize("name", NAMES)
def test_generated_code(name: str) -> None:
    """The second number of tokens is a symbol."""
    spelling = FUSED[name]
    compiled = Compiled(spelling.function, backend="dspark")
    for seed, n in enumerate((6, 9, 7)):
        assert_as_eager(compiled, spelling.function, make_batch(6, seed=seed), n)
    assert compiled.fused(PADDING) == len(compiled.graphs) == 2
    assert compiled.reasons(PADDING) == []


@pytest.mark.parametrize("n", [-5, 20])
def test_number_beyond_the_buffer(n: int) -> None:
    """What is below zero is no number of tokens to the op, and a comparison takes any number."""
    compiled = Compiled(FUSED["compared"].function, backend="dspark")
    for number in (6, 9, n):
        assert_as_eager(compiled, FUSED["compared"].function, make_batch(), number)
    assert compiled.fused(PADDING) == len(compiled.graphs) == 2


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [fills, op_first, first_entries], ids=lambda f: f.__name__)
def test_buffers_are_written_in_place(
    function: Any, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled(function, backend="dspark", dynamic=dynamic)
    x = make_batch()
    (code,) = generated_code_of(compiled, x, 6)
    code = code[code.index("def call") : code.index("def benchmark_compiled_module")]
    lines = [line.split("#")[0] for line in code.splitlines()]
    assert compiled.fused(PADDING) == 1
    assert sum("torch.ops.dspark.prepare_positions_padding.default(" in x for x in lines) == 1
    assert not [line for line in lines if "empty" in line or "clone" in line or "cpp_" in line]

    op, written = torch.ops.dspark.prepare_positions_padding, []
    call = op.default

    def spy(*args: Any, **kwargs: Any) -> Any:
        written.extend(arg.data_ptr() for arg in args if isinstance(arg, Tensor))
        return call(*args, **kwargs)

    monkeypatch.setattr(op, "default", spy)
    compiled(x, 6)
    buffers = (x.positions, x.seq_lens, x.is_padding)
    assert {tensor.data_ptr() for tensor in buffers} <= set(written)


@pytest.mark.parametrize("name", ["fills", "first_entries", "middle_entries"])
@pytest.mark.parametrize("part", [slice(5, 21), slice(0, 32, 2), slice(3, 51, 3)], ids=str)
def test_buffer_is_a_part_of_another(name: str, part: slice) -> None:
    """An offset or a stride, and the rest of the memory stays as it was."""

    def step(x: Batch, memory: Tensor, n: int) -> None:
        FUSED[name].function(x, n)

    compiled = Compiled(step, backend="dspark")
    for seed, n in enumerate((6, 9)):
        batch = make_batch(seed=seed)
        memory = batch.is_padding.repeat(4)
        batch = batch._replace(is_padding=memory[part])
        run, eager = copied((batch, memory)), copied((batch, memory))
        compiled(run[0], memory.sum(), n)
        step(eager[0], memory.sum(), n)
        assert torch.equal(run[1], eager[1])
        assert torch.equal(run[0].positions, eager[0].positions)
    assert compiled.fused(PADDING) == len(compiled.graphs) == 2


class Runner(torch.nn.Module):
    """Owns its buffers, as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        x = make_batch()
        for name in ("positions", "seq_lens", "is_padding"):
            self.register_buffer(name, getattr(x, name))

    def forward(self, idx_mapping: Tensor, starts: Tensor, computed: Tensor, n: int) -> Tensor:
        self.is_padding[:n].fill_(False)
        self.is_padding[n:].fill_(True)
        prepare_positions(idx_mapping, starts, computed, self.positions, self.seq_lens)
        return self.positions * ~self.is_padding


def test_buffers_of_a_module() -> None:
    run, eager = Runner(), Runner()
    compiled = Compiled(run, backend="dspark")
    for n in (6, 9, 7):
        x = make_batch(seed=n)
        assert torch.equal(compiled(*x[:3], n), eager(*x[:3], n))
        for name, buffer in eager.named_buffers():
            assert torch.equal(run.get_buffer(name), buffer)
    assert compiled.fused(PADDING) == len(compiled.graphs) == 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes(mode: Any) -> None:
    compiled = Compiled(fills, backend="dspark")
    with mode():
        assert_as_eager(compiled, fills, make_batch(), 6)
    assert compiled.fused(PADDING) == 1


def test_beside_a_gradient() -> None:
    def step(x: Batch, weight: Tensor) -> Tensor:
        x.is_padding[:6].fill_(False)
        x.is_padding[6:].fill_(True)
        prepare(x)
        return (weight * ~x.is_padding).sum()

    compiled = Compiled(step, backend="dspark")
    weights = [torch.ones(16, device=DEVICE, requires_grad=True) for _ in range(2)]
    run, eager = make_batch(), make_batch()
    compiled(run, weights[0]).backward()
    step(eager, weights[1]).backward()
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert torch.equal(run.is_padding, eager.is_padding)
    assert compiled.fused(PADDING) == 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["fills", "op_first", "compared", "half_filled_read"])
def test_first_version_of_functionalization(name: str, dynamic: bool | None) -> None:
    options = {"enable_auto_functionalized_v2": False}
    function = FUSED[name].function
    compiled = Compiled(function, backend="dspark", dynamic=dynamic, options=options)
    assert_as_eager(compiled, function, make_batch(), 6)
    assert compiled.fused(PADDING) == 1


def test_marked_dynamic() -> None:
    """The number of tokens is the size of a tensor, of 2 or more."""
    compiled = Compiled(FUSED["from_a_shape"].function, backend="dspark")
    for n in (5, 3, 11, 16):
        x = make_batch(n, seed=n)
        mark = torch._dynamo.mark_dynamic if n < 16 else torch._dynamo.maybe_mark_dynamic
        mark(x.input_ids, 0)
        eager = copied(x)
        compiled(x, 0)
        FUSED["from_a_shape"].function(eager, 0)
        assert torch.equal(x.is_padding, eager.is_padding)
    assert compiled.fused(PADDING) == len(compiled.graphs) == 2  # the full buffer is another one


class Step(torch.nn.Module):
    """What `torch.export` takes."""

    def forward(self, idx_mapping, starts, computed, positions, seq_lens, is_padding, input_ids):
        n = input_ids.shape[0]
        is_padding[:n] = False
        is_padding[n:] = True
        prepare_positions(idx_mapping, starts, computed, positions, seq_lens)
        return positions[:n] + input_ids


def test_ahead_of_time(tmp_path: Path) -> None:
    def arguments(n: int, seed: int = 0) -> tuple[Tensor, ...]:
        x = make_batch(n, seed=seed)
        return (*x[:6], x.input_ids)

    shapes = (*[None] * 6, {0: torch.export.Dim("num_tokens", min=2, max=14)})
    program = torch.export.export(Step(), arguments(6), dynamic_shapes=shapes)
    passes = inductor_passes.options()[SLOT]
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "step.pt2"), inductor_configs={SLOT: passes}
    )
    assert [site.fused for site in inductor_passes.report().sites] == [True]
    loaded = torch._inductor.aoti_load_package(package)
    for n in (6, 9):
        assert_as_eager(loaded, Step(), *arguments(n, seed=n))
