"""gumbel_block_argmax: what is returned for each block. Shared clauses are in test_sampler.py."""

import math

import pytest
import torch

from .cases import BF16, DTYPES, F32, INERT, from_rows, make_cache, make_inputs
from .conftest import Kernel, Reference
from .model import assert_blocks, assert_cache, expect

NAN, INF = math.nan, math.inf


def check(ops, args, **kwargs):
    expected = expect(*args, **kwargs)
    block_max, block_argmax = ops.gumbel_block_argmax(*args, **kwargs)
    assert_blocks(block_max, block_argmax, expected)
    assert block_max.is_contiguous()
    assert block_argmax.is_contiguous()
    if "logits_cache" in kwargs:
        assert_cache(kwargs["logits_cache"], expected)
    return block_max, block_argmax


@pytest.mark.parametrize("vocab", [1, 7, 1023, 1024, 1025, 2048, 3000])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_blocks_of_1024(ops, vocab: int, num_rows: int) -> None:
    inputs = make_inputs(ops.device, vocab, (1, INERT, 2)[:num_rows])
    block_max, _ = check(ops, inputs.args)
    assert block_max.shape == (num_rows, (vocab + 1023) // 1024)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_fp64", [False, True])
def test_dtypes(ops, dtype: torch.dtype, use_fp64: bool) -> None:
    inputs = make_inputs(ops.device, 1025, (1, 0, 2), dtype)
    block_max, _ = check(ops, inputs.args, use_fp64=use_fp64)
    assert block_max.dtype == (torch.float64 if use_fp64 else F32)


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("apply_temperature", [False, True])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_flags_with_a_cache(ops, is_drafting, apply_temperature, use_fp64) -> None:
    inputs = make_inputs(ops.device, 1025, (1, INERT, 4), BF16)
    check(
        ops,
        inputs.args,
        logits_cache=make_cache(ops.device, 1025, BF16),
        cache_col=torch.tensor([2, 0, 1], device=ops.device),
        pos_offset=-1,
        is_drafting=is_drafting,
        apply_temperature=apply_temperature,
        use_fp64=use_fp64,
    )


def test_ties_and_nan_within_a_block(ops) -> None:
    inputs = make_inputs(ops.device, 2100, (2,) * 4)
    inputs.logits.fill_(-1.0)
    inputs.logits[0, [5, 900, 1030, 2048, 2099]] = 3.0
    inputs.logits[1, [900, 5, 1030, 2099]] = torch.tensor([NAN, INF, INF, NAN], device=ops.device)
    inputs.logits[2] = -INF
    inputs.logits[3, [3, 9]] = torch.tensor([-0.0, 0.0], device=ops.device)
    block_max, block_argmax = check(ops, inputs.args)
    assert block_argmax.tolist() == [
        [5, 1030, 2048],
        [900, 1030, 2099],
        [0, 1024, 2048],
        [3, 1024, 2048],
    ]
    assert block_max[1, [0, 2]].isnan().all()
    assert block_max[1, 1] == INF
    assert (block_max[2] == -INF).all()


def test_tail_block_of_only_minus_inf_is_not_padding(ops) -> None:
    """The masked lanes beyond V also hold -inf; the id must stay below V."""
    inputs = from_rows(ops.device, [[-INF] * 1025])
    assert check(ops, inputs.args)[1].tolist() == [[0, 1024]]


def test_b6_05_maxima_of_the_kernel_and_the_reference() -> None:
    """Greedy rows have equal bits in both implementations, NaN and infinities included."""
    results = []
    for ops in (Reference, Kernel):
        inputs = make_inputs(ops.device, 3000, (2, 3, INERT, 9), BF16)
        inputs.logits[0, 2000], inputs.logits[1, 7], inputs.logits[2, :1024] = NAN, INF, -INF
        results.append([x.cpu() for x in ops.gumbel_block_argmax(*inputs.args)])
    (max_a, ids_a), (max_b, ids_b) = results
    assert torch.equal(ids_a, ids_b)
    assert torch.equal(max_a.isnan(), max_b.isnan())
    assert torch.equal(max_a.nan_to_num(0.5), max_b.nan_to_num(0.5))
