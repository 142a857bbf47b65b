"""By ``backend="dspark"`` with generated code, where `test_sampler_fusion` stops before it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import inductor_passes
from dspark_ops import gumbel_block_argmax

from .compiling import SAMPLER, SLOT, Compiled, ops_in
from .inputs import Inputs, assert_as_eager, bits, copied, make_inputs
from .near_misses import LEFT_ALONE, SQUARE
from .spellings import FUSED, block_op_uncached, choose, draft_loop, sample


def test_every_spelling() -> None:
    """All in one function, each with inputs of its own."""
    spellings = dict(FUSED)
    if torch.__version__ < "2.13":
        # Between other code, Inductor 2.11 puts the write of a column into the loop that reads its
        # old contents, and writes first. The graph is right: test_sampler_fusion runs it.
        del spellings["old_column_read_later"]
    functions = [spelling.function for spelling in spellings.values()]

    def every(*inputs: Inputs) -> list[Any]:
        return [function(x) for function, x in zip(functions, inputs, strict=True)]

    compiled = Compiled(every, backend="dspark")
    inputs = [make_inputs(seed=seed) for seed in range(len(functions))]
    assert_as_eager(compiled, every, *inputs)
    assert compiled.fused(SAMPLER) == sum(spelling.sites for spelling in spellings.values())
    assert compiled.reasons(SAMPLER) == []


def test_near_misses() -> None:
    names = ["alpha", "scalar_bias", "soft_cap", "block_maxima_returned", "biased_logits_returned"]
    names += ["two_block_ops_share_one_gather", "added_in_place_to_an_input", "d2t_scatter"]
    names += ["base_is_a_view_of_the_cache", "largest_maximum_returned"]
    functions = [LEFT_ALONE[name].function for name in names if name not in SQUARE]

    def every(*inputs: Inputs) -> list[Any]:
        return [function(x) for function, x in zip(functions, inputs, strict=True)]

    compiled = Compiled(every, backend="dspark")
    # Generated code may round a product, a tanh and a NaN otherwise than eager: there are none.
    inputs = [make_inputs(seed=seed) for seed in range(len(functions))]
    inputs = [
        x._replace(
            base=(x.base.nan_to_num(1.0, 2.0, -2.0) * 2).round() / 2,
            bias=(x.bias.nan_to_num(1.0, 2.0, -2.0) * 2).round() / 2,
        )
        for x in inputs
    ]
    soft_cap = names.index("soft_cap")
    capped = inputs[soft_cap]
    inputs[soft_cap] = capped._replace(
        base=torch.where(capped.base > 0, 1000.0, -1000.0).bfloat16()
    )
    assert_as_eager(compiled, every, *inputs)
    assert compiled.fused(SAMPLER) == 0


def test_dynamic_batch() -> None:
    compiled = Compiled(draft_loop, backend="dspark")
    for num_rows in (4, 2, 3, 8, 1, 16):
        assert_as_eager(compiled, draft_loop, make_inputs(num_rows, seed=num_rows))
    assert compiled.fused(SAMPLER) == 3 * len(compiled.graphs) == 9


# The GEMM


def linear_step(x: Inputs) -> tuple[Tensor, Tensor]:
    bias = torch.nn.functional.linear(torch.nn.functional.embedding(x.prev, x.w1), x.w2)
    x.draft_tokens[:, 0] = sample(x.base[:, 0] + bias, x)
    return bias


class AfterAllPasses:
    """The post-grad passes of Inductor that make ``addmm`` have run where this one does."""

    def __init__(self) -> None:
        self.ops: set[str] = set()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ops |= {str(node.target) for node in graph.nodes}


def linear_step_alone(x: Inputs) -> None:
    linear_step(x)  # its bias has no other reader: Inductor may merge the add into the GEMM


def test_runs_before_the_add_becomes_addmm() -> None:
    stock, fused = AfterAllPasses(), AfterAllPasses()
    torch.compile(linear_step_alone, options={"post_grad_custom_post_pass": stock})(make_inputs())
    assert "aten.addmm.default" in stock.ops
    compiled = Compiled(linear_step_alone, options={"post_grad_custom_post_pass": fused})
    compiled(make_inputs())
    assert compiled.fused(SAMPLER) == 1
    assert not fused.ops & {"aten.addmm.default", "aten.add.Tensor"}
    assert "aten.mm.default" in fused.ops


@pytest.mark.parametrize(
    ("backend", "scale", "alpha"),
    [(None, 1, 1), (None, 1, 2), (None, 2, 1), (None, 2, 2), ("dspark", 2, 2)],
)
def test_left_alone_rounds_as_eager(backend: str | None, scale: int, alpha: int) -> None:
    """Neither is the add merged into the GEMM where the sampler is left alone or switched off."""

    def step(x: Inputs) -> Tensor:
        bias = x.w1[x.prev] @ x.w2.t()
        return sample(torch.add(x.base[:, 0], bias, alpha=alpha) * scale, x)

    after = AfterAllPasses()
    options = {"post_grad_custom_post_pass": after, "dspark.sampler_fusion": False}
    compiled = Compiled(step, backend=backend, options=options)
    for seed in range(3):
        inputs = make_inputs(seed=seed)
        finite = inputs.base.nan_to_num(1.0, 2.0, -2.0)  # a NaN of generated code has other bits
        assert_as_eager(compiled, step, inputs._replace(base=finite))
    assert "aten.addmm.default" not in after.ops


@pytest.mark.parametrize("backend", [None, "dspark"])
def test_equal_from_the_bias_on(backend: str | None) -> None:
    """The reference is eager: addmm may round once where add rounds the rounded bias again."""
    compiled = Compiled(linear_step, backend=backend)
    for seed in range(3):
        run, eager = make_inputs(seed=seed), make_inputs(seed=seed)
        bias = compiled(run)
        eager.draft_tokens[:, 0] = sample(eager.base[:, 0] + bias, eager)
        assert torch.equal(run.draft_tokens, eager.draft_tokens)
        assert torch.equal(bits(run.logits_cache), bits(eager.logits_cache))
    assert compiled.fused(SAMPLER) == 1


def test_loop_with_a_linear_head() -> None:
    def loop(x: Inputs) -> list[Tensor]:
        prev, biases = x.prev, []
        for i in range(3):
            embedding = torch.nn.functional.embedding(prev, x.w1)
            biases.append(torch.nn.functional.linear(embedding, x.w2))
            prev = sample(x.base[:, i] + biases[-1], x, i)
            x.draft_tokens[:, i] = prev
        return biases

    compiled = Compiled(loop, backend="dspark")
    run, eager = make_inputs(), make_inputs()
    for i, bias in enumerate(compiled(run)):
        eager.draft_tokens[:, i] = sample(eager.base[:, i] + bias, eager, i)
    assert torch.equal(run.draft_tokens, eager.draft_tokens)
    assert torch.equal(bits(run.logits_cache), bits(eager.logits_cache))
    assert compiled.fused(SAMPLER) == 3
    assert "aten.addmm" not in str(compiled.graphs)


# Functionalization


@pytest.mark.parametrize("name", ["view", "column_write", "draft_loop", "next_embedding"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_first_version_of_functionalization(name: str, dynamic: bool | None) -> None:
    spelling = FUSED[name]
    options = {"enable_auto_functionalized_v2": False}
    compiled = Compiled(spelling.function, options=options, dynamic=dynamic)
    for seed in range(2):
        assert_as_eager(compiled, spelling.function, make_inputs(seed=seed))
    assert compiled.fused(SAMPLER) == spelling.sites


@pytest.mark.parametrize("name", ["cache_last_columns", "cache_offset_in_the_vocabulary"])
def test_first_version_with_a_view_of_the_cache(name: str) -> None:
    spelling = FUSED[name]
    options = {"enable_auto_functionalized_v2": False}
    compiled = Compiled(spelling.function, options=options, backend="dspark")
    assert_as_eager(compiled, spelling.function, make_inputs())


# Layout


@pytest.mark.parametrize("cached", [True, False])
def test_op_sees_the_strides_of_eager(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would keep the transposed layout of the producer; the kernel needs stride 1."""

    def step(transposed: Tensor, x: Inputs) -> Tensor:
        base = (transposed.t() + 1).contiguous()
        bias = (transposed * 2).t().contiguous()
        if cached:
            return sample(base + bias, x)
        return choose(*block_op_uncached(base + bias, x))

    op = getattr(torch.ops.dspark, "gumbel_sample_cache" if cached else "gumbel_sample")
    call, strides = op.default, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        strides.extend(t.stride() for t in tensors if t.shape == x.bias.shape)
        return call(*args, **kwargs)

    x = make_inputs()
    transposed = x.other.t().contiguous()
    compiled = Compiled(step, backend="dspark")
    assert_as_eager(compiled, step, transposed, x)
    assert compiled.fused(SAMPLER) == 1
    monkeypatch.setattr(op, "default", spy)
    compiled(transposed, copied(x))
    assert strides == [(x.bias.shape[1], 1)] * 2


