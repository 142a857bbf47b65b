"""gumbel_combine: the id of the first largest block maximum, as torch.argmax + gather give it."""

import math

import pytest
import torch

import dspark_ops

from .model import first_argmax

NAN, INF = math.nan, math.inf
FLOATS = [torch.float32, torch.float64]


def check(ops, block_max: torch.Tensor, block_argmax: torch.Tensor) -> list[int]:
    token = ops.gumbel_combine(block_max, block_argmax)
    values, ids = block_max.cpu().numpy(), block_argmax.cpu().numpy()
    assert token.dtype == torch.int64
    expected = [int(ids[b, first_argmax(values[b])]) for b in range(len(values))]
    assert token.tolist() == expected
    return expected


def ids_like(block_max: torch.Tensor) -> torch.Tensor:
    """Distinct ids above 2^32, so that a narrowed or swapped id shows."""
    return (
        torch.arange(block_max.numel(), device=block_max.device).view(block_max.shape) * 7 + 2**33
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_blocks", [1, 2, 149, 255, 256, 257, 1025])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_equals_the_model(ops, num_rows: int, num_blocks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    block_max = torch.randn(num_rows, num_blocks, generator=generator).to(dtype).to(ops.device)
    check(ops, block_max, ids_like(block_max))


ROWS = {
    "tie": ([3.0, 5.0, 5.0, 1.0], 1),
    "nan_wins": ([3.0, NAN, 5.0], 1),
    "first_nan": ([INF, NAN, 5.0, NAN], 1),
    "negative_nan": ([INF, 1.0, -NAN], 2),
    "inf": ([3.0, INF, INF], 1),
    "all_minus_inf": ([-INF, -INF, -INF], 0),
    "minus_inf_then_lowest": ([-INF, -3e38, -INF], 1),
    "signed_zeros": ([-1.0, -0.0, 0.0], 1),
    "negative": ([-3.0, -1.0, -2.0], 1),
    "denormal": ([0.0, 1e-40, -1e-40], 1),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", ROWS)
def test_order_of_floats(ops, case: str, dtype: torch.dtype) -> None:
    row, wanted = ROWS[case]
    block_max = torch.tensor([row, row[::-1]], dtype=dtype, device=ops.device)
    ids = ids_like(block_max)
    assert check(ops, block_max, ids)[0] == ids[0, wanted].item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 256), (255, 256), (256, 511), (3, 599)])
def test_first_wins_across_tiles(ops, low: int, high: int, dtype: torch.dtype) -> None:
    """Ties and NaN in two tiles of the reduction."""
    block_max = torch.full((3, 600), -INF, dtype=dtype, device=ops.device)
    block_max[0, [low, high]] = 4.0
    block_max[1, [low, high]] = NAN
    block_max[2, low], block_max[2, high] = INF, NAN
    ids = ids_like(block_max)
    wanted = [ids[0, low].item(), ids[1, low].item(), ids[2, high].item()]
    assert check(ops, block_max, ids) == wanted


def test_fp64_is_not_narrowed(ops) -> None:
    """Maxima that are equal in fp32."""
    block_max = torch.tensor([[1.0, 1.0 + 2**-40, 1.0]], dtype=torch.float64, device=ops.device)
    assert check(ops, block_max, ids_like(block_max)) == [2**33 + 7]


@pytest.mark.parametrize("dtype", FLOATS)
def test_strided_rows(ops, dtype: torch.dtype) -> None:
    values = torch.arange(60, dtype=dtype, device=ops.device).view(3, 20)
    ids = ids_like(torch.zeros(3, 31, device=ops.device))
    check(ops, values[:, 2:19], ids[:, 1:18])
    check(ops, values[:1, :5].expand(3, 5), ids[:, :5])


def test_inputs_are_not_changed(ops) -> None:
    block_max = torch.tensor([[1.0, -0.0, NAN]], device=ops.device)
    ids = ids_like(block_max)
    before = block_max.clone(), ids.clone()
    ops.gumbel_combine(block_max, ids)
    assert torch.equal(block_max.view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(ids, before[1])


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


REFUSED = {
    "max_list": ([[1.0]], _ids(1, 1), TypeError, "block_max must be a Tensor, got list"),
    "ids_none": (_floats(1, 1), None, TypeError, "block_argmax must be a Tensor, got NoneType"),
    "max_dtype": (_floats(1, 1).half(), _ids(1, 1), TypeError, "block_max .* got torch.float16"),
    "ids_dtype": (_floats(1, 1), _ids(1, 1).int(), TypeError, "block_argmax .* got torch.int32"),
    "max_rank": (_floats(3), _ids(3), ValueError, r"block_max .* got \(3,\)"),
    "no_blocks": (_floats(2, 0), _ids(2, 0), ValueError, r"block_max .* got \(2, 0\)"),
    "shapes": (_floats(2, 3), _ids(2, 4), ValueError, r"block_argmax .* got \(2, 4\)"),
    "max_stride": (_floats(3, 2).t(), _ids(2, 3), ValueError, r"block_max .* strides \(1, 2\)"),
    "ids_stride": (_floats(2, 3), _ids(3, 2).t(), ValueError, r"block_argmax .* strides \(1, 2\)"),
    "device": (_floats(2, 3), _ids(2, 3).to("meta"), ValueError, "block_argmax .* got meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_metadata(case: str) -> None:
    block_max, block_argmax, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        dspark_ops.gumbel_combine(block_max, block_argmax)
