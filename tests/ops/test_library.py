"""Registration of every op: opcheck, fake against real outputs, declared mutation, lifetime."""

import gc
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .conftest import op_module

OP_FILES = (
    "gumbel_block_argmax",
    "gumbel_combine",
    "gumbel_sample",
    "markov_step",
    "markov_loop",
    "prepare_positions",
    "prepare_dflash_inputs",
    "top_k_top_p",
)
PREFIXES = ("gumbel_", "markov_", "prepare_", "top_k_")  # of the ops in these files


def samples() -> list[Any]:
    return [
        pytest.param(op_file, number, id=f"{name}-{number}")
        for op_file in OP_FILES
        for number, (name, _, _) in enumerate(op_module(op_file).sample_inputs("cpu"))
    ]


def load(op_file: str, number: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    name, args, kwargs = op_module(op_file).sample_inputs("cpu")[number]
    return getattr(torch.ops.dspark, name).default, args, kwargs


def leaves_of(outputs: Any) -> list[Any]:
    """What an op returned: nothing if it only writes into its arguments."""
    return [x for x in pytree.tree_leaves(outputs) if x is not None]


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in names if name.startswith("dspark::")}


def test_samples_cover_every_op_of_these_files() -> None:
    sampled = {name for f in OP_FILES for name, _, _ in op_module(f).sample_inputs("cpu")}
    assert sampled == {name for name in registered() if name.startswith(PREFIXES)}


def test_samples_cover_every_optional_argument() -> None:
    for op_file in OP_FILES:
        given: dict[str, set[str]] = {}
        for name, args, kwargs in op_module(op_file).sample_inputs("cpu"):
            schema = getattr(torch.ops.dspark, name).default._schema
            named = {a.name for a, _ in zip(schema.arguments, args, strict=False)}
            given.setdefault(op_file, set()).update(
                named | {k for k, v in kwargs.items() if v is not None}
            )
        arguments = {
            a.name
            for name in registered()
            if name.startswith(op_file)
            for a in getattr(torch.ops.dspark, name).default._schema.arguments
        }
        assert given[op_file] == arguments


def test_samples_cover_strided_rows_empty_batches_and_odd_sizes() -> None:
    for op_file in OP_FILES:
        first = [args[0] for _, args, _ in op_module(op_file).sample_inputs("cpu")]
        assert any(not x.is_contiguous() for x in first)
        assert any(x.shape[0] == 0 for x in first)
        assert any(x.shape[0] > 0 and x.shape[-1] % 2 for x in first)


@pytest.mark.parametrize(("op_file", "number"), samples())
def test_opcheck(op_file: str, number: int) -> None:
    """Schema, autograd registration, fake outputs and AOT dispatch (B4-01, B4-04, B4-05)."""
    op, args, kwargs = load(op_file, number)
    torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize(("op_file", "number"), samples())
def test_b4_04_fake_outputs_equal_real_ones(op_file: str, number: int) -> None:
    op, args, kwargs = load(op_file, number)
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = pytree.tree_map_only(
            torch.Tensor, mode.from_tensor, (args, kwargs)
        )
        fakes = leaves_of(op(*fake_args, **fake_kwargs))
    reals = leaves_of(op(*args, **kwargs))
    assert len(fakes) == len(reals) == len(op._schema.returns)
    for fake, real in zip(fakes, reals, strict=True):
        assert fake.shape == real.shape
        assert fake.stride() == real.stride()
        assert fake.dtype == real.dtype
        assert fake.device == real.device
        assert real.is_contiguous()


def declared_and_written(op_file: str, number: int) -> tuple[str, set[str], set[str]]:
    """(op, arguments that the schema marks, arguments that the call changed), aliases refused."""
    op, args, kwargs = load(op_file, number)
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
    before = {k: v.clone() for k, v in tensors.items()}
    outputs = leaves_of(op(*args, **kwargs))
    declared = {
        a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }
    written = {
        k for k, v in tensors.items() if not torch.equal(v.nan_to_num(), before[k].nan_to_num())
    }
    storages = {v.untyped_storage().data_ptr() for v in tensors.values() if v.numel()}
    for output in outputs:
        assert output.numel() == 0 or output.untyped_storage().data_ptr() not in storages
    return op.name(), declared, written


def test_declared_mutation_is_the_mutation() -> None:
    """No call writes what its schema does not mark; each op writes all that its schema marks, in at
    least one sample; no output aliases an input (B4-01)."""
    marked: dict[str, set[str]] = {}
    changed: dict[str, set[str]] = {}
    for op_file in OP_FILES:
        for number in range(len(op_module(op_file).sample_inputs("cpu"))):
            op, declared, written = declared_and_written(op_file, number)
            assert written <= declared, op
            marked[op] = declared
            changed.setdefault(op, set()).update(written)
    assert changed == marked


@pytest.mark.parametrize(("op_file", "number"), samples())
def test_b4_05_compiles_without_a_graph_break(op_file: str, number: int) -> None:
    """Through functionalization, with the mutations written back to the caller's tensors."""
    torch._dynamo.reset()
    op, args, kwargs = load(op_file, number)
    _, eager_args, eager_kwargs = load(op_file, number)
    compiled = torch.compile(lambda a, k: op(*a, **k), fullgraph=True, backend="aot_eager")
    actual = compiled(args, kwargs)
    wanted = op(*eager_args, **eager_kwargs)
    for x, y in zip(
        pytree.tree_leaves((actual, args, kwargs)),
        pytree.tree_leaves((wanted, eager_args, eager_kwargs)),
        strict=True,
    ):
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("op_file", "number"), samples())
def test_inference_mode_gives_the_same(op_file: str, number: int) -> None:
    op, args, kwargs = load(op_file, number)
    wanted = leaves_of((op(*args, **kwargs), args, kwargs))
    op, args, kwargs = load(op_file, number)
    with torch.inference_mode():
        actual = leaves_of((op(*args, **kwargs), args, kwargs))
    for x, y in zip(actual, wanted, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_tags_and_implementations() -> None:
    for name in registered():
        op = getattr(torch.ops.dspark, name).default
        assert torch.Tag.needs_fixed_stride_order in op.tags
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def test_b4_08_ops_outlive_a_collection() -> None:
    before = registered()
    for _ in range(3):
        gc.collect()
    assert registered() == before
    op, args, kwargs = load("gumbel_combine", 0)
    assert op(*args, **kwargs).shape == (3,)


def test_b4_02_mutated_arguments_of_one_buffer() -> None:
    """Cache and token column as views of one storage: compiled equals eager."""
    torch._dynamo.reset()

    def step(buffer: torch.Tensor, logits: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        torch.ops.dspark.gumbel_sample_cache_draft(
            logits, *state, buffer[:64].view(2, 1, 32), 0, None, buffer[64:66].view(torch.int32)
        )

    logits = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    state = (torch.arange(2), torch.ones(2), torch.arange(2), torch.arange(2))
    eager, compiled = torch.zeros(80), torch.zeros(80)
    step(eager, logits, state)
    try:
        torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, logits, state)
    except RuntimeError:
        return  # refused, not silently wrong
    assert torch.equal(eager.view(torch.int32), compiled.view(torch.int32))


def test_outputs_never_require_grad() -> None:
    logits = torch.randn(2, 50, requires_grad=True)
    state = (torch.arange(2), torch.ones(2), torch.arange(2), torch.arange(2))
    cache = torch.zeros(2, 1, 50)
    block_max, _ = torch.ops.dspark.gumbel_block_argmax_cache(logits, *state, cache, 0, None)
    assert not block_max.requires_grad
    assert not cache.requires_grad
