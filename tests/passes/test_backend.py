"""Options, modes, other people's passes, threads and recompilation."""

import pickle
import threading
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import inductor_passes
from inductor_passes.passes import DsparkPasses

from .compiling import SLOT, Compiled
from .inputs import Inputs, assert_as_eager, copied, make_inputs
from .spellings import column_write, sample, view

HAS_LISTS = torch.__version__ >= "2.13"


def fused() -> int:
    return counters["dspark"]["sampler_fusion.fused"]


# Ways to switch the passes on


def test_backend_by_name() -> None:
    assert "dspark" in torch._dynamo.list_backends()
    assert_as_eager(torch.compile(view, backend="dspark"), view, make_inputs())
    assert fused() == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "default"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"epilogue_fusion": False}},
        {"options": {"dspark.numerics": "lossless", "max_autotune": False}},
        {"options": {"dspark.strict": True}, "dynamic": True},
        {"fullgraph": True, "dynamic": False},
    ],
    ids=str,
)
def test_arguments_of_compile(arguments: dict[str, Any]) -> None:
    compiled = torch.compile(column_write, backend="dspark", **arguments)
    assert_as_eager(compiled, column_write, make_inputs())
    assert fused() == 1


def test_inductor_options_reach_inductor() -> None:
    seen = []

    def look(graph: Graph) -> None:
        seen.append((inductor_config.epilogue_fusion, inductor_config.max_autotune))

    options = {"epilogue_fusion": False, "max_autotune": True, SLOT: look}
    torch.compile(view, backend="dspark", options=options)(make_inputs())
    assert seen == [(False, True)]


def test_stock_backend_with_options() -> None:
    compiled = torch.compile(view, options=inductor_passes.options({"epilogue_fusion": False}))
    assert_as_eager(compiled, view, make_inputs())
    assert fused() == 1


def test_enabled() -> None:
    before = inductor_config.save_config_portable()
    with inductor_passes.enabled():
        assert_as_eager(torch.compile(view), view, make_inputs())
    assert fused() == 1
    assert inductor_config.save_config_portable() == before
    torch._dynamo.reset()
    torch.compile(view)(make_inputs())
    assert fused() == 1


def test_enabled_restores_after_an_error() -> None:
    before = getattr(inductor_config, SLOT)
    with pytest.raises(KeyError), inductor_passes.enabled():
        raise KeyError
    assert getattr(inductor_config, SLOT) is before


def test_enabled_inside_enabled() -> None:
    with inductor_passes.enabled({"dspark.combine_fusion": False}), inductor_passes.enabled():
        torch.compile(view)(make_inputs())
    assert len(inductor_passes.report().sites) == 1


def test_unrelated_compile_has_no_passes() -> None:
    torch.compile(view, backend="dspark")(make_inputs())
    assert inductor_passes.report().graphs == 1
    torch.compile(lambda x: x + 1)(torch.ones(3))
    assert inductor_passes.report().graphs == 1


def test_another_thread() -> None:
    compiled = torch.compile(view, backend="dspark")
    by_options = torch.compile(column_write, options=inductor_passes.options())
    errors: list[BaseException] = []

    def run() -> None:
        try:
            assert_as_eager(compiled, view, make_inputs())
            assert_as_eager(by_options, column_write, make_inputs())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert fused() == 2


# Options


@pytest.mark.parametrize("call", [inductor_passes.options, inductor_passes.enabled])
def test_unknown_option(call: Any) -> None:
    def enter() -> None:
        with call({"dspark.numeric": "lossless"}):
            pass

    with pytest.raises(ValueError, match=r"unknown option 'dspark\.numeric'") as raised:
        enter()
    for known in ("dspark.numerics", "dspark.strict", "dspark.sampler_fusion"):
        assert known in str(raised.value)


def test_unknown_option_of_the_backend() -> None:
    with pytest.raises(Exception, match=r"option 'dspark\.fuse'; known are dspark\.combine"):
        torch.compile(view, backend="dspark", options={"dspark.fuse": 1})(make_inputs())


@pytest.mark.parametrize(
    ("option", "value"),
    [("dspark.numerics", "exact"), ("dspark.strict", 1), ("dspark.sampler_fusion", "no")],
)
def test_unknown_value(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"option '{option}' must be one of .* got {value!r}"):
        inductor_passes.options({option: value})


def test_unknown_inductor_option() -> None:
    with pytest.raises(RuntimeError, match="epilog_fusion"):
        inductor_passes.options({"epilog_fusion": True})


def test_unknown_mode() -> None:
    with pytest.raises(RuntimeError, match="fastest"):
        inductor_passes.options(mode="fastest")


@pytest.mark.parametrize("name", ["sampler_fusion", "combine_fusion"])
def test_switched_off(name: str) -> None:
    compiled = Compiled(view, options={f"dspark.{name}": False})
    assert_as_eager(compiled, view, make_inputs())
    assert name not in {site.pass_name for site in compiled.sites}
    assert f"{name} is switched off" in inductor_passes.report().notes


