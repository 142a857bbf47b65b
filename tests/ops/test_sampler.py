"""The clauses that ``gumbel_sample`` and ``gumbel_block_argmax`` + ``gumbel_combine`` both keep.

Each test runs for both, for the CPU reference and for the Triton kernels, against the numpy model.
"""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from .cases import BF16, DTYPES, F16, F32, INERT, from_rows, make_cache, make_inputs, strided
from .model import assert_cache, assert_tokens, expect

NAN, INF = math.nan, math.inf


def check(sampler, args: tuple[Tensor, ...], **kwargs) -> Tensor:
    """Tokens and, where there is one, the whole cache equal the model's."""
    expected = expect(*args, **kwargs)
    token = sampler(*args, **kwargs)
    assert_tokens(token, expected)
    if kwargs.get("logits_cache") is not None:
        assert_cache(kwargs["logits_cache"], expected)
    return token


# Clause 2: temperature


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 1025])
def test_rows_of_every_kind_in_one_launch(sampler, vocab: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(sampler.device, vocab, (0, 1, 2, 3, 4, INERT, 5, 1), dtype)
    check(sampler, inputs.args)


GREEDY_TEMPERATURES = [0.0, -0.0, 9.99e-6, 1e-12, 1e-30, 1e-45, -1.0, -1e-30, NAN, INF, -INF]


def test_greedy_temperatures(sampler) -> None:
    """Below fp32(1e-5), negative, NaN or infinite: no noise. Also a case of B1-05."""
    slots = tuple(range(len(GREEDY_TEMPERATURES)))
    inputs = make_inputs(sampler.device, 300, slots, temperatures=tuple(GREEDY_TEMPERATURES))
    token = check(sampler, inputs.args)
    assert torch.equal(token, inputs.logits.argmax(-1))


def test_boundary_of_greedy_is_fp32_of_1e_5(sampler) -> None:
    """At fp32(1e-5) a row is sampled; one ulp below it is greedy."""
    edge = torch.tensor(1e-5)
    below = torch.nextafter(edge, torch.tensor(0.0))
    inputs = make_inputs(sampler.device, 500, (0, 1), temperatures=(edge.item(), below.item()))
    inputs.logits.zero_()
    token = check(sampler, inputs.args)
    assert token[0] != 0
    assert token[1] == 0


@pytest.mark.parametrize("apply_temperature", [True, False])
def test_temperature_divides_only_where_asked(sampler, apply_temperature: bool) -> None:
    temperatures = (1.0, 0.25, 4.0, 1e-3, 1e3, 0.0)
    inputs = make_inputs(sampler.device, 700, (0, 1, 2, 3, 4, 5), temperatures=temperatures)
    inputs.seeds.zero_()
    inputs.pos.zero_()
    inputs.logits[:] = inputs.logits[0].clone()
    token = check(sampler, inputs.args, apply_temperature=apply_temperature)
    sampled = token[:5].unique()
    # The same noise over the same logits: only the temperature can tell the rows apart.
    assert (sampled.numel() > 1) == apply_temperature


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("row", [[2.875, 2.955, 11.0625, -2.447], [-100.0, 0.0, 5.0]])
def test_b1_05_tiny_temperature(sampler, row: list[float], dtype: torch.dtype) -> None:
    temperatures = (1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-30)
    inputs = from_rows(sampler.device, [row] * len(temperatures), dtype)
    inputs.temperature = torch.tensor(temperatures, device=sampler.device)
    assert check(sampler, inputs.args).tolist() == [2] * len(temperatures)


@pytest.mark.parametrize("marker", [0.0, -1.0])
def test_b1_04_negative_temperature_and_inf(sampler, marker: float) -> None:
    rows = [[1.0, -INF, 3.0, -INF], [0.0, 0.0, -INF, 0.0]]
    for seed in range(5):
        inputs = from_rows(sampler.device, rows)
        inputs.temperature = torch.tensor([marker, 1.0], device=sampler.device)
        inputs.seeds += seed
        cache = make_cache(sampler.device, 4, F32, num_slots=2)
        token = check(sampler, inputs.args, logits_cache=cache, cache_col=0)
        assert token[0] == 2
        assert token[1] != 2
        assert not cache.isnan().any()


# Clause 4: ids equal torch.argmax

ARGMAX_ROWS = {
    "b1_19_nan_first": ([NAN, 6.0, 8.0], 0),
    "b1_19_inf_nan": ([INF, NAN], 1),
    "b1_19_nan_inf": ([NAN, INF], 0),
    "b1_19_all_minus_inf": ([-INF] * 5, 0),
    "b1_19_signed_zeros": ([-1.0, -2.0, -3.0, -0.0] + [-4.0] * 5 + [0.0], 3),
    "two_nans": ([1.0, NAN, 2.0, NAN], 1),
    "negative_nan": ([1.0, 3.0, -NAN, 2.0], 2),
    "two_infs": ([1.0, INF, 2.0, INF], 1),
    "only_nan": ([NAN], 0),
    "minus_inf_beside_nan": ([-INF, NAN, -INF], 1),
    "lowest_normal": ([-INF, -3.0e38, -INF], 1),
    "denormals": ([0.0, 1e-40, -1e-40, 2e-40], 3),
}


@pytest.mark.parametrize("case", ARGMAX_ROWS)
def test_greedy_ids_equal_torch_argmax(sampler, case: str) -> None:
    row, wanted = ARGMAX_ROWS[case]
    inputs = from_rows(sampler.device, [row])
    assert check(sampler, inputs.args).tolist() == [wanted]
    assert inputs.logits.cpu().argmax(-1).tolist() == [wanted]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2047, 2048, 2049, 4097])
