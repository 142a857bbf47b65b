"""top_k_top_p_ as an op: in place and not, compilation, fake outputs, refused metadata, poison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import dspark_ops

from .top_k_top_p_cases import (
    I32,
    IMPLEMENTATIONS,
    INF,
    Cpu,
    Kernels,
    Ops,
    check,
    filtered,
    make_filters,
    make_rows,
    module,
    rows_of_all_kinds,
    same_bits,
)
from .top_k_top_p_model import assert_kept


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return IMPLEMENTATIONS[request.param]


def batch(num_rows: int = 4, vocab: int = 300, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return make_rows("normal", num_rows, vocab, seed), *make_filters(num_rows, vocab, seed)


# Two ops and a function


def sample_calls() -> list[Any]:
    return [pytest.param(*args, id=f"{n}") for n, (_, args, _) in enumerate(samples())]


def samples() -> list[Any]:
    return [call for call in module.sample_inputs("cpu") if call[0] == "top_k_top_p_"]


@pytest.mark.parametrize(("logits", "k", "p", "mask_value"), sample_calls())
def test_samples(ops: Ops, logits, k, p, mask_value) -> None:
    check(ops, logits, k, p, mask_value)


def test_samples_cover_both_ops_and_every_filter() -> None:
    calls = module.sample_inputs("cpu")
    assert {name for name, _, _ in calls} == {"top_k_top_p_", "top_k_top_p"}
    given = {(args[1] is not None, args[2] is not None) for _, args, _ in samples()}
    assert given == {(True, True), (True, False), (False, True), (False, False)}
    assert {args[3] for _, args, _ in samples()} > {-INF}


def test_the_public_function_returns_the_tensor_it_was_given() -> None:
    rows, k, p = batch()
    logits = rows.clone()
    assert dspark_ops.top_k_top_p_(logits) is logits
    assert same_bits(logits, rows)
    assert dspark_ops.top_k_top_p_(logits, k, p, mask_value=-1e4) is logits
    assert_kept(rows, logits, k, p, -1e4)


def test_defaults_are_no_filter_and_minus_inf() -> None:
    rows = make_rows("normal", 2, 50, 0)
    out = dspark_ops.top_k_top_p_(rows.clone(), p=torch.tensor([0.0, 1.0]))
    assert (out[0] == -INF).sum() == 49
    assert same_bits(out[1], rows[1])


def test_the_op_that_is_not_in_place(ops: Ops) -> None:
    """Leaves its input as it is; the same bits in a contiguous tensor of its own."""
    rows = rows_of_all_kinds(1, 300, 2).to(ops.device)
    k, p = (x.to(ops.device) for x in make_filters(len(rows), 300, 2))
    wanted = filtered(ops, rows, k, p, -7.5)
    wide = torch.full((len(rows), 3, 310), 9.0, device=ops.device)
    wide[:, 1, 4:304] = rows
    for logits in (rows.clone(), wide[:, 1, 4:304]):
        out = ops.top_k_top_p(logits, k, p, mask_value=-7.5)
        assert same_bits(out, wanted)
        assert same_bits(logits, rows)
        assert out.is_contiguous()
        assert out.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()


def test_an_expanded_row_without_writing_into_it(ops: Ops) -> None:
    row = make_rows("normal", 1, 300, 3).to(ops.device)
    k = torch.tensor([5, 0, 300, 1, 2], dtype=I32, device=ops.device)
    p = torch.tensor([0.9, 0.5, 1.0, 0.1, 0.0], device=ops.device)
    out = ops.top_k_top_p(row.expand(5, 300), k, p)
    assert same_bits(out, filtered(ops, row.repeat(5, 1), k, p))


def test_rows_that_overlap_without_writing_into_them(ops: Ops) -> None:
    """A sliding window: stride 1 in both dimensions."""
    rows = make_rows("normal", 1, 310, 4).to(ops.device).as_strided((10, 300), (1, 1))
    k, p = (x.to(ops.device) for x in make_filters(10, 300, 4))
    out = ops.top_k_top_p(rows, k, p)
    assert same_bits(out, filtered(ops, rows.contiguous(), k, p))


# Compilation


@pytest.mark.parametrize("mask_value", [-INF, -1e4])
def test_compiles_without_a_graph_break(mask_value: float) -> None:
    """Dynamic shapes, each size another: the second batch compiles nothing."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
        return dspark_ops.top_k_top_p_(logits, k, p, mask_value=mask_value)

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=True)
    for rows, k, p in (batch(4, 300), batch(7, 1025), batch(2, 64)):
        logits = rows.clone()
        assert same_bits(compiled(logits, k, p), filtered(Cpu, rows, k, p, mask_value))
        assert same_bits(logits, filtered(Cpu, rows, k, p, mask_value))
    assert len(graphs) == 1