# Errors


@pytest.mark.parametrize(
    "change",
    [
        lambda x: {"logits_cache": x.logits_cache.double()},
        lambda x: {"logits_cache": x.logits_cache[..., :5]},
        lambda x: {"seeds": x.seeds.int()},
        lambda x: {"temperature": x.temperature.double()},
        lambda x: {"pos": x.pos[:3]},
        lambda x: {"idx_mapping": x.idx_mapping.float()},
        lambda x: {"logits_cache": x.logits_cache.transpose(1, 2).contiguous().transpose(1, 2)},
    ],
)
def test_metadata_errors_are_those_of_eager(change: Any) -> None:
    """The same text inside the compiler's wrapper, and nothing is written."""

    def step(x: Inputs) -> None:
        x.draft_tokens[:, 0] = sample(x.base[:, 0] + x.bias, x)

    x = make_inputs()
    x = x._replace(**change(x))
    kept = copied(x)
    with pytest.raises((TypeError, ValueError)) as eager:
        step(x)
    with pytest.raises(Exception) as compiled:  # noqa: PT011
        torch.compile(step, backend="dspark")(x)
    assert str(eager.value) in str(compiled.value)
    for got, expected in zip(x, kept, strict=True):
        assert torch.equal(bits(got), bits(expected))


# Ahead of time


