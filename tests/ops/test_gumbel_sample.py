"""gumbel_sample: the sum, the token column, chunks. Shared clauses are in test_sampler.py."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from .cases import BF16, DTYPES, F16, F32, INERT, make_cache, make_inputs, random_values, strided
from .conftest import Kernel
from .model import assert_cache, assert_tokens, expect

NAN, INF = math.nan, math.inf


def check(ops, args: tuple[Tensor, ...], draft_tokens: Tensor | None = None, **kwargs) -> Tensor:
    expected = expect(*args, **kwargs)
    if draft_tokens is not None:
        kwargs["draft_tokens"] = draft_tokens
    token = ops.gumbel_sample(*args, **kwargs)
    assert_tokens(token, expected)
    if draft_tokens is not None:
        assert draft_tokens.tolist() == token.tolist()
    if kwargs.get("logits_cache") is not None:
        assert_cache(kwargs["logits_cache"], expected)
    return token


# Clause 1: the sum rounds once, to the dtype of torch.add

BIAS_SHAPES = {"[B,V]": (3, 1025), "[1,V]": (1, 1025), "[V]": (1025,)}


@pytest.mark.parametrize("shape", BIAS_SHAPES)
@pytest.mark.parametrize(("dtype", "bias_dtype"), list(product(DTYPES, DTYPES)))
def test_sum_is_cached_and_sampled(ops, dtype, bias_dtype, shape: str) -> None:
    inputs = make_inputs(ops.device, 1025, (1, 2, 4), dtype)
    bias = random_values(BIAS_SHAPES[shape], bias_dtype, seed=5).to(ops.device)
    wanted = inputs.logits + bias
    cache = make_cache(ops.device, 1025, wanted.dtype)
    check(ops, inputs.args, bias=bias, logits_cache=cache, cache_col=1)
    for row, slot in enumerate((1, 2, 4)):
        assert torch.equal(cache[slot, 1, :1025], wanted[row])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sum_rounds_ties_to_even_and_overflows(ops, dtype: torch.dtype) -> None:
    """Sums halfway between two values, beyond the largest one, NaN, infinities, signed zeros."""
    eps = torch.finfo(dtype).eps
    top = torch.finfo(dtype).max
    pairs = [(1.0, eps / 2), (1.0 + eps, eps / 2), (-1.0, -eps / 2), (1.0, eps * 0.75)]
    pairs += [(top, top), (-top, -top), (top, top * eps / 4), (INF, -INF), (NAN, 1.0), (-INF, 1.0)]
    pairs += [(0.0, -0.0), (-0.0, -0.0), (2.0, -2.0), (1e-7, -5e-8), (INF, 3.0)]
    logits, bias = (torch.tensor([x]).to(dtype).to(ops.device) for x in zip(*pairs, strict=True))
    inputs = make_inputs(ops.device, 1, (2,))
    inputs.logits = logits
    cache = make_cache(ops.device, len(pairs), dtype)
    check(ops, inputs.args, bias=bias, logits_cache=cache, cache_col=0)
    wanted, actual = logits + bias, cache[2, :1, : len(pairs)]
    assert torch.equal(actual.isnan(), wanted.isnan())
    number = ~wanted.isnan()
    assert torch.equal(actual[number].view(torch.int16), wanted[number].view(torch.int16))


def test_ids_come_from_the_rounded_sum(ops) -> None:
    """In fp32 id 1 is larger; both sums round to the same bf16, so id 0 wins."""
    inputs = make_inputs(ops.device, 2, (2,))
    inputs.logits = torch.tensor([[256.0, 256.0]], dtype=BF16, device=ops.device)
    bias = torch.tensor([[0.0, 0.5]], dtype=BF16, device=ops.device)
    assert check(ops, inputs.args, bias=bias).item() == 0
    assert check(ops, inputs.args, bias=bias.float()).item() == 1


def test_b5_05_coarse_logits_of_mixed_dtypes(ops) -> None:
    """Multiples of 0.5, so that ties occur, for every pair of dtypes."""
    for dtype, bias_dtype in product(DTYPES, DTYPES):
        inputs = make_inputs(ops.device, 40, (2, 0, 3, INERT) * 2, dtype)
        inputs.logits = (inputs.logits * 2).round() / 2
        bias = (random_values((8, 40), bias_dtype, 6).to(ops.device) * 2).round() / 2
        token = check(ops, inputs.args, bias=bias)
        greedy = [row for row in range(8) if row % 4 != 1]
        assert torch.equal(token[greedy], (inputs.logits + bias).argmax(-1)[greedy])


def test_bias_rows_may_be_strided(ops) -> None:
    inputs = make_inputs(ops.device, 600, (1, 4, 2), BF16)
    bias = random_values((3, 600), BF16, 7).to(ops.device)
    wanted = ops.gumbel_sample(*inputs.args, bias=bias)
    assert torch.equal(check(ops, inputs.args, bias=strided(bias)), wanted)
    expanded = bias[:1].expand(3, 600)
    assert torch.equal(
        check(ops, inputs.args, bias=expanded), ops.gumbel_sample(*inputs.args, bias=bias[0])
    )


def test_single_row_with_every_bias_shape(ops) -> None:
    inputs = make_inputs(ops.device, 33, (1,))
    bias = random_values((33,), F32, 8).to(ops.device)
    tokens = [
        check(ops, inputs.args, bias=x).item() for x in (bias, bias[None], bias.expand(1, 33))
    ]
    assert len(set(tokens)) == 1


def test_cache_in_each_column_spelling_with_bias(ops) -> None:
    inputs = make_inputs(ops.device, 513, (1, INERT, 4), BF16)
    bias = random_values((3, 513), F32, 9).to(ops.device)
    for col in (2, torch.tensor(1, device=ops.device), torch.tensor([0, 5, 2], device=ops.device)):
        cache = make_cache(ops.device, 513, F32)
        check(ops, inputs.args, bias=bias, logits_cache=cache, cache_col=col, is_drafting=True)


# draft_tokens


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draft_tokens_column(ops, dtype: torch.dtype) -> None:
    """A strided column gets the id of every row, inert ones too; its neighbours keep their bits."""
    inputs = make_inputs(ops.device, 1025, (1, INERT, 2), BF16)
    buffer = torch.full((3, 5), -9, dtype=dtype, device=ops.device)
    check(ops, inputs.args, draft_tokens=buffer[:, 3])
    assert (buffer[:, [0, 1, 2, 4]] == -9).all()


@pytest.mark.parametrize("use_fp64", [False, True])
def test_draft_tokens_with_cache_and_bias(ops, use_fp64: bool) -> None:
    inputs = make_inputs(ops.device, 1025, (1, INERT, 2), BF16)
    inputs.idx_mapping, inputs.pos = strided(inputs.idx_mapping), strided(inputs.pos)
    inputs.logits = strided(inputs.logits)
    buffer = torch.full((5, 4), -9, dtype=torch.int32, device=ops.device)
    check(
        ops,
        inputs.args,
        bias=random_values((1025,), BF16, 1).to(ops.device),
        draft_tokens=buffer[1:4, 2],
        logits_cache=make_cache(ops.device, 1025, BF16),
        cache_col=2,
        pos_offset=-1,
        is_drafting=True,
        use_fp64=use_fp64,
    )
    assert (buffer[:, [0, 1, 3]] == -9).all()
    assert (buffer[[0, 4]] == -9).all()


@pytest.mark.parametrize("num_rows", [0, 2])
def test_next_embedding(ops, num_rows: int) -> None:
    """The op that also gathers the next step's embedding, from a strided table with R > 256."""
    inputs = make_inputs(ops.device, 50, (1, INERT)[:num_rows])
    table = random_values((51, 310), BF16, 2).to(ops.device)[:, 3:303]
    if ops is Kernel:
        token, embedding = ops.gumbel_sample(*inputs.args, embed_weight=table)
    else:
        token, embedding = torch.ops.dspark.gumbel_sample_embed(*inputs.args, table)
    assert_tokens(token, expect(*inputs.args))
    assert embedding.dtype == BF16
    assert torch.equal(embedding, table[token])


