"""Bad metadata: the right error, naming argument and value, eager and compiled; nothing written.

The same arguments are refused by ``gumbel_sample`` and, where it has them, ``gumbel_block_argmax``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ops

B, V, S, C = 3, 10, 4, 2
I32, I64 = torch.int32, torch.int64


def good_arguments() -> dict[str, Any]:
    return {
        "logits": torch.ones(B, V),
        "idx_mapping": torch.tensor([0, 2, -1], dtype=I32),
        "temperature": torch.ones(S),
        "seeds": torch.arange(S),
        "pos": torch.arange(B),
        "bias": torch.ones(B, V),
        "logits_cache": torch.full((S, C, V), 7.0),
        "cache_col": 1,
        "draft_tokens": torch.full((B,), -9),
    }


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# argument, value, error, what the text has after "<argument> must"
REFUSED = [
    ("logits", [[1.0]], TypeError, r"be a Tensor, got list: \[\[1\.0\]\]"),
    ("logits", torch.ones(B, V).double(), TypeError, "have dtype .*; got torch.float64"),
    ("logits", torch.ones(B, V).int(), TypeError, "have dtype .*; got torch.int32"),
    ("logits", torch.ones(V), ValueError, r"have shape \[B, V\]; got \(10,\)"),
    ("logits", torch.ones(B, 1, V), ValueError, r"have shape \[B, V\]; got \(3, 1, 10\)"),
    ("logits", torch.ones(B, 0), ValueError, r"have 1 <= V .*; got \(3, 0\)"),
    ("logits", meta(B, 2**30 + 1), ValueError, r"have 1 <= V .*; got \(3, 1073741825\)"),
    ("logits", torch.ones(V, B).t(), ValueError, r"be contiguous .* strides \(1, 3\)"),
    ("logits", torch.ones(B, 2 * V)[:, ::2], ValueError, r"be contiguous .* strides \(20, 2\)"),
    ("idx_mapping", [0, 1, 2], TypeError, r"be a Tensor, got list: \[0, 1, 2\]"),
    ("idx_mapping", torch.ones(B), TypeError, "have dtype .*; got torch.float32"),
    ("idx_mapping", torch.ones(B, dtype=torch.bool), TypeError, "have dtype .*; got torch.bool"),
    ("idx_mapping", torch.ones(B, 1, dtype=I32), ValueError, r"have shape .*; got \(3, 1\)"),
    ("idx_mapping", torch.ones(B + 1, dtype=I32), ValueError, r"have shape .*; got \(4,\)"),
    ("idx_mapping", torch.tensor(0), ValueError, r"have shape .*; got \(\)"),
    ("idx_mapping", meta(B, dtype=I32), ValueError, "be on cpu.*; got meta"),
    ("temperature", 1.0, TypeError, "be a Tensor, got float: 1.0"),
    ("temperature", torch.ones(S).double(), TypeError, "have dtype float32; got torch.float64"),
    ("temperature", torch.ones(S).half(), TypeError, "have dtype float32; got torch.float16"),
    ("temperature", torch.ones(S).int(), TypeError, "have dtype float32; got torch.int32"),
    ("temperature", torch.ones(S, 1), ValueError, r"have shape \[S\]; got \(4, 1\)"),
    ("temperature", torch.ones(2 * S)[::2], ValueError, r"be contiguous .* strides \(2,\)"),
    ("temperature", meta(S), ValueError, "be on cpu.*; got meta"),
    ("seeds", None, TypeError, "be a Tensor, got NoneType: None"),
    ("seeds", torch.arange(S, dtype=I32), TypeError, "have dtype int64; got torch.int32"),
    ("seeds", torch.ones(S), TypeError, "have dtype int64; got torch.float32"),
    ("seeds", torch.arange(S + 1), ValueError, r"have the shape .*\(4,\); got \(5,\)"),
    ("seeds", torch.arange(S)[None], ValueError, r"have shape \[S\]; got \(1, 4\)"),
    ("seeds", torch.arange(2 * S)[::2], ValueError, r"be contiguous .* strides \(2,\)"),
    ("seeds", meta(S, dtype=I64), ValueError, "be on cpu.*; got meta"),
    ("pos", 5, TypeError, "be a Tensor, got int: 5"),
    ("pos", torch.ones(B), TypeError, "have dtype .*; got torch.float32"),
    ("pos", torch.arange(B - 1), ValueError, r"have shape .*; got \(2,\)"),
    ("pos", torch.arange(B)[None], ValueError, r"have shape .*; got \(1, 3\)"),
    ("pos", meta(B, dtype=I64), ValueError, "be on cpu.*; got meta"),
    ("pos_offset", 1.5, TypeError, "be an int, got float: 1.5"),
    ("pos_offset", True, TypeError, "be an int, got bool: True"),
    ("pos_offset", torch.tensor(1), TypeError, r"be an int, got Tensor.*; pass int\(pos_offset\)"),
    ("is_drafting", "yes", TypeError, "be True or False, got str: 'yes'"),
    ("is_drafting", None, TypeError, "be True or False, got NoneType: None"),
    ("apply_temperature", 0, TypeError, "be True or False, got int: 0"),
    (
        "apply_temperature",
        torch.tensor(True),
        TypeError,
        "be True or False, got Tensor.*; pass bool",
    ),
    ("use_fp64", "yes", TypeError, "be True or False, got str: 'yes'"),
    ("use_fp64", 1.0, TypeError, "be True or False, got float: 1.0"),
    (
        "use_fp64",
        np.True_,
        TypeError,
        r"be True or False, got (bool|ndarray).*; pass bool\(use_fp64\)",
    ),
    ("bias", 1.0, TypeError, "be a Tensor, got float: 1.0"),
    ("bias", torch.ones(B, V).double(), TypeError, "have dtype .*; got torch.float64"),
    ("bias", torch.ones(B, V).int(), TypeError, "have dtype .*; got torch.int32"),
    ("bias", torch.tensor(1.0), ValueError, r"have shape .*; got \(\)"),
    ("bias", torch.ones(1), ValueError, r"have shape .*; got \(1,\)"),
    ("bias", torch.ones(B, 1), ValueError, r"have shape .*; got \(3, 1\)"),
    ("bias", torch.ones(2, V), ValueError, r"have shape .*; got \(2, 10\)"),
    ("bias", torch.ones(1, 1, V), ValueError, r"have shape .*; got \(1, 1, 10\)"),
    ("bias", torch.ones(V, B).t(), ValueError, r"be contiguous .* strides \(1, 3\)"),
    ("bias", meta(B, V), ValueError, "be on cpu.*; got meta"),
    ("logits_cache", None, ValueError, "be given with cache_col; got None and cache_col=1"),
    ("logits_cache", [1.0], TypeError, r"be a Tensor, got list: \[1\.0\]"),
    (
        "logits_cache",
        torch.ones(S, C, V).half(),
        ValueError,
        "have the dtype .*; got torch.float16",
    ),
    ("logits_cache", torch.ones(S, V), ValueError, r"have shape .*; got \(4, 10\)"),
    ("logits_cache", torch.ones(S, C, V - 1), ValueError, r"have shape .*; got \(4, 2, 9\)"),
    ("logits_cache", torch.ones(S - 1, C, V), ValueError, r"have shape .*; got \(3, 2, 10\)"),
    ("logits_cache", torch.ones(S, V, C).mT, ValueError, r"be contiguous .* strides \(20, 1, 2\)"),
    ("logits_cache", meta(S, C, V), ValueError, "be on cpu.*; got meta"),
    ("cache_col", None, ValueError, "be given with logits_cache.*; got None"),
    ("cache_col", -1, ValueError, "be in .*; got -1"),
    ("cache_col", 2**31, ValueError, "be in .*; got 2147483648"),
    ("cache_col", 1.0, TypeError, "be an int, got float: 1.0"),
    ("cache_col", False, TypeError, "be an int, got bool: False"),
    ("cache_col", "1", TypeError, "be an int, got str: '1'"),
    ("cache_col", np.True_, TypeError, r"be an int, got (bool|ndarray).*; pass int\(cache_col\)"),
    (
        "cache_col",
        np.float32(1),
        TypeError,
        r"be an int, got (float32|ndarray).*; pass int\(cache_col\)",
    ),
    ("cache_col", torch.tensor(1.0), TypeError, "have dtype .*; got torch.float32"),
    ("cache_col", torch.ones(B), TypeError, "have dtype .*; got torch.float32"),
    ("cache_col", torch.arange(B + 1), ValueError, r"have shape .*; got \(4,\)"),
    ("cache_col", torch.arange(B)[:, None], ValueError, r"have shape .*; got \(3, 1\)"),
    ("cache_col", meta(B, dtype=I64), ValueError, "be on cpu.*; got meta"),
    ("draft_tokens", [0, 0, 0], TypeError, r"be a Tensor, got list: \[0, 0, 0\]"),
    ("draft_tokens", torch.ones(B), TypeError, "have dtype .*; got torch.float32"),
    ("draft_tokens", torch.arange(B).short(), TypeError, "have dtype int32, int64; got .*int16"),
    ("draft_tokens", torch.arange(B + 2), ValueError, r"have shape .*; got \(5,\)"),
    ("draft_tokens", torch.arange(B)[:, None], ValueError, r"have shape .*; got \(3, 1\)"),
    ("draft_tokens", meta(B, dtype=I64), ValueError, "be on cpu.*; got meta"),
]
ONLY_SAMPLE = ("bias", "draft_tokens")


def cases() -> list[Any]:
    out = []
    for number, (name, value, error, text) in enumerate(REFUSED):
        for op in ("gumbel_sample", "gumbel_block_argmax"):
            if op == "gumbel_sample" or name not in ONLY_SAMPLE:
                out.append(pytest.param(op, name, value, error, text, id=f"{op}-{name}-{number}"))
    return out


def call(op: str, arguments: dict[str, Any]) -> Any:
    return getattr(dspark_ops, op)(**arguments)


def bad_arguments(op: str, name: str, value: Any) -> dict[str, Any]:
    arguments = {**good_arguments(), name: value}
    if op == "gumbel_block_argmax":
        for unknown in ONLY_SAMPLE:
            del arguments[unknown]
    return arguments


def assert_refused(
    function: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """``function`` raises and leaves the caller's tensors as they were."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor) and not x.is_meta]
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=text):
        function(arguments)
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x, old)


