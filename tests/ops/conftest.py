"""The two implementations of each op: the CPU reference and the Triton kernel.

The kernel runs under Triton's interpreter on CPU tensors, and compiled where there is a GPU.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_ops


def op_module(name: str) -> ModuleType:
    """``dspark_ops.<name>`` the module: the package has a function of the same name."""
    return importlib.import_module(f"dspark_ops.{name}")


def _with_column(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher behind the public signature, where a column is an int or a tensor."""

    def call(*args: Tensor, cache_col: int | Tensor | None = None, **kwargs: Any) -> Any:
        if isinstance(cache_col, Tensor):
            return launch(*args, cache_col=0, cache_cols=cache_col, **kwargs)
        return launch(*args, cache_col=cache_col or 0, **kwargs)

    return call


class Reference:
    """The public functions on CPU tensors, through ``torch.ops.dspark``."""

    device = "cpu"
    gumbel_block_argmax = staticmethod(dspark_ops.gumbel_block_argmax)
    gumbel_combine = staticmethod(dspark_ops.gumbel_combine)
    gumbel_sample = staticmethod(dspark_ops.gumbel_sample)
    prepare_positions = staticmethod(dspark_ops.prepare_positions)
    prepare_dflash_inputs = staticmethod(dspark_ops.prepare_dflash_inputs)


class Kernel:
    """The launchers, which take CPU tensors where Triton interprets."""

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gumbel_block_argmax = staticmethod(
        _with_column(op_module("gumbel_block_argmax")._gumbel_block_argmax_launch)
    )
    gumbel_combine = staticmethod(op_module("gumbel_combine")._gumbel_combine_launch)
    gumbel_sample = staticmethod(_with_column(op_module("gumbel_sample")._gumbel_sample_launch))
    prepare_positions = staticmethod(op_module("prepare_positions")._prepare_positions_launch)
    prepare_dflash_inputs = staticmethod(
        op_module("prepare_dflash_inputs")._prepare_dflash_inputs_launch
    )


@pytest.fixture(autouse=True)
def _poison(poisoned_empty: None) -> None:
    """No test of an op runs without."""


IMPLEMENTATIONS = {"reference": Reference, "kernel": Kernel}


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> type[Reference] | type[Kernel]:
    return IMPLEMENTATIONS[request.param]


class Sampler:
    """Tokens in one op or in two, for the clauses that both have to keep."""

    def __init__(self, ops: Any, fused: bool) -> None:
        self.ops, self.fused, self.device = ops, fused, ops.device

    def __call__(self, *args: Tensor, **kwargs: Any) -> Tensor:
        if self.fused:
            return self.ops.gumbel_sample(*args, **kwargs)
        return self.ops.gumbel_combine(*self.ops.gumbel_block_argmax(*args, **kwargs))


@pytest.fixture(params=["sample", "block_argmax+combine"])
def sampler(request: pytest.FixtureRequest, ops: Any) -> Sampler:
    return Sampler(ops, request.param == "sample")


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make every program of ``gumbel_sample`` walk this many tiles, as large batches do."""
    module = op_module("gumbel_sample")

    def patch(tiles: int) -> None:
        monkeypatch.setattr(module, "_tiles_per_chunk", lambda num_rows, vocab: tiles)
        monkeypatch.setattr(module, "_plans", {})

    return patch
