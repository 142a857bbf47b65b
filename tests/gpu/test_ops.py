"""The kernels on a GPU: fused equals unfused bit for bit, and both equal the numpy model."""

import pytest
import torch

import dspark_ops

from ..ops.cases import Inputs
from ..ops.model import assert_blocks, assert_cache, assert_tokens, expect
from .cases import NUM_KINDS, make_bias, make_cache, make_inputs, same_bits, unfused

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
VOCABS = [1, 7, 1023, 1024, 1025, 129280, 151936, 248320]
DTYPE_PAIRS = [(BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F32, BF16), (BF16, F16)]


def assert_fused_equals_unfused(inputs: Inputs, bias: torch.Tensor | None, **flags) -> None:
    """Ids, cache and token column, with equal bits."""
    rows, vocab = inputs.logits.shape
    dtype = inputs.logits.dtype if bias is None else (inputs.logits[:0] + bias[:0]).dtype
    caches = [make_cache(rows + 1, vocab, dtype) for _ in range(2)]
    tokens = torch.full((rows, 4), -9, dtype=torch.int32, device="cuda")
    wanted = unfused(inputs, bias, logits_cache=caches[0], cache_col=1, **flags)
    token = dspark_ops.gumbel_sample(
        *inputs.args,
        bias=bias,
        logits_cache=caches[1],
        cache_col=1,
        draft_tokens=tokens[:, 2],
        **flags,
    )
    assert torch.equal(token, wanted)
    assert torch.equal(tokens[:, 2].long(), wanted)
    assert (tokens[:, [0, 1, 3]] == -9).all()
    assert same_bits(caches[0], caches[1])
    assert ((token >= 0) & (token < vocab)).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 64])
@pytest.mark.parametrize("vocab", VOCABS)
def test_fused_equals_unfused(vocab: int, rows: int) -> None:
    for number, (dtype, bias_dtype) in enumerate(DTYPE_PAIRS):
        # Few rows do not hold every kind of row at once.
        kinds = range(0, NUM_KINDS, max(1, rows)) if 0 < rows < NUM_KINDS else (0,)
        for kind in kinds:
            inputs = make_inputs(rows, vocab, dtype, seed=number, first_kind=kind)
            bias = make_bias(rows, vocab, bias_dtype, seed=number)
            assert_fused_equals_unfused(inputs, bias, is_drafting=True)


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("apply_temperature", [False, True])
@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("vocab", [1025, 151936])
def test_fused_equals_unfused_with_flags(vocab, rows, apply_temperature, use_fp64) -> None:
    inputs = make_inputs(rows, vocab, BF16, seed=5, first_kind=3)
    flags = {"apply_temperature": apply_temperature, "use_fp64": use_fp64, "pos_offset": -1}
    assert_fused_equals_unfused(inputs, make_bias(rows, vocab, BF16), **flags)
    assert_fused_equals_unfused(inputs, None, **flags)


@pytest.mark.parametrize("use_fp64", [False, True])
def test_fused_equals_unfused_on_many_flat_rows(use_fp64: bool) -> None:
    """2000 rows of equal or nearly equal logits: chunks whose bound leaves the winner undecided."""
    inputs = make_inputs(2000, 20_000, BF16, seed=6)
    inputs.logits[::2] = 0.0
    inputs.logits[1::4] = 1000.0
    assert_fused_equals_unfused(inputs, None, use_fp64=use_fp64)