def test_good_arguments_are_taken() -> None:
    for op in ("gumbel_sample", "gumbel_block_argmax"):
        arguments = bad_arguments(op, "pos_offset", 0)
        call(op, arguments)
        assert (arguments["logits_cache"][2, 1] != 7.0).all()


@pytest.mark.parametrize(("op", "name", "value", "error", "text"), cases())
def test_refused(op: str, name: str, value: Any, error: type[Exception], text: str) -> None:
    arguments = bad_arguments(op, name, value)
    assert_refused(lambda kwargs: call(op, kwargs), arguments, error, f"{name} must {text}")


@pytest.mark.parametrize(("op", "name", "value", "error", "text"), cases())
def test_refused_when_compiled(op, name, value, error, text) -> None:
    """The same text inside whatever exception the compiler wraps it in."""
    torch._dynamo.reset()
    arguments = bad_arguments(op, name, value)
    compiled = torch.compile(lambda kwargs: call(op, kwargs), fullgraph=True, backend="eager")
    assert_refused(compiled, arguments, Exception, f"(?s){name} must {text}")


class Index:
    """An int to Python, of no type that is known."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


OPS = ("gumbel_sample", "gumbel_block_argmax")


def compiled_call(op: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda kwargs: call(op, kwargs), fullgraph=True, backend="eager")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, Index])
@pytest.mark.parametrize("op", OPS)
def test_whatever_has_an_index_is_an_int(op: str, kind: Callable[[int], Any]) -> None:
    wanted = bad_arguments(op, "pos_offset", 1)
    given = {**bad_arguments(op, "pos_offset", kind(1)), "cache_col": kind(1)}
    torch.testing.assert_close(call(op, given), call(op, wanted), rtol=0, atol=0)
    assert torch.equal(given["logits_cache"], wanted["logits_cache"])
    if kind is Index:
        torch.testing.assert_close(compiled_call(op)(given), call(op, wanted), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["pos_offset", "cache_col"])
@pytest.mark.parametrize("op", OPS)
def test_numpy_numbers_are_refused_when_compiled(op: str, name: str) -> None:
    """They are tensors of the graph, whose value is not known."""
    text = rf"{name} must be an int, got ndarray of no known value; pass int\({name}\) into"
    assert_refused(compiled_call(op), bad_arguments(op, name, np.int64(1)), Exception, text)


@pytest.mark.parametrize("op", OPS)
def test_symbolic_flags_and_numbers_are_traced(op: str) -> None:
    """Two batches of other sizes in one graph, where both sizes give the same flags."""
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(kwargs: dict[str, Any]) -> Any:
        rows = kwargs["logits"].shape[0]
        return call(op, {**kwargs, "pos_offset": rows, "is_drafting": rows > 1})

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for repeat in (1, 2):
        given = bad_arguments(op, "pos_offset", 0)
        for name in ("logits", "idx_mapping", "pos", "bias", "draft_tokens"):
            if name in given:
                given[name] = torch.cat([given[name]] * repeat)
        torch.testing.assert_close(compiled(given), function(given), rtol=0, atol=0)
    assert len(graphs) == 1
