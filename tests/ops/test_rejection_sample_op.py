"""rejection_sample as an op: samples, opcheck, compilation, fake outputs, refused metadata."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import dspark_ops

from .cases import F32
from .rejection_cases import I32, METHODS, Kernels, Ops, Reference, make_batch, module
from .rejection_model import assert_call

# What a GPU does without a word, numpy reports: log(0), inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")


@pytest.fixture(params=[Reference, Kernels], ids=["reference", "kernel"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param


# Registration


def sample_calls() -> list[Any]:
    calls = module.sample_inputs("cpu")
    return [pytest.param(*call[1:], id=str(n)) for n, call in enumerate(calls)]


@pytest.mark.parametrize(("args", "kwargs"), sample_calls())
def test_samples(ops: Ops, args, kwargs) -> None:
    args = [None if x is None else x.to(ops.device) for x in args]
    assert_call(ops, tuple(args), **kwargs)


@pytest.mark.parametrize(("args", "kwargs"), sample_calls())
def test_opcheck(args, kwargs) -> None:
    torch.library.opcheck(torch.ops.dspark.rejection_sample.default, args, kwargs)


def test_samples_cover_every_argument_and_method() -> None:
    calls = module.sample_inputs("cpu")
    assert {kwargs.get("method", "standard") for _, _, kwargs in calls} == set(METHODS)
    assert {args[1] is None for _, args, _ in calls} == {True, False}
    assert any(kwargs.get("use_fp64") for _, _, kwargs in calls)
    assert any(args[5].shape[0] == 0 for _, args, _ in calls)
    assert any(not args[0].is_contiguous() for _, args, _ in calls)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
def test_compiles_without_a_graph_break(has_draft: bool, method: str) -> None:
    """Dynamic shapes, each size another: the second batch compiles nothing."""
    torch._dynamo.reset()
    compiled_graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    def call(batch_args: tuple[Any, ...], num_steps: int) -> Any:
        return dspark_ops.rejection_sample(*batch_args, num_steps=num_steps, method=method)

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=True)
    for drafts, steps, vocab in (([2, 3, 1], 3, 50), ([4, 1, 0, 2, 4], 4, 31)):
        batch = make_batch("cpu", drafts, vocab, num_steps=6, has_draft=has_draft)
        wanted = call(batch.args, steps)
        actual = compiled(batch.args, steps)
        assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))
    assert len(compiled_graphs) == 1


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    batch = make_batch("cpu", [2, 3], 20)

    def call(*args: Any) -> Any:
        tokens, num_sampled, num_rejected = dspark_ops.rejection_sample(*args, num_steps=3)
        return tokens + 1, num_sampled * 2, num_rejected

    wanted = call(*batch.args)
    actual = torch.compile(call, fullgraph=True)(*batch.args)
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))


def test_fake_outputs_of_symbolic_sizes() -> None:
    batch = make_batch("cpu", [2, 3, 1], 50)
    real = dspark_ops.rejection_sample(*batch.args, num_steps=3)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = [mode.from_tensor(x) for x in batch.args]
        outputs = dspark_ops.rejection_sample(*fakes, num_steps=3)
    for fake, x in zip(outputs, real, strict=True):
        assert (fake.shape, fake.dtype, fake.device) == (x.shape, x.dtype, x.device)
        assert fake.is_contiguous()
        assert x.is_contiguous()


def test_outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel writes cannot pass."""

    class DoesNothing:
        __name__ = "does_nothing"

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: None

    for name in [n for n in vars(module) if n.endswith("_kernel")]:
        monkeypatch.setattr(module, name, DoesNothing())
    monkeypatch.setattr(module, "_variants", {})
    batch = make_batch(Kernels.device, [2, 3], 20)
    for x in Kernels.rejection_sample(*batch.args, num_steps=3):
        assert (x == torch.iinfo(x.dtype).max).all()


# Metadata

B, V, L, S, C = 3, 10, 7, 4, 2


def good_arguments() -> dict[str, Any]:
    return {
        "target_logits": torch.ones(L, V),
        "draft_logits": torch.ones(S, C, V + 1),
        "draft_token_ids": torch.zeros(L, dtype=I32),
        "cu_num_logits": torch.tensor([0, 3, 4, 7], dtype=I32),
        "pos": torch.arange(L),
        "idx_mapping": torch.tensor([0, 2, -1], dtype=I32),
        "temperature": torch.ones(S),
        "seeds": torch.arange(S),
        "num_steps": 2,
    }


