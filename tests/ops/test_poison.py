"""The poison that the other tests rely on reaches the outputs of the ops."""

from typing import Any

import pytest
import torch

from .cases import make_cache, make_inputs
from .conftest import Kernel, op_module

POISON = torch.iinfo(torch.int64).max


class _DoesNothing:
    """A kernel that writes nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def _silence(monkeypatch: pytest.MonkeyPatch, op: str, *kernels: str) -> None:
    for kernel in kernels:
        for name in (kernel, kernel.replace("_kernel", "_unaligned_kernel")):
            if hasattr(op_module(op), name):
                monkeypatch.setattr(op_module(op), name, _DoesNothing())


def test_block_argmax_outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    _silence(monkeypatch, "gumbel_block_argmax", "_gumbel_block_argmax_kernel")
    block_max, block_argmax = Kernel.gumbel_block_argmax(*make_inputs(Kernel.device, 1025).args)
    assert block_max.isnan().all()
    assert (block_argmax == POISON).all()


def test_combine_output_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    _silence(monkeypatch, "gumbel_combine", "_gumbel_combine_kernel")
    block_max = torch.zeros(2, 3, device=Kernel.device)
    assert (Kernel.gumbel_combine(block_max, block_max.long()) == POISON).all()


def test_sample_outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    _silence(monkeypatch, "gumbel_sample", "_gumbel_sample_kernel", "_gumbel_sample_finish_kernel")
    inputs = make_inputs(Kernel.device, 7)
    weight = torch.zeros(7, 4, device=Kernel.device)
    token, embedding = Kernel.gumbel_sample(*inputs.args, embed_weight=weight)
    assert (token == POISON).all()
    assert embedding.isnan().all()


def test_sample_partials_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first kernel leaves out, the second reads: ids out of range, not stale memory."""
    _silence(monkeypatch, "gumbel_sample", "_gumbel_sample_kernel")
    inputs = make_inputs(Kernel.device, 7)
    cache = make_cache(Kernel.device, 7, torch.float32)
    token = Kernel.gumbel_sample(*inputs.args, logits_cache=cache, cache_col=0)
    assert (token == 0).all()  # the id in an int64 maximum: 0x7FFFFFFF - 0x7FFFFFFF
    token = Kernel.gumbel_sample(*inputs.args, use_fp64=True)
    assert (token == POISON).all()