# Equal to the unfused step, bit for bit


@pytest.mark.parametrize("bias_dtype", [BF16, F32])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_equals_the_unfused_step(ops, chunks_of, bias_dtype: torch.dtype, use_fp64: bool) -> None:
    chunks_of(2)
    inputs = make_inputs(ops.device, 2100, (0, 1, 2, INERT, 4), BF16)
    bias = random_values((5, 2100), bias_dtype, 3).to(ops.device)
    logits = torch.add(inputs.logits, bias)
    caches = [make_cache(ops.device, 2100, logits.dtype) for _ in range(2)]
    block_max, block_argmax = ops.gumbel_block_argmax(
        logits, *inputs.args[1:], logits_cache=caches[0], cache_col=1, use_fp64=use_fp64
    )
    best = block_max.argmax(-1, keepdim=True)
    unfused = block_argmax.gather(-1, best).view(-1)
    fused = ops.gumbel_sample(
        *inputs.args, bias=bias, logits_cache=caches[1], cache_col=1, use_fp64=use_fp64
    )
    assert torch.equal(fused, unfused)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


# Chunks of several tiles: the result is that of computing every value

TILES = [2, 3, 5]


def adversarial_rows(vocab: int) -> Tensor:
    """Rows on which the bound decides nothing, or where one lane meets several special values."""
    rows = random_values((14, vocab), F32, 11)
    rows[0] = 0.0  # only the noise decides
    rows[1] = 1e6  # noise vanishes in the rounding: ties of the noised values
    rows[2] = 1e6 + 0.0625 * (torch.arange(vocab) % 3)
    rows[3] = (rows[3] * 2).round() * 1e4
    rows[4] = -INF
    rows[5, [7, 7 + 512, 7 + 1024]] = torch.tensor([INF, NAN, INF])  # one lane
    rows[6, [7, 7 + 512, 7 + 1024]] = torch.tensor([NAN, NAN, INF])
    rows[7, [9 + 1024, 7 + 512]] = NAN  # two lanes
    rows[8, [9, 9 + 512]] = INF
    rows[9] = -INF
    rows[9, [3 + 512, 3 + 1024]] = 5.0
    rows[10] = torch.arange(vocab).float() * 1e-3  # each lane's last tile is its best
    rows[11] = 16777216.0
    rows[12] = -1e30
    rows[13, ::512], rows[13, 1::512] = 30.0, 30.0
    return rows


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_chunks_equal_computing_every_value(
    chunks_of, tiles: int, use_fp64: bool, temperature: float
) -> None:
    vocab = 1600  # 4 tiles, the last one partial
    rows = adversarial_rows(vocab)
    inputs = make_inputs(Kernel.device, 1, (0,) * len(rows), temperatures=(temperature,))
    inputs.logits = rows.to(Kernel.device)
    chunks_of(1)
    single = Kernel.gumbel_sample(*inputs.args, use_fp64=use_fp64)
    chunks_of(tiles)
    assert torch.equal(check(Kernel, inputs.args, use_fp64=use_fp64), single)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("use_fp64", [False, True])