def test_b1_19_b6_05_argmax_over_blocks(sampler, vocab: int, dtype: torch.dtype) -> None:
    """Ties, NaN and infinities at the ends of blocks, greedy."""
    places = [i for i in (0, 5, 511, 512, 1023, 1024, 2048, 4000, vocab - 1) if i < vocab]
    rows = []
    for first, second in product(places, places):
        for a, b in ((3.0, 3.0), (NAN, NAN), (INF, INF), (INF, NAN), (NAN, INF), (0.0, -0.0)):
            row = torch.full((vocab,), -INF if b == INF else -1.0)
            row[second], row[first] = b, a
            rows.append(row)
    rows.append(torch.full((vocab,), -INF))
    picked = rows[:: max(1, len(rows) // 19)] + rows[-1:]
    inputs = make_inputs(sampler.device, vocab, (2,) * len(picked))
    inputs.logits = torch.stack(picked).to(dtype).to(sampler.device)
    token = check(sampler, inputs.args)
    assert torch.equal(token.cpu(), inputs.logits.cpu().argmax(-1))


@pytest.mark.parametrize("use_fp64", [False, True])
def test_sampled_rows_keep_nan_and_infinities(sampler, use_fp64: bool) -> None:
    """NaN and +inf win over any noise, -inf never wins; an all -inf row gives id 0."""
    vocab = 1500
    inputs = make_inputs(sampler.device, vocab, (0,) * 7)
    logits = inputs.logits
    logits[0] = -INF
    logits[1] = -INF
    logits[1, 1200] = -50.0
    logits[2, 1100] = NAN
    logits[3, 40], logits[3, 1300] = INF, NAN
    logits[4, 700], logits[4, 1400] = INF, INF
    logits[5] = NAN
    logits[6, ::2] = -INF
    token = check(sampler, inputs.args, use_fp64=use_fp64).tolist()
    assert token[:6] == [0, 1200, 1100, 1300, 700, 0]
    assert token[6] % 2 == 1


def test_b1_14_nan_row_leaves_its_neighbours_alone(sampler) -> None:
    inputs = make_inputs(sampler.device, 1000, (0, 1, 4))
    good = sampler(*inputs.args)
    inputs.logits[1] = NAN
    token = check(sampler, inputs.args)
    assert token.tolist() == [good[0], 0, good[2]]
    inputs.logits[1] = 0.0
    inputs.logits[1, 999] = NAN
    assert check(sampler, inputs.args).tolist() == [good[0], 999, good[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b1_22_ids_stay_below_the_real_vocabulary(sampler, temperature: float) -> None:
    """Storage of 1024 columns, the last 24 full of zeros, real logits all -5."""
    storage = torch.zeros(12, 1024, device=sampler.device)
    storage[:, :1000] = -5.0
    inputs = make_inputs(sampler.device, 1, (0,) * 12, temperatures=(temperature,))
    inputs.logits = storage[:, :1000]
    inputs.pos = torch.arange(12, device=sampler.device)
    token = check(sampler, inputs.args)
    assert ((token >= 0) & (token < 1000)).all()
    assert (storage[:, 1000:] == 0).all()


# Clause 5: inert rows


def test_inert_rows_are_greedy_and_write_no_cache(sampler) -> None:
    """Negative slots and slots >= S of any size, as B3-16 leaves them in graph padding."""
    slots = (INERT, -2, 5, 2**30, -(2**31), 2**31 - 1, 1)
    inputs = make_inputs(sampler.device, 900, slots)
    cache = make_cache(sampler.device, 900, F32)
    token = check(sampler, inputs.args, logits_cache=cache, cache_col=1)
    assert torch.equal(token[:6], inputs.logits[:6].argmax(-1))
    assert (cache[[0, 2, 3, 4]] == 7.0).all()
    assert (cache[:, [0, 2]] == 7.0).all()


def test_no_slots_at_all(sampler) -> None:
    inputs = make_inputs(sampler.device, 100, (0, INERT), temperatures=())
    assert torch.equal(check(sampler, inputs.args), inputs.logits.argmax(-1))


def test_inert_row_of_nan_and_minus_inf(sampler) -> None:
    inputs = make_inputs(sampler.device, 50, (INERT, INERT, 0))
    inputs.logits[0] = -INF
    inputs.logits[1, 30] = NAN
    assert check(sampler, inputs.args)[:2].tolist() == [0, 30]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_dtypes_of_idx_and_pos(sampler, dtype: torch.dtype) -> None:
    inputs = make_inputs(sampler.device, 100)
    inputs.idx_mapping, inputs.pos = inputs.idx_mapping.to(dtype), inputs.pos.to(dtype)
    check(sampler, inputs.args)


# The cache: clauses 1 and 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_holds_logits_before_temperature(sampler, dtype: torch.dtype) -> None:
    inputs = make_inputs(sampler.device, 1025, (4, 0, 2), dtype)
    inputs.logits[0, 3], inputs.logits[1, 4], inputs.logits[2, 5] = -INF, -0.0, NAN
    cache = make_cache(sampler.device, 1025, dtype)
    before = inputs.logits.clone()
    check(sampler, inputs.args, logits_cache=cache, cache_col=2)
    for row, slot in enumerate((4, 0, 2)):
        assert torch.equal(
            cache[slot, 2, :1025].view(torch.uint8), inputs.logits[row].view(torch.uint8)
        )
    assert torch.equal(before.view(torch.uint8), inputs.logits.view(torch.uint8))


COLUMNS = {
    "int": 1,
    "int_beyond": 3,
    "int_far_beyond": 2**31 - 1,
    "scalar_i32": torch.tensor(2, dtype=torch.int32),
    "scalar_i64": torch.tensor(0),
    "scalar_beyond": torch.tensor(3),
    "scalar_negative": torch.tensor(-1),
    "rows_i64": torch.tensor([2, 0, 1]),
    "rows_i32": torch.tensor([1, 1, 0], dtype=torch.int32),
    "rows_out_of_range": torch.tensor([3, -1, 2**31 - 1]),
    "rows_strided": torch.arange(9).view(3, 3)[:, 1] % 3,
}


@pytest.mark.parametrize("case", COLUMNS)
def test_cache_columns(sampler, case: str) -> None:
    """A column out of range suppresses the write only; every column enters the seed."""
    col = COLUMNS[case]
    if isinstance(col, Tensor):
        col = col.to(sampler.device) if col.is_contiguous() else strided(col.to(sampler.device))
    inputs = make_inputs(sampler.device, 600, (1, 4, 0))
    cache = make_cache(sampler.device, 600, F32)
    check(sampler, inputs.args, logits_cache=cache, cache_col=col, is_drafting=True)
    if "beyond" in case or "negative" in case or "out_of_range" in case:
        assert (cache == 7.0).all()


def test_cache_of_no_columns(sampler) -> None:
    inputs = make_inputs(sampler.device, 40, (0, 1))
    cache = torch.empty(5, 0, 40, device=sampler.device)
    check(sampler, inputs.args, logits_cache=cache, cache_col=0)


def test_cache_with_transposed_slots_and_columns(sampler) -> None:
    inputs = make_inputs(sampler.device, 60, (3, 0, 4))
    cache = torch.full((3, 5, 64), 7.0, device=sampler.device).transpose(0, 1)
    check(sampler, inputs.args, logits_cache=cache, cache_col=1)


def test_b1_17_seed_at_column_1_is_another_seed_at_column_0(sampler) -> None:
    """``seed ^= col << 32``: seed s at column 1 equals s ^ 2^32 at column 0, documented."""
    inputs = make_inputs(sampler.device, 1000, (0, 1, 4))
    inputs.logits.zero_()
    cache = make_cache(sampler.device, 1000, F32)
    at_one = sampler(*inputs.args, logits_cache=cache, cache_col=1)
    at_zero = sampler(*inputs.args, logits_cache=cache, cache_col=0)
    inputs.seeds ^= 2**32
    assert torch.equal(at_one, sampler(*inputs.args, logits_cache=cache, cache_col=0))
    assert (at_one != at_zero).all()


# Flags


@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("pos_offset", [0, -1, 2**31, -(2**40)])
@pytest.mark.parametrize("apply_temperature", [True, False])
@pytest.mark.parametrize("use_fp64", [False, True])
def test_flags(sampler, is_drafting, pos_offset, apply_temperature, use_fp64) -> None:
    inputs = make_inputs(sampler.device, 1025, (1, 4, 2), BF16, seed=pos_offset & 7)
    kwargs = {"is_drafting": is_drafting, "pos_offset": pos_offset, "use_fp64": use_fp64}
    check(sampler, inputs.args, apply_temperature=apply_temperature, **kwargs)


def test_b7_08_every_flag_changes_something(sampler) -> None:
    """An accepted flag that nobody reads would return what the call without it returns."""
    inputs = make_inputs(sampler.device, 1000, (1,) * 8)
    inputs.logits *= 0.2
    inputs.pos = torch.arange(8, device=sampler.device)
    plain = sampler(*inputs.args)
    for flag in ({"is_drafting": True}, {"pos_offset": 9}, {"use_fp64": True}):
        assert (sampler(*inputs.args, **flag) != plain).sum() >= 6, flag
    inputs.temperature.fill_(3.0)
    inputs.logits *= 10
    with_temperature = sampler(*inputs.args)
    assert (sampler(*inputs.args, apply_temperature=False) != with_temperature).any()


# Clause 3: noise is a pure function of (seed, position, token id, stream)


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("tiles", [1, 2])
def test_b1_17_row_alone_in_another_slot_batch_and_order(
    sampler, chunks_of, use_fp64: bool, tiles: int
) -> None:
    chunks_of(tiles)
    inputs = make_inputs(sampler.device, 1100, (0, 1, 4, 1, 0))
    together = sampler(*inputs.args, use_fp64=use_fp64)
    logits, idx, temperature, seeds, pos = inputs.args
    order = torch.tensor([3, 0, 4, 2, 1], device=sampler.device)
    shuffled = sampler(logits[order], idx[order], temperature, seeds, pos[order], use_fp64=use_fp64)
    assert torch.equal(shuffled, together[order])
    chunks_of(3)
    for row in range(5):
        part = slice(row, row + 1)
        alone = sampler(logits[part], idx[part], temperature, seeds, pos[part], use_fp64=use_fp64)
        assert alone.item() == together[row].item()
    moved = [2, 3, 0, 1, 4]  # slot s moves to moved[s]
    index = torch.tensor(moved, device=sampler.device)
    new_temperature, new_seeds = torch.empty_like(temperature), torch.empty_like(seeds)
    new_temperature[index], new_seeds[index] = temperature, seeds
    elsewhere = sampler(
        logits, index[idx.long()].int(), new_temperature, new_seeds, pos, use_fp64=use_fp64
    )
    assert torch.equal(elsewhere, together)


def test_b1_17_same_seed_same_position_same_noise(sampler) -> None:
    """(a) = (b): rows of one seed and position agree; (c) positions, (d) seeds tell draws apart."""
    inputs = make_inputs(sampler.device, 1000, (0, 1, 2, 3, 4, 5), temperatures=(1.0,) * 6)
    inputs.logits.zero_()
    inputs.seeds = torch.tensor([42, 42, 42, 42, 42 + 2**32, 43], device=sampler.device)
    inputs.pos = torch.tensor([9, 9, 10, 11, 9, 9], device=sampler.device)
    token = check(sampler, inputs.args).tolist()
    assert token[0] == token[1]
    assert len(set(token)) == 5


def test_draft_and_target_streams_differ(sampler) -> None:
    inputs = make_inputs(sampler.device, 1000, (0,) * 16)
    inputs.logits.zero_()
    inputs.pos = torch.arange(16, device=sampler.device)
    draft = sampler(*inputs.args, is_drafting=True)
    target = sampler(*inputs.args)
    # Independent draws from 1000 ids agree in more than 2 of 16 rows once in 2e6 sets of keys.
    assert (draft == target).sum() <= 2
    assert torch.equal(draft, sampler(*inputs.args, pos_offset=2**30))


def test_global_generator_is_neither_read_nor_moved(sampler) -> None:
    inputs = make_inputs(sampler.device, 100, (0, 1))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = sampler(*inputs.args)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, sampler(*inputs.args))


# Clause 6: shapes and strides


@pytest.mark.parametrize("vocab", [1, 7, 1023, 1024, 1025])
@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_shapes(sampler, vocab: int, num_rows: int) -> None:
    inputs = make_inputs(sampler.device, vocab, (1, 4)[:num_rows], BF16)
    cache = make_cache(sampler.device, vocab, BF16)
    check(sampler, inputs.args, logits_cache=cache, cache_col=0)


@pytest.mark.parametrize("vocab", [129280, 151936, 248320])
def test_large_vocabularies(sampler, vocab: int) -> None:
    inputs = make_inputs(sampler.device, vocab, (1,), BF16)
    check(sampler, inputs.args, is_drafting=True)


def test_strided_rows_and_metadata(sampler) -> None:
    inputs = make_inputs(sampler.device, 1025, (1, INERT, 4, 2), BF16)
    contiguous = sampler(*inputs.args)
    inputs.logits = strided(inputs.logits)
    inputs.idx_mapping, inputs.pos = strided(inputs.idx_mapping), strided(inputs.pos)
    assert inputs.logits.stride() == (3 * 1025, 1)
    assert inputs.pos.stride() == inputs.idx_mapping.stride() == (3,)
    assert torch.equal(check(sampler, inputs.args), contiguous)


def test_expanded_and_negative_order_metadata(sampler) -> None:
    """Stride 0 in the rows of logits and in pos."""
    inputs = make_inputs(sampler.device, 300, (1, 4, 0))
    inputs.logits = inputs.logits[:1].expand(3, 300)
    inputs.pos = inputs.pos[:1].expand(3)
    check(sampler, inputs.args)


def test_b1_02_rows_sliced_from_a_padded_head(sampler) -> None:
    padded = torch.full((4, 8), 100.0, device=sampler.device)
    padded[:, :5] = torch.eye(5, device=sampler.device)[:4]
    inputs = make_inputs(sampler.device, 1, (2,) * 4)
    inputs.logits = padded[:, :5]
    assert check(sampler, inputs.args).tolist() == [0, 1, 2, 3]
    assert (padded[:, 5:] == 100.0).all()


def test_misaligned_slices(sampler) -> None:
    """logits[:, 1:], idx[1:], pos[3:], seeds[1:] of larger buffers (B6-02)."""
    inputs = make_inputs(sampler.device, 1024, (1, 4, 0), BF16)
    wanted = check(sampler, inputs.args)

    def slice_of(x: Tensor, skip: int) -> Tensor:
        return torch.cat([x.new_zeros(*x.shape[:-1], skip), x], -1)[..., skip:]

    args = tuple(slice_of(x, 3 if x is inputs.pos else 1) for x in inputs.args)
    assert torch.equal(sampler(*args), wanted)


def test_empty_batch_of_any_strides(sampler) -> None:
    """torch calls a tensor without elements contiguous whatever its strides."""
    inputs = make_inputs(sampler.device, 12, ())
    inputs.logits = torch.empty(0, 12, device=sampler.device).as_strided((0, 12), (0, 0))
    assert inputs.logits.is_contiguous()
    check(sampler, inputs.args)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_narrow_slots_of_a_large_table(sampler, dtype: torch.dtype) -> None:
    """S beyond the range of the dtype of idx_mapping: a comparison in that dtype would wrap."""
    inputs = make_inputs(sampler.device, 90, (100, 7), temperatures=(0.9,) * 300)
    inputs.logits.zero_()  # a row taken for inert gives id 0
    inputs.idx_mapping = inputs.idx_mapping.to(dtype)
    check(sampler, inputs.args)
