"""The fused sampler equals eager for every dtype, size and mode of autograd."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from .compiling import SAMPLER, Compiled
from .inputs import BF16, DTYPES, Inputs, assert_as_eager, copied, make_inputs
from .spellings import FUSED, block_op_uncached, choose, sample


def step(x: Inputs) -> Tensor:
    """One of each kind: bias of three shapes, either operand first, with and without a cache."""
    x.draft_tokens[:, 0] = sample(x.base[:, 0] + x.bias, x, 0)
    x.draft_tokens[:, 1] = sample(x.bias[:1] + x.base[:, 1], x, 1)
    vector = x.w1[:, 0].contiguous().to(x.bias.dtype)
    x.draft_tokens[:, 2] = sample(x.base[:, 2] + vector, x, 2)
    return choose(*block_op_uncached(x.bias + x.base[:, 1], x))


@pytest.mark.parametrize(("dtype", "bias_dtype"), product(DTYPES, DTYPES))
def test_dtypes(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    compiled = Compiled(step)
    for seed in range(9):
        inputs = make_inputs(dtype=dtype, bias_dtype=bias_dtype, seed=seed)
        assert_as_eager(compiled, step, inputs)
    assert compiled.fused(SAMPLER) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_thousand_rows_with_ties(dtype: torch.dtype) -> None:
    """Multiples of 0.5, of which mixed dtypes round some pairs to equal values and others not."""

    def ties(x: Inputs) -> Tensor:
        return sample(x.base[:, 0] + x.bias, x)

    inputs = make_inputs(1000, 1025, dtype, BF16, num_steps=1)
    coarse = inputs._replace(
        base=(inputs.base * 2).round() / 2,
        bias=(inputs.bias * 2).round() / 2,
        temperature=torch.zeros_like(inputs.temperature),
    )
    compiled = Compiled(ties)
    assert_as_eager(compiled, ties, coarse)
    assert compiled.fused(SAMPLER) == 1


def test_sum_is_rounded_to_its_dtype_before_it_is_sampled() -> None:
    """In bf16 256 + 1 rounds to 256, a tie that id 0 wins; unrounded, id 1 would win."""

    def greedy(x: Inputs) -> Tensor:
        return sample(x.base[:, 0] + x.bias, x)

    inputs = make_inputs(1, 2)
    inputs.base[0, 0] = torch.tensor([256.0, 256.0])
    inputs.bias[0] = torch.tensor([0.0, 1.0])
    inputs.temperature.zero_()
    compiled = Compiled(greedy)
    run = copied(inputs)
    assert compiled(run).tolist() == [0]
    assert compiled.fused(SAMPLER) == 1
    assert run.logits_cache[run.idx_mapping[0, 0], 0].tolist() == [256.0, 256.0]


@pytest.mark.parametrize("vocab", [1, 2, 7, 1023, 1024, 1025, 2049])
def test_vocabularies(vocab: int) -> None:
    compiled = Compiled(step)
    for seed in range(3):
        assert_as_eager(compiled, step, make_inputs(vocab=vocab, seed=seed))
    assert compiled.fused(SAMPLER) == 4


@pytest.mark.parametrize("num_rows", [1, 2, 64])
def test_batches(num_rows: int) -> None:
    compiled = Compiled(step)
    assert_as_eager(compiled, step, make_inputs(num_rows))
    assert compiled.fused(SAMPLER) == 4


def test_empty_batch() -> None:
    compiled = Compiled(step)
    assert_as_eager(compiled, step, make_inputs(0))
    assert compiled.reasons(SAMPLER) == []
    assert compiled.fused(SAMPLER) == 4


def test_batch_becomes_dynamic() -> None:
    """The second batch size makes it a symbol; 0 and 1 have graphs of their own."""
    compiled = Compiled(step)
    for num_rows in (4, 2, 3, 8, 64, 1, 9, 7):
        assert_as_eager(compiled, step, make_inputs(num_rows, seed=num_rows))
    assert len(compiled.graphs) == 3
    assert compiled.fused(SAMPLER) == 4 * len(compiled.graphs)
    assert compiled.reasons(SAMPLER) == []
    assert_as_eager(compiled, step, make_inputs(0))


def test_first_rows_of_the_draft_tokens() -> None:
    """``draft_tokens[:n, i]`` with n below and at the size of the buffer."""

    def step(x: Inputs, draft_tokens: Tensor) -> Tensor:
        n = x.base.shape[0]
        draft_tokens[:n, 1] = sample(x.base[:, 1] + x.bias, x, 1)
        return draft_tokens[:, 1].sum()

    compiled = Compiled(step)
    for num_rows in (3, 5, 16, 4, 1, 2):
        inputs = make_inputs(num_rows, seed=num_rows)
        draft_tokens = torch.full((16, 3), -1, device=inputs.base.device)
        assert_as_eager(compiled, step, inputs, draft_tokens)
    assert compiled.reasons(SAMPLER) == []
    assert compiled.fused(SAMPLER) == len(compiled.graphs)


def test_vocabulary_becomes_dynamic() -> None:
    compiled = Compiled(step, dynamic=True)
    for vocab in (1300, 700, 2049):
        assert_as_eager(compiled, step, make_inputs(4, vocab, seed=vocab))
    assert compiled.reasons(SAMPLER) == []
    assert compiled.fused(SAMPLER) == 4 * len(compiled.graphs)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", ["column_write", "draft_loop", "next_embedding", "view"])
def test_autograd_modes(mode: Callable[[], object], name: str) -> None:
    spelling = FUSED[name]
    compiled = Compiled(spelling.function)
    with mode():
        for seed in range(2):
            assert_as_eager(compiled, spelling.function, make_inputs(seed=seed))
    assert compiled.fused(SAMPLER) == spelling.sites


class Head(torch.nn.Module):
    """A bias that comes from parameters, which require grad."""

    def __init__(self, x: Inputs, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.w1 = torch.nn.Embedding.from_pretrained(x.w1, freeze=False)
        self.w2 = torch.nn.Parameter(x.w2)
        self.bias = torch.nn.Parameter(x.bias[0])

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        bias = self.bias
        if self.kind == "linear":
            bias = torch.nn.functional.linear(self.w1(x.prev), self.w2)
        elif self.kind == "mm":
            bias = self.w1(x.prev) @ self.w2.t()
        elif self.kind == "embedding":
            bias = self.w1(x.prev).repeat(1, 200)[:, : x.base.shape[-1]]
        return sample(x.base[:, 0] + bias, x), bias


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["parameter", "embedding", "linear", "mm"])
def test_bias_from_parameters(kind: str, grad: bool) -> None:
    """From the sampler's inputs on: a GEMM may round otherwise once it is compiled."""
    head = Head(make_inputs(seed=5), kind)
    compiled = Compiled(head)

    def from_bias(x: Inputs, bias: Tensor) -> Tensor:
        return sample(x.base[:, 0] + bias, x)

    with torch.set_grad_enabled(grad):
        for seed in range(3):
            run = make_inputs(seed=seed)
            token, bias = compiled(run)
            given = bias.detach().clone()
            assert_as_eager(
                lambda x, _, token=token, run=run: _outcome(x, run, token),
                from_bias,
                make_inputs(seed=seed),
                given,
            )
    assert compiled.fused(SAMPLER) == 1
    assert compiled.reasons(SAMPLER) == []


def _outcome(x: Inputs, run: Inputs, token: Tensor) -> Tensor:
    """What was computed before, put where `assert_as_eager` looks."""
    x.logits_cache.copy_(run.logits_cache)
    return token
