"""Random inputs of a draft step, and the comparison of compiled code with eager, bit for bit.

Rows take turns in being of each kind that the contract tells apart. The logits cache is full of 7.0
and the draft tokens are -1, so that a write that should not have happened, or did not, shows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)

NUM_ROWS = 9  # one of each kind
NUM_STEPS = 3
VOCAB = 1300  # two blocks, the second not full
RANK = 8
UNTOUCHED = 7.0


class Inputs(NamedTuple):
    """B rows, N steps, S slots, V vocabulary, R rank."""

    base: Tensor  # [B, N, V]
    bias: Tensor  # [B, V]
    idx_mapping: Tensor  # i32 [B, N]
    temperature: Tensor  # f32 [S]
    seeds: Tensor  # i64 [S]
    pos: Tensor  # i64 [B, N]
    logits_cache: Tensor  # [S, N, V]
    draft_tokens: Tensor  # i64 [B, N]
    prev: Tensor  # i64 [B]
    w1: Tensor  # [V, R]
    w2: Tensor  # [V, R]
    d2t: Tensor  # i64 [V]
    other: Tensor  # [B, V], for what a test needs besides


def make_inputs(
    num_rows: int = NUM_ROWS,
    vocab: int = VOCAB,
    dtype: torch.dtype = BF16,
    bias_dtype: torch.dtype | None = None,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 2.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    bias_dtype = bias_dtype or dtype
    num_slots = num_rows + 4
    slot = torch.randperm(num_rows, generator=generator)  # no two rows share one
    temperature = torch.ones(num_slots)
    base, bias = normal(num_rows, num_steps, vocab), normal(num_rows, vocab)
    for row in range(num_rows):
        kind = (row + seed) % 9
        if kind in (1, 6, 7):  # ties within and across blocks
            base[row] = base[row].round()
            bias[row] = bias[row].round()
        temperature[slot[row]] = (1.0, 0.0, 0.7, 1.0, 0.0, 1.3, 0.6, -1.0, 0.8)[kind]
        if kind == 2:
            base[row, :, [vocab // 2, vocab - 1]] = torch.nan
        elif kind == 3:
            base[row] = -torch.inf
        elif kind == 4:
            bias[row] = -torch.inf
            base[row, 0, -1] = torch.inf  # their sum is NaN
        elif kind == 5:
            slot[row] = -1
        elif kind == 6:
            slot[row] = num_slots + row
        elif kind == 7:
            bias[row] = -base[row, 0]  # a row of equal values in the first step
    steps = torch.arange(num_steps)
    made = Inputs(
        base=base.to(dtype),
        bias=bias.to(bias_dtype),
        idx_mapping=(slot[:, None] + 0 * steps).int(),
        temperature=temperature,
        seeds=torch.randint(-(1 << 62), 1 << 62, (num_slots,), generator=generator),
        pos=torch.randint(1, 5000, (num_rows, 1), generator=generator) + steps,
        logits_cache=torch.full(
            (num_slots, num_steps, vocab), UNTOUCHED, dtype=torch.promote_types(dtype, bias_dtype)
        ),
        draft_tokens=torch.full((num_rows, num_steps), -1),
        prev=torch.randint(0, vocab, (num_rows,), generator=generator),
        w1=normal(vocab, RANK, scale=1.0).to(dtype),
        w2=normal(vocab, RANK, scale=1.0).to(dtype),
        d2t=torch.randint(0, 3, (vocab,), generator=generator),
        other=normal(num_rows, vocab).to(dtype),
    )
    return Inputs(*(tensor.to(DEVICE) for tensor in made))


def copied(tree: Any) -> Any:
    """The tensors of ``tree`` again: views of one memory stay views of one memory."""
    memory: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = torch.empty(0, dtype=x.dtype, device=x.device).set_(
                storage.clone(), 0, (storage.nbytes() // x.element_size(),), (1,)
            )
        source = memory[storage.data_ptr()]
        new = torch.empty(0, dtype=x.dtype, device=x.device).set_(
            source.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )
        return new.requires_grad_(x.requires_grad)

    return tree_map(copy, tree)


_AS_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    x = x.detach().contiguous()
    return x.view(_AS_INTS[x.element_size()]) if x.is_floating_point() else x


def assert_equal(got: Any, expected: Any, what: str) -> None:
    """Equal shapes, dtypes and bits of every tensor in two trees."""
    got_leaves, expected_leaves = tree_flatten(got)[0], tree_flatten(expected)[0]
    assert len(got_leaves) == len(expected_leaves)
    for i, (x, y) in enumerate(zip(got_leaves, expected_leaves, strict=True)):
        if not isinstance(y, Tensor):
            assert x == y, f"{what} {i}"
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{what} {i}"
        differ = int((bits(x) != bits(y)).sum())
        assert differ == 0, f"{what} {i}: {differ} of {y.numel()} elements differ from eager"


def assert_as_eager(compiled: Callable[..., Any], function: Callable[..., Any], *args: Any) -> None:
    """``compiled(*args)`` returns what eager does and leaves the same in every input."""
    eager_args, compiled_args = copied(args), copied(args)
    expected = function(*eager_args)
    got = compiled(*compiled_args)
    assert_equal(got, expected, "output")
    assert_equal(compiled_args, eager_args, "input")