def test_caller_keeps_its_options() -> None:
    options = {"dspark.strict": True, "epilogue_fusion": False}
    kept = dict(options)
    inductor_passes.options(options)
    assert options == kept


# Passes of others in the same slot


class Named(CustomGraphPass):
    def __init__(self, name: str | None, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def __call__(self, graph: Graph) -> None:
        self.calls.append(str(self.name))

    def uuid(self) -> str | None:
        return self.name


def own_passes(kind: str, calls: list[str]) -> Any:
    if kind == "callable":
        return lambda graph: calls.append("a")
    if kind == "CustomGraphPass":
        return Named("a", calls)
    return [Named("a", calls), Named("b", calls)]


KINDS = ["callable", "CustomGraphPass"] + ["list"] * HAS_LISTS


@pytest.mark.parametrize("kind", KINDS)
def test_own_pass_by_option(kind: str) -> None:
    calls: list[str] = []
    compiled = torch.compile(view, backend="dspark", options={SLOT: own_passes(kind, calls)})
    assert_as_eager(compiled, view, make_inputs())
    assert calls == ["a", "b"][: 1 + (kind == "list")]
    assert fused() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_own_pass_by_config(kind: str) -> None:
    calls: list[str] = []
    own = own_passes(kind, calls)
    with inductor_config.patch({SLOT: own}):
        with inductor_passes.enabled():
            torch.compile(view)(make_inputs())
        assert getattr(inductor_config, SLOT) is own
        torch._dynamo.reset()
        torch.compile(view)(make_inputs())
    expected = ["a", "b"][: 1 + (kind == "list")]
    assert calls == expected * 2
    assert fused() == 1


def test_own_pass_of_the_config_runs_in_the_backend() -> None:
    calls: list[str] = []
    with inductor_config.patch({SLOT: Named("a", calls)}):
        torch.compile(view, backend="dspark")(make_inputs())
    assert calls == ["a"]


def test_own_pass_sees_the_rewritten_graph() -> None:
    compiled = Compiled(view)
    compiled(make_inputs())
    assert any("gumbel_sample" in line for line in compiled.graphs[0])


# Identity


def passes(options: dict[str, Any] | None = None, present: Any = None) -> DsparkPasses:
    with inductor_config.patch({SLOT: present}):
        return inductor_passes.options(options)[SLOT]


def test_equal_options_are_equal_passes() -> None:
    assert passes() == passes({"dspark.strict": False})
    assert hash(passes()) == hash(passes())
    assert passes().uuid() == passes().uuid() != ""


def test_uuid_follows_the_options() -> None:
    variants = [
        passes(),
        passes({"dspark.numerics": "lossless"}),
        passes({"dspark.strict": True}),
        passes({"dspark.sampler_fusion": False}),
        passes({"dspark.combine_fusion": False}),
        passes(present=Named("a", [])),
        passes(present=Named("b", [])),
    ]
    assert len({p.uuid() for p in variants}) == len(variants)


def test_uuid_follows_the_order_of_wrapped_passes() -> None:
    a, b = Named("a", []), Named("b", [])
    assert passes(present=[a, b]).uuid() != passes(present=[b, a]).uuid()


@pytest.mark.parametrize(
    "own", [Named(None, []), Named("", []), print], ids=["None", "empty", "callable"]
)
def test_no_uuid_where_a_wrapped_pass_has_none(own: Any) -> None:
    assert passes(present=own).uuid() is None


def test_pickles() -> None:
    kept = passes({"dspark.numerics": "lossless"})
    again = pickle.loads(pickle.dumps(kept))
    assert again == kept
    assert again.uuid() == kept.uuid()


# Recompilation


def compiled_frames() -> int:
    return counters["stats"]["unique_graphs"]


def test_equal_options_recompile_nothing() -> None:
    x = make_inputs()
    for _ in range(3):
        torch.compile(view, options=inductor_passes.options())(copied(x))
    assert compiled_frames() == 1
    torch.compile(view, options=inductor_passes.options({"dspark.strict": True}))(copied(x))
    assert compiled_frames() == 2


def test_no_recompilation_over_batches() -> None:
    def step(x: Inputs) -> None:
        x.draft_tokens[:, 0] = sample(x.base[:, 0] + x.bias, x, 0)

    compiled = torch.compile(step, backend="dspark")
    sizes = [3, 5, *range(2, 65)]
    for count, num_rows in enumerate(sizes):
        compiled(make_inputs(num_rows, vocab=64))
        assert compiled_frames() == min(count + 1, 2)
    assert fused() == 2
    compiled(make_inputs(1, vocab=64))  # 1 is a size of its own: the count can rise
    assert compiled_frames() == 3
