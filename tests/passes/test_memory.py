"""Views, writes and shared memory: the passes move no read over a write and add no race.

Whether a site is fused is told by `test_sampler_fusion` and `test_left_alone`; here the outcome is
stated where the contract has one, and every case equals eager, in all that it wrote as well.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from .compiling import SAMPLER, Compiled, generated_code_of
from .inputs import DEVICE, Inputs, assert_as_eager, copied, make_inputs
from .spellings import draft_loop, sample


def bias_overwritten_between(x: Inputs) -> Tensor:
    logits = x.base[:, 0] + x.bias
    x.bias.copy_(x.other)
    return sample(logits, x)


def base_overwritten_between(x: Inputs) -> Tensor:
    logits = x.base[:, 0] + x.bias
    x.base.masked_fill_(x.base > 0, -1.0)
    return sample(logits, x)


def position_advanced_between(x: Inputs) -> Tensor:
    pos = x.pos[:, 0] - 1
    x.pos.add_(1)
    logits = x.base[:, 0] + x.bias
    return sample(logits, x._replace(pos=pos[:, None]))


def bias_updated_between_steps(x: Inputs) -> Tensor:
    first = sample(x.base[:, 0] + x.bias, x, 0)
    x.bias.mul_(-1)
    return first, sample(x.base[:, 1] + x.bias, x, 1)


def cache_cleared_between_steps(x: Inputs) -> Tensor:
    first = sample(x.base[:, 0] + x.bias, x, 0)
    x.logits_cache.fill_(3.0)
    return first, sample(x.base[:, 1] + x.bias, x, 1)


def column_overwritten_afterwards(x: Inputs) -> None:
    x.draft_tokens[:, 1] = sample(x.base[:, 1] + x.bias, x, 1)
    x.draft_tokens[:, 1:].add_(5)


def columns_swapped(x: Inputs) -> Tensor:
    old = x.draft_tokens[:, 0].clone()
    x.draft_tokens[:, 0] = sample(x.base[:, 1] + x.bias, x, 1)
    x.draft_tokens[:, 1] = old
    return x.draft_tokens.sum()


def cache_copied_before_it_is_written(x: Inputs) -> Tensor:
    kept = x.logits_cache.clone()
    token = sample(x.base[:, 0] + x.bias, x)
    return token, kept


def clone_of_the_cache_as_logits(x: Inputs) -> Tensor:
    """pytorch#198031: the clone is dropped, and the op reads what it writes."""
    base = x.logits_cache.clone()[: x.bias.shape[0], 1]
    return sample(base + x.bias, x, 1)


def copy_of_the_whole_cache_as_logits(x: Inputs) -> Tensor:
    """pytorch#198131: a copy of everything reads after a later write."""
    kept = torch.empty_like(x.logits_cache)
    kept[:] = x.logits_cache[:]
    return sample(kept[: x.bias.shape[0], 1] + x.bias, x, 1), kept


def draft_tokens_are_the_previous_tokens(x: Inputs) -> None:
    """The buffer that is written is read for the bias first."""
    bias = torch.nn.functional.embedding(x.draft_tokens[:, 0].abs() % 5, x.other[:5])
    x.draft_tokens[:, 0] = sample(x.base[:, 0] + bias, x)


def draft_tokens_are_the_positions(x: Inputs) -> None:
    """The column written is the one that keys the noise."""
    x.pos[:, 0] = sample(x.base[:, 0] + x.bias, x)


def draft_tokens_are_the_slots(x: Inputs) -> None:
    x.idx_mapping[:, 0] = sample(x.base[:, 0] + x.bias, x)


CASES = (
    bias_overwritten_between,
    base_overwritten_between,
    position_advanced_between,
    bias_updated_between_steps,
    cache_cleared_between_steps,
    column_overwritten_afterwards,
    columns_swapped,
    cache_copied_before_it_is_written,
    clone_of_the_cache_as_logits,
    copy_of_the_whole_cache_as_logits,
    draft_tokens_are_the_previous_tokens,
    draft_tokens_are_the_positions,
    draft_tokens_are_the_slots,
)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_writes(function, dynamic: bool | None) -> None:
    compiled = Compiled(function, dynamic=dynamic)
    for seed in range(3):
        assert_as_eager(compiled, function, make_inputs(seed=seed))
    assert compiled.sites


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_writes_in_generated_code(function) -> None:
    compiled = Compiled(function, backend="dspark")
    assert_as_eager(compiled, function, make_inputs())