def test_compiled_by_inductor() -> None:
    """A buffer of the graph's own, filtered in place, and the caller's."""
    torch._dynamo.reset()

    def call(logits: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        scaled = logits / 0.7
        dspark_ops.top_k_top_p_(scaled, k, p)
        probs = scaled.softmax(-1)
        dspark_ops.top_k_top_p_(logits, k, None, mask_value=-9.0)
        return scaled, probs.sum(-1), logits + 1

    rows, k, p = batch(5)
    eager_logits, logits = rows.clone(), rows.clone()
    wanted = call(eager_logits, k, p)
    actual = torch.compile(call, fullgraph=True)(logits, k, p)
    assert same_bits(actual[0], wanted[0])
    assert torch.allclose(actual[1], wanted[1])
    assert same_bits(actual[2], wanted[2])
    assert same_bits(logits, eager_logits)


def test_fake_outputs_of_symbolic_sizes() -> None:
    rows, k, p = batch()
    for logits in (rows, rows[:, 3:], rows[:1].expand(4, 300)):
        real = torch.ops.dspark.top_k_top_p(logits, k, p, -1.0)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fakes = [mode.from_tensor(x) for x in (logits, k, p)]
            fake = torch.ops.dspark.top_k_top_p(*fakes, -1.0)
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert fake.stride() == real.stride() == (logits.shape[1], 1)


# Poison


class _DoesNothing:
    __name__ = "does_nothing"

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def test_outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel writes cannot pass: a new tensor is NaN, the caller's is as it was."""
    names = [n for n in vars(module) if n.endswith("_kernel")]
    assert names
    for name in names:
        monkeypatch.setattr(module, name, _DoesNothing())
    for kept in ("_variants", "_plans"):
        if hasattr(module, kept):
            monkeypatch.setattr(module, kept, {})
    rows, k, p = (x.to(Kernels.device) for x in batch())
    assert Kernels.top_k_top_p(rows, k, p).isnan().all()
    assert same_bits(filtered(Kernels, rows, k, p), rows)


# Metadata

B, V = 3, 10


def good_arguments() -> dict[str, Any]:
    return {
        "logits": torch.randn(B, V, generator=torch.Generator().manual_seed(0)),
        "k": torch.tensor([3, 0, 1], dtype=I32),
        "p": torch.tensor([0.5, 1.0, 0.0]),
        "mask_value": -2.0,
    }


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


REFUSED = [
    ("logits", [[1.0]], TypeError, r"be a Tensor, got list: \[\[1\.0\]\]"),
    ("logits", torch.ones(B, V).bfloat16(), TypeError, "have dtype float32; got torch.bfloat16"),
    ("logits", torch.ones(B, V).half(), TypeError, "have dtype float32; got torch.float16"),
    ("logits", torch.ones(B, V).double(), TypeError, "have dtype float32; got torch.float64"),
    ("logits", torch.ones(B, V).int(), TypeError, "have dtype float32; got torch.int32"),
    ("logits", torch.ones(V), ValueError, r"have shape \[B, V\]; got \(10,\)"),
    ("logits", torch.ones(B, 1, V), ValueError, r"have shape \[B, V\]; got \(3, 1, 10\)"),
    ("logits", torch.ones(B, 0), ValueError, r"have 1 <= V .*; got \(3, 0\)"),
    ("logits", meta(B, 2**30 + 1), ValueError, r"have 1 <= V .*; got \(3, 1073741825\)"),
    ("logits", torch.ones(V, B).t(), ValueError, r"be contiguous .* strides \(1, 3\)"),
    ("logits", torch.ones(B, 2 * V)[:, ::2], ValueError, r"be contiguous .* strides \(20, 2\)"),
    ("k", 5, TypeError, "be a Tensor, got int: 5"),
    ("k", 2147483648, TypeError, "be a Tensor, got int: 2147483648"),
    ("k", [3, 0, 1], TypeError, r"be a Tensor, got list: \[3, 0, 1\]"),
    ("k", torch.tensor([3, 0, 2**31]), TypeError, "have dtype int32; got torch.int64"),
    ("k", torch.ones(B), TypeError, "have dtype int32; got torch.float32"),
    ("k", torch.ones(B).bool(), TypeError, "have dtype int32; got torch.bool"),
    ("k", torch.ones(B + 1).int(), ValueError, r"have shape \[B\] = \[3\], .*; got \(4,\)"),
    ("k", torch.ones(1).int(), ValueError, r"have shape \[B\] = \[3\], .*; got \(1,\)"),
    ("k", torch.tensor(3).int(), ValueError, r"have shape \[B\] = \[3\], .*; got \(\)"),
    ("k", torch.ones(B, 1).int(), ValueError, r"have shape \[B\] = \[3\], .*; got \(3, 1\)"),
    ("k", meta(B, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("p", 0.9, TypeError, r"be a Tensor, got float: 0\.9"),
    ("p", torch.ones(B).double(), TypeError, "have dtype float32; got torch.float64"),
    ("p", torch.ones(B).bfloat16(), TypeError, "have dtype float32; got torch.bfloat16"),
    ("p", torch.ones(B).int(), TypeError, "have dtype float32; got torch.int32"),
    ("p", torch.ones(B - 1), ValueError, r"have shape \[B\] = \[3\], .*; got \(2,\)"),
    ("p", torch.ones(B, 1), ValueError, r"have shape \[B\] = \[3\], .*; got \(3, 1\)"),
    ("p", meta(B), ValueError, "be on cpu.*; got meta"),
    ("mask_value", None, TypeError, "be a float, got NoneType: None"),
    ("mask_value", True, TypeError, "be a float, got bool: True"),
    ("mask_value", "-inf", TypeError, "be a float, got str: '-inf'"),
    ("mask_value", torch.tensor(-1.0), TypeError, "be a float, got Tensor: "),
    ("mask_value", -1e300, ValueError, r"be an f32 number or infinite; got -1e\+300"),
    ("mask_value", 3.5e38, ValueError, r"be an f32 number or infinite; got 3\.5e\+38"),
]
ONLY_IN_PLACE = [
    ("logits", torch.ones(1, V).expand(B, V), ValueError, r"have an address .* strides \(0, 1\)"),
    (
        "logits",
        torch.ones(V + B).as_strided((B, V), (1, 1)),
        ValueError,
        r"have .* strides \(1, 1\)",
    ),
    ("logits", torch.ones(1, 1).expand(B, 1), ValueError, r"have .* strides \(0, 1\)"),
]


def cases(refused: list[Any]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(refused)]


# What is no tensor or float is refused by the public function.
METADATA = [case for case in REFUSED if not case[3].startswith("be a")]


def assert_refused(call: Callable[..., Any], name: str, value: Any, error: Any, text: str) -> None:
    """``call`` raises and leaves the caller's tensors as they were."""
    arguments = {**good_arguments(), name: value}
    given = [x for x in arguments.values() if isinstance(x, Tensor) and not x.is_meta]
    before = [x.clone() for x in given]
    with pytest.raises(error, match=f"(?s){name} (is .* and )?must {text}"):
        call(**arguments)
    for x, old in zip(given, before, strict=True):
        assert torch.equal(x, old)


def test_good_arguments_are_taken() -> None:
    arguments = good_arguments()
    out = dspark_ops.top_k_top_p_(**arguments)
    assert ((out != -2.0).sum(1) == torch.tensor([1, V, 1]))[1:].all()


@pytest.mark.parametrize(("name", "value", "error", "text"), cases(REFUSED + ONLY_IN_PLACE))
def test_refused(name, value, error, text) -> None:
    assert_refused(dspark_ops.top_k_top_p_, name, value, error, text)


@pytest.mark.parametrize(("name", "value", "error", "text"), cases(METADATA + ONLY_IN_PLACE))
def test_refused_by_the_launcher(name, value, error, text) -> None:
    assert_refused(module._top_k_top_p_launch_, name, value, error, text)


@pytest.mark.parametrize(("name", "value", "error", "text"), cases(METADATA))
def test_refused_by_the_op_that_is_not_in_place(name, value, error, text) -> None:
    for call in (torch.ops.dspark.top_k_top_p, module._top_k_top_p_launch):
        assert_refused(call, name, value, error, text)


# The text would have the values of a tensor, which a compiler does not have.
COMPILED = [case for case in REFUSED + ONLY_IN_PLACE if "got Tensor" not in case[3]]


@pytest.mark.parametrize(("name", "value", "error", "text"), cases(COMPILED))
def test_refused_when_compiled(name, value, error, text) -> None:
    """The same text inside whatever exception the compiler wraps it in."""
    torch._dynamo.reset()
    compiled = torch.compile(dspark_ops.top_k_top_p_, fullgraph=True, backend="eager")
    assert_refused(compiled, name, value, Exception, text)


def test_a_vocabulary_beyond_the_masses_is_refused(ops: Ops) -> None:
    logits = torch.zeros(1, 2**22 + 1, device=ops.device)
    with pytest.raises(ValueError, match=r"logits must have V <= 2\^22 columns"):
        ops.top_k_top_p(logits, None, None)