def test_chunks_of_random_rows(chunks_of, tiles: int, use_fp64: bool) -> None:
    """Flat, usual and peaked rows with bias in bf16: the bound decides most, never wrongly."""
    chunks_of(tiles)
    vocab = 3 * 512 * tiles // 2 + 1
    inputs = make_inputs(Kernel.device, vocab, (0, 1, 4) * 3, BF16)
    inputs.logits *= torch.tensor([0.1, 1.0, 4.0], device=Kernel.device).repeat(3)[:, None]
    bias = random_values((9, vocab), BF16, 13).to(Kernel.device)
    cache = make_cache(Kernel.device, vocab, BF16)
    check(Kernel, inputs.args, bias=bias, use_fp64=use_fp64)
    first = tuple(x[:3] if x.shape[0] == 9 else x for x in inputs.args)
    check(Kernel, first, bias=bias[:3], use_fp64=use_fp64, logits_cache=cache, cache_col=1)


@pytest.mark.parametrize("tiles", TILES)
def test_chunks_follow_a_low_bound(chunks_of, tiles: int) -> None:
    """A token of hash 2^32 - 1, where the bound is lowest, against one in the same lane."""
    chunks_of(tiles)
    inputs = make_inputs(Kernel.device, 1600, (0,), temperatures=(1.0,))
    inputs.seeds[0], inputs.pos[0] = 7847, 12345  # id 1208 hashes to 2^32 - 1
    for height in (0.0, 2.0, 2.8, 2.9, 3.5, 8.0):
        inputs.logits.fill_(-30.0)
        inputs.logits[0, 1208] = height
        inputs.logits[0, 1208 - 512] = 0.0
        check(Kernel, inputs.args)


def test_tiles_per_chunk_stays_within_its_limits() -> None:
    from .conftest import op_module

    module = op_module("gumbel_sample")
    for num_rows, vocab in product((1, 2, 64, 70000), (1, 1025, 151936, 2**24)):
        assert 1 <= module._tiles_per_chunk(num_rows, vocab) <= module.MAX_TILES


def test_plans_tell_metadata_apart(ops) -> None:
    """Calls that differ in one property of one argument, one after the other: no stale plan."""
    for num_rows, vocab, dtype in product((1, 2), (513, 1025), (BF16, F32)):
        inputs = make_inputs(ops.device, vocab, (1, 4)[:num_rows], dtype)
        for bias in (None, random_values((vocab,), BF16, 3).to(ops.device)):
            check(ops, inputs.args, bias=bias)
        for cols in (2, 3):
            summed = make_cache(ops.device, vocab, dtype, cols=cols)
            check(ops, inputs.args, logits_cache=summed, cache_col=2)