@pytest.mark.parametrize(
    "function",
    [draft_tokens_are_the_positions, draft_tokens_are_the_slots],
    ids=lambda f: f.__name__,
)
def test_no_column_write_where_the_op_reads(function) -> None:
    """One row's token would be written while another row's kernel still reads: a race on a GPU."""
    compiled = Compiled(function)
    compiled(make_inputs())
    assert compiled.fused(SAMPLER) == 1
    assert "_draft.default" not in str(compiled.graphs)


# Two arguments in one memory


def one_buffer(x: Inputs, kind: str) -> Inputs:
    """``x`` with two of its tensors in one buffer."""
    num_rows, _, vocab = x.base.shape
    num_slots = x.seeds.shape[0]
    if kind == "cache and base":
        buffer = torch.full((num_slots + num_rows, 3, vocab), 7.0, device=DEVICE).to(x.base.dtype)
        buffer[num_slots:] = x.base
        return x._replace(logits_cache=buffer[:num_slots], base=buffer[num_slots:])
    if kind == "cache and bias":
        buffer = torch.full((num_slots, 4, vocab), 7.0, device=DEVICE).to(x.base.dtype)
        buffer[:num_rows, 3] = x.bias
        return x._replace(logits_cache=buffer[:, :3], bias=buffer[:num_rows, 3])
    if kind == "draft tokens and positions":
        buffer = torch.cat([x.draft_tokens, x.pos], 1)
        return x._replace(draft_tokens=buffer[:, :3], pos=buffer[:, 3:])
    if kind == "draft tokens and previous tokens":
        buffer = torch.cat([x.draft_tokens, x.prev[:, None]], 1)
        return x._replace(draft_tokens=buffer[:, :3], prev=buffer[:, 3])
    assert kind == "cache is base"  # row b of the batch is slot b of the cache
    cache = x.logits_cache
    cache[:num_rows] = x.base
    return x._replace(base=cache[:num_rows])


ONE_BUFFER = (
    "cache and base",
    "cache and bias",
    "draft tokens and positions",
    "draft tokens and previous tokens",
)


@pytest.mark.parametrize("backend", [None, "dspark"])
@pytest.mark.parametrize("kind", ONE_BUFFER)
def test_two_inputs_in_one_buffer(kind: str, backend: str | None) -> None:
    compiled = Compiled(draft_loop, backend=backend)
    assert_as_eager(compiled, draft_loop, one_buffer(make_inputs(num_rows=4), kind))
    assert len(compiled.sites) >= 3


def test_base_read_where_the_cache_is_written() -> None:
    """Slot b of the cache is row b of base; a fused kernel would read what it wrote."""
    compiled = Compiled(draft_loop)
    assert_as_eager(compiled, draft_loop, one_buffer(make_inputs(num_rows=4), "cache is base"))
    assert compiled.fused(SAMPLER) == 0


# Writes in place


@pytest.mark.parametrize("dynamic", [None, True])
def test_cache_and_draft_tokens_are_written_in_place(
    dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is up to a gigabyte: the same pointer goes in, and nothing makes a copy of it."""
    compiled = Compiled(draft_loop, backend="dspark", dynamic=dynamic)
    x = copied(make_inputs())
    (code,) = generated_code_of(compiled, x)
    code = code[code.index("def call") : code.index("def benchmark_compiled_module")]
    lines = [line.split("#")[0] for line in code.splitlines()]
    assert compiled.fused(SAMPLER) == 3
    assert sum("= torch.ops.dspark.gumbel_sample" in line for line in lines) == 3
    assert not [line for line in lines if "clone" in line or "copy" in line]

    op = torch.ops.dspark.gumbel_sample_cache_draft
    call, written = op.default, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        written.append({arg.data_ptr() for arg in args if isinstance(arg, Tensor)})
        return call(*args, **kwargs)

    monkeypatch.setattr(op, "default", spy)
    compiled(x)
    assert len(written) == 3
    for step, pointers in enumerate(written):
        assert {x.logits_cache.data_ptr(), x.draft_tokens[:, step].data_ptr()} <= pointers