def meta(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


REFUSED = [
    ("target_logits", [[1.0]], TypeError, r"be a Tensor, got list: \[\[1\.0\]\]"),
    ("target_logits", torch.ones(L, V).double(), TypeError, "have dtype .*; got torch.float64"),
    ("target_logits", torch.ones(V), ValueError, r"have shape \[L, V\]; got \(10,\)"),
    ("target_logits", torch.ones(L, 0), ValueError, r"have 1 <= V .*; got \(7, 0\)"),
    ("target_logits", torch.ones(V, L).t(), ValueError, r"be contiguous .* strides \(1, 7\)"),
    ("draft_logits", 1.0, TypeError, "be a Tensor, got float: 1.0"),
    ("draft_logits", torch.ones(S, C, V).int(), TypeError, "have dtype .*; got torch.int32"),
    ("draft_logits", torch.ones(S, V), ValueError, r"have shape .*; got \(4, 10\)"),
    ("draft_logits", torch.ones(S + 1, C, V), ValueError, r"have shape .*; got \(5, 2, 10\)"),
    ("draft_logits", torch.ones(S, 1, V), ValueError, r"have shape .*>= 2.*; got \(4, 1, 10\)"),
    ("draft_logits", torch.ones(S, C, V - 1), ValueError, r"have shape .*; got \(4, 2, 9\)"),
    ("draft_logits", torch.ones(S, V, C).mT, ValueError, r"be contiguous .* strides \(20, 1, 2\)"),
    ("draft_logits", meta(S, C, V), ValueError, "be on cpu.*; got meta"),
    ("draft_token_ids", [0] * L, TypeError, "be a Tensor, got list"),
    ("draft_token_ids", torch.ones(L), TypeError, "have dtype int32, int64; got torch.float32"),
    ("draft_token_ids", torch.zeros(L).short(), TypeError, "have dtype .*; got torch.int16"),
    ("draft_token_ids", torch.zeros(L - 1).int(), ValueError, r"have shape \[L\] .*; got \(6,\)"),
    ("draft_token_ids", meta(L, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("cu_num_logits", None, TypeError, "be a Tensor, got NoneType: None"),
    ("cu_num_logits", torch.zeros(B + 1).long(), TypeError, "have dtype int32; got torch.int64"),
    ("cu_num_logits", torch.zeros(B).int(), ValueError, r"have shape \[B \+ 1\] .*; got \(3,\)"),
    ("pos", 5, TypeError, "be a Tensor, got int: 5"),
    ("pos", torch.ones(L), TypeError, "have dtype .*; got torch.float32"),
    ("pos", torch.arange(B), ValueError, r"have shape \[L\] = \[7\]; got \(3,\)"),
    ("idx_mapping", torch.ones(B), TypeError, "have dtype .*; got torch.float32"),
    ("idx_mapping", torch.zeros(B, 1).int(), ValueError, r"have shape \[B\]; got \(3, 1\)"),
    ("idx_mapping", meta(B, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("temperature", torch.ones(S).double(), TypeError, "have dtype float32; got torch.float64"),
    ("temperature", torch.ones(2 * S)[::2], ValueError, r"be contiguous .* strides \(2,\)"),
    ("seeds", torch.arange(S + 1), ValueError, r"have the shape .*\(4,\); got \(5,\)"),
    ("num_steps", 1.5, TypeError, "be an int, got float: 1.5"),
    ("num_steps", True, TypeError, "be an int, got bool: True"),
    ("num_steps", np.True_, TypeError, r"be an int, got (bool|ndarray).*; pass int\(num_steps\)"),
    ("num_steps", torch.tensor(2), TypeError, r"be an int, got Tensor.*; pass int\(num_steps\)"),
    ("num_steps", -1, ValueError, "be the most draft tokens .*; got -1"),
    ("num_steps", 129, ValueError, "be the most draft tokens .*; got 129"),
    ("num_steps", 3, None, r"draft_logits must have shape .*>= 3.*; got \(4, 2, 11\)"),
    ("method", "blocks", ValueError, "be 'standard' or 'block'; got 'blocks'"),
    ("method", None, TypeError, "be a str, got NoneType: None"),
    ("use_fp64", "yes", TypeError, "be True or False, got str: 'yes'"),
    ("use_fp64", 1, TypeError, "be True or False, got int: 1"),
    (
        "use_fp64",
        np.False_,
        TypeError,
        r"be True or False, got (bool|ndarray).*; pass bool\(use_fp64\)",
    ),
]
CASES = [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(REFUSED)]


def assert_refused(call: Callable[..., Any], name, value, error, text) -> None:
    with pytest.raises(error or ValueError, match=text if error is None else f"{name} must {text}"):
        call(**{**good_arguments(), name: value})


def test_good_arguments_are_taken() -> None:
    assert dspark_ops.rejection_sample(**good_arguments())[1].tolist() == [3, 1, 0]
    given = {**good_arguments(), "num_steps": np.int64(2)}
    assert dspark_ops.rejection_sample(**given)[1].tolist() == [3, 1, 0]


@pytest.mark.parametrize(("name", "value", "error", "text"), CASES)
def test_refused(name, value, error, text) -> None:
    assert_refused(dspark_ops.rejection_sample, name, value, error, text)


# What is no tensor, int, bool or str is refused by the public function.
METADATA = [case for case in CASES if not case.values[3].startswith(("be a", "be True"))]


@pytest.mark.parametrize(("name", "value", "error", "text"), METADATA)
def test_refused_by_the_launcher(name, value, error, text) -> None:
    assert_refused(module._rejection_sample_launch, name, value, error, text)


@pytest.mark.parametrize(("name", "value", "error", "text"), CASES)
def test_refused_when_compiled(name, value, error, text) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dspark_ops.rejection_sample, fullgraph=True, backend="eager")
    wanted = text if error is None else f"{name} must {text}"
    with pytest.raises(Exception, match=f"(?s){wanted}"):
        compiled(**{**good_arguments(), name: value})