class Step(torch.nn.Module):
    """What `torch.export` takes: plain tensors."""

    def forward(self, base, bias, idx_mapping, temperature, seeds, pos, cache, draft_tokens):
        block_max, block_argmax = gumbel_block_argmax(
            base + bias,
            idx_mapping,
            temperature,
            seeds,
            pos - 1,
            logits_cache=cache,
            cache_col=1,
            is_drafting=True,
        )
        token = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)
        draft_tokens[:, 1] = token
        return token


def step_args(num_rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    x = make_inputs(num_rows, seed=seed)
    rows = (x.base[:, 0].contiguous(), x.bias, x.idx_mapping[:, 0].contiguous())
    state = (x.temperature, x.seeds, x.pos[:, 0].contiguous(), x.logits_cache, x.draft_tokens)
    return (*rows, *state)


@pytest.mark.parametrize("dynamic", [False, True])
def test_ahead_of_time(dynamic: bool, tmp_path: Path) -> None:
    args = step_args(4)
    shapes = None
    if dynamic:
        num_rows = torch.export.Dim("num_rows", min=2, max=64)
        num_slots = torch.export.Dim("num_slots", min=2, max=128)
        by_row, by_slot = {0: num_rows}, {0: num_slots}
        shapes = (*[by_row] * 3, by_slot, by_slot, by_row, by_slot, by_row)
    program = torch.export.export(Step(), args, dynamic_shapes=shapes)
    passes = inductor_passes.options()[SLOT]
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "step.pt2"), inductor_configs={SLOT: passes}
    )
    assert [site.fused for site in inductor_passes.report().sites] == [True]
    loaded = torch._inductor.aoti_load_package(package)
    for num_rows in (4, 9) if dynamic else (4,):
        assert_as_eager(loaded, Step(), *step_args(num_rows, seed=1))


def test_exported_program_holds_the_unfused_op() -> None:
    program = torch.export.export(Step(), step_args(4))
    targets = {str(node.target) for node in program.graph.nodes}
    assert "dspark.gumbel_block_argmax_cache.default" in targets
    compiled = Compiled(program.module())
    assert_as_eager(compiled, Step(), *step_args(4))
    assert compiled.fused(SAMPLER) == 1


def test_op_is_where_it_was_in_nested_regions() -> None:
    @torch.compiler.nested_compile_region
    def region(logits, bias, idx_mapping, temperature, seeds, pos):
        return choose(*gumbel_block_argmax(logits + bias, idx_mapping, temperature, seeds, pos - 1))

    def step(*args: Tensor) -> Tensor:
        return region(*args) + 1

    compiled = Compiled(step, backend="dspark")
    assert_as_eager(compiled, step, *step_args(4)[:6])
    assert compiled.fused(SAMPLER) == 1
    assert any("dspark.gumbel_sample" in ops_in(graph) for graph in compiled.graphs)


def test_graph_partition_and_lists_of_options() -> None:
    with inductor_config.patch(graph_partition=True):
        compiled = Compiled(draft_loop, backend="dspark")
        assert_as_eager(compiled, draft_loop, make_inputs())
    assert compiled.fused(SAMPLER) == 3