@pytest.mark.parametrize("shape", ["[1,V]", "[V]", "expanded", "strided"])
def test_bias_shapes(shape: str) -> None:
    rows, vocab = 5, 3001
    inputs = make_inputs(rows, vocab, BF16)
    bias = make_bias(2 * rows, vocab, BF16)
    given = {"[1,V]": bias[:1], "[V]": bias[0], "expanded": bias[:1].expand(rows, -1)}
    given["strided"] = bias[::2]
    token = dspark_ops.gumbel_sample(*inputs.args, bias=given[shape])
    assert torch.equal(token, unfused(inputs, given[shape]))


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("vocab", [1025, 151936])
def test_kernels_equal_the_model(vocab: int, dtype: torch.dtype, use_fp64: bool) -> None:
    rows = 16
    inputs = make_inputs(rows, vocab, dtype, seed=7, first_kind=0)
    bias = make_bias(rows, vocab, dtype, seed=7)
    cache = make_cache(rows + 1, vocab, dtype)
    kwargs = {"is_drafting": True, "use_fp64": use_fp64, "cache_col": 1}
    expected = expect(*inputs.args, bias=bias, logits_cache=cache, **kwargs)
    assert_tokens(
        dspark_ops.gumbel_sample(*inputs.args, bias=bias, logits_cache=cache, **kwargs), expected
    )
    assert_cache(cache, expected)
    cache = make_cache(rows + 1, vocab, dtype)
    summed = (inputs.logits + bias, *inputs.args[1:])
    block_max, block_argmax = dspark_ops.gumbel_block_argmax(*summed, logits_cache=cache, **kwargs)
    assert_blocks(block_max, block_argmax, expected)
    assert_cache(cache, expected)
    assert_tokens(dspark_ops.gumbel_combine(block_max, block_argmax), expected)


def test_kernels_equal_the_cpu_reference() -> None:
    """Cache and greedy ids equal; ids of usual sampled rows too, for these inputs.

    A NaN counts as one value: ``torch.add`` itself gives NaN other bits on a GPU than on a CPU.
    """
    inputs = make_inputs(64, 30_000, BF16, seed=8, first_kind=0)
    on_cpu = tuple(x.cpu() for x in inputs.args)
    bias = make_bias(64, 30_000, BF16)
    cache = make_cache(65, 30_000, BF16)
    cpu_cache = cache.cpu()
    token = dspark_ops.gumbel_sample(*inputs.args, bias=bias, logits_cache=cache, cache_col=0)
    wanted = dspark_ops.gumbel_sample(*on_cpu, bias=bias.cpu(), logits_cache=cpu_cache, cache_col=0)
    assert same_bits(cache.cpu(), cpu_cache)
    slot = inputs.idx_mapping.long()
    temperature = torch.where(slot >= 0, inputs.temperature[slot], 0.0)
    greedy = ~(temperature >= torch.tensor(1e-5, device="cuda")).cpu()
    assert greedy.any()
    assert torch.equal(token.cpu()[greedy], wanted[greedy])
    # Ids within 4e-7 of each other may swap: likely where large logits tie, once in 2000 runs here.
    assert torch.equal(token.cpu()[::NUM_KINDS], wanted[::NUM_KINDS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blocks", [1, 149, 243, 256, 257, 16384])
@pytest.mark.parametrize("rows", [0, 1, 64])
def test_combine_equals_argmax_and_gather(rows: int, blocks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(blocks)
    block_max = torch.randn(rows, blocks + 3, device="cuda", generator=generator).to(dtype)
    block_max = (block_max * 2).round()[:, 1 : blocks + 1]  # ties
    block_max[3::4] = block_max.new_tensor(float("-inf"))
    if rows > 5:
        block_max[5, blocks // 2], block_max[6, -1] = float("nan"), float("inf")
    ids = torch.randint(0, 2**40, (rows, blocks + 1), device="cuda", generator=generator)[:, 1:]
    best = block_max.argmax(-1, keepdim=True)
    wanted = ids.gather(-1, best).view(-1)
    assert torch.equal(dspark_ops.gumbel_combine(block_max, ids), wanted)


# Sizes


def test_b6_04_cache_and_logits_beyond_2_31_elements() -> None:
    """Rows 2^30 elements apart: row 2 starts at element 2^31. 3 x 4.3 GB."""
    vocab, stride = 3000, 2**30

    def rows_far_apart(fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        storage = torch.full((2**31 + 4096,), fill, dtype=BF16, device="cuda")
        return storage, storage.as_strided((3, vocab), (stride, 1))

    _, logits = rows_far_apart(0.0)
    _, bias = rows_far_apart(0.0)
    storage, _ = rows_far_apart(7.0)
    cache = storage.as_strided((3, 1, vocab + 1), (stride, stride, 1))
    logits[2, 77], bias[2, 78] = 5.0, 4.0
    inputs = make_inputs(3, 1, BF16)
    inputs.logits = logits
    inputs.idx_mapping = torch.tensor([-1, 0, 2], device="cuda")
    inputs.temperature = torch.zeros(3, device="cuda")
    inputs.seeds = inputs.seeds[:3]
    for fused in (True, False):
        storage.fill_(7.0)
        if fused:
            token = dspark_ops.gumbel_sample(
                *inputs.args, bias=bias, logits_cache=cache, cache_col=0
            )
        else:
            token = unfused(inputs, bias, logits_cache=cache, cache_col=0)
        assert token.tolist() == [0, 0, 77]
        assert storage[2**31 + 77] == 5.0
        assert storage[2**31 + 78] == 4.0
        written = torch.zeros(2**31 + 4096, dtype=torch.bool, device="cuda")
        written[:vocab] = True  # slot 0; row 0 is inert, no row has slot 1
        written[2**31 : 2**31 + vocab] = True
        assert torch.equal(storage != 7.0, written)
    # The sum above has rows of its own; here the kernel itself reads rows that lie far apart.
    assert unfused(inputs, logits_cache=cache, cache_col=0).tolist() == [0, 0, 77]
    assert same_bits(storage[2**31 : 2**31 + vocab], logits[2])


def test_embedding_beyond_2_31_elements() -> None:
    rows, width = 2**23 + 8, 256
    weight = torch.zeros(rows, width, dtype=BF16, device="cuda")
    weight[-1] = torch.arange(width, device="cuda").to(BF16)
    inputs = make_inputs(2, rows, BF16)
    inputs.logits[:, -1] = 100.0
    token, embedding = torch.ops.dspark.gumbel_sample_embed(*inputs.args, weight)
    assert (token == rows - 1).all()
    assert torch.equal(embedding, weight[-2:][1:].expand(2, -1))


def test_b6_07_70000_rows() -> None:
    inputs = make_inputs(70_000, 64, BF16, seed=9, first_kind=0)
    assert_fused_equals_unfused(inputs, make_bias(70_000, 64, BF16))
    for part in (slice(0, 100), slice(69_900, 70_000)):
        rows = (inputs.logits[part], inputs.idx_mapping[part])
        args = (*rows, inputs.temperature, inputs.seeds, inputs.pos[part])
        whole = dspark_ops.gumbel_sample(*inputs.args)[part]
        assert_tokens(whole, expect(*args))


def test_b6_07_vocabulary_of_2_24() -> None:
    for temperature in (0.0, 1.0):
        inputs = make_inputs(1, 2**24, BF16, seed=10)
        inputs.temperature.fill_(temperature)
        assert_fused_equals_unfused(inputs, None)
        assert_tokens(dspark_ops.gumbel_sample(*inputs.args), expect(*inputs.args))
    inputs.logits[0, 2**24 - 3] = 100.0
    assert dspark_ops.gumbel_sample(*inputs.args).item() == 2**24 - 3


# Clause 3: a row's draw does not depend on the batch


@pytest.mark.parametrize("use_fp64", [False, True])
def test_b1_17_same_row_in_other_batches(use_fp64: bool) -> None:
    """The same 64 rows together, in pairs, alone, reversed: other chunk sizes, the same ids."""
    inputs = make_inputs(64, 151936, BF16, seed=11)
    together = dspark_ops.gumbel_sample(*inputs.args, use_fp64=use_fp64)

    def sample(index: torch.Tensor | slice) -> torch.Tensor:
        rows = (inputs.logits[index], inputs.idx_mapping[index])
        state = (inputs.temperature, inputs.seeds)
        return dspark_ops.gumbel_sample(*rows, *state, inputs.pos[index], use_fp64=use_fp64)

    for size in (1, 2, 7, 32):
        parts = [sample(slice(start, start + size)) for start in range(0, 64, size)]
        assert torch.equal(torch.cat(parts), together)
    backwards = torch.arange(63, -1, -1, device="cuda")
    assert torch.equal(sample(backwards), together[backwards])


def test_draft_and_target_streams_differ() -> None:
    inputs = make_inputs(64, 151936, BF16, seed=12)
    inputs.logits.zero_()
    inputs.temperature.fill_(1.0)
    draft = dspark_ops.gumbel_sample(*inputs.args, is_drafting=True)
    target = dspark_ops.gumbel_sample(*inputs.args)
    live = inputs.idx_mapping >= 0
    assert (draft[live] != target[live]).all()
