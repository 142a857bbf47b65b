"""top_k_top_p_: every clause of its contract, for the CPU implementation and for the kernels.

Both are compared with the float64 model of ``top_k_top_p_model.py``, and the kernels with the CPU
implementation, bit for bit (``check``).
"""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import dspark_ops
from dspark_ops.mass import LARGEST, mass_shift
from dspark_ops.top_k_top_p import top_k_top_p_ref

from .cases import strided
from .test_statistics import assert_follows
from .top_k_top_p_cases import (
    I32,
    IMPLEMENTATIONS,
    INF,
    KINDS,
    NAN,
    P_SENTINELS,
    Cpu,
    Ops,
    check,
    filtered,
    k_sentinels,
    kept_ids,
    make_filters,
    make_rows,
    row_whose_goal_needs_integers,
    rows_of_all_kinds,
    same_bits,
    under_interpreter,
)
from .top_k_top_p_model import assert_kept


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return IMPLEMENTATIONS[request.param]


# Random rows


@pytest.mark.parametrize("seed", range(20))
def test_10000_random_rows_on_a_cpu(seed: int) -> None:
    """20 batches of 506 rows of every kind: at most one in a thousand is not that of float64."""
    vocab = (64, 300, 1025, 4000)[seed % 4]
    rows = rows_of_all_kinds(23, vocab, seed)
    k, p = make_filters(len(rows), vocab, seed)
    out = filtered(Cpu, rows, k, p)
    assert assert_kept(rows, out, k, p) <= len(rows) // 1000


@pytest.mark.parametrize("vocab", [1, 7, 1000, 1025, 2500, 5000])
def test_rows_of_every_kind(ops: Ops, vocab: int) -> None:
    rows = rows_of_all_kinds(under_interpreter(ops, 2, 20), vocab, seed=vocab)
    check(ops, rows, *make_filters(len(rows), vocab, seed=vocab), -12345.0)


@pytest.mark.parametrize("filters", ["k", "p", "neither"])
def test_one_filter_or_none(ops: Ops, filters: str) -> None:
    """An absent filter is one that is off in every row."""
    vocab = under_interpreter(ops, 300, 1025)
    rows = rows_of_all_kinds(1, vocab, seed=3)
    k, p = make_filters(len(rows), vocab, seed=8)
    given_k, given_p = k if filters == "k" else None, p if filters == "p" else None
    out = check(ops, rows, given_k, given_p)
    off_k, off_p = torch.zeros_like(k), torch.ones_like(p)
    k, p = off_k if given_k is None else k, off_p if given_p is None else p
    assert same_bits(out, filtered(ops, rows, k, p))
    assert same_bits(out, rows) == (filters == "neither")


# The order: logit descending, then id ascending


@pytest.mark.parametrize("vocab", [40, 3000])
def test_ties_at_the_edge_go_to_the_lowest_ids(ops: Ops, vocab: int) -> None:
    """By k and by p, with the tied ids at the start, at the end, scattered."""
    tied = vocab // 2
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:tied].sort().values
    for where in (torch.arange(tied), torch.arange(tied, vocab), ids):
        row = torch.full((1, vocab), -60.0)
        row[0, where[:tied]] = 1.0
        row[0, where[7]] = 2.0
        others = [i for i in where.tolist() if i != int(where[7])]
        for num in (1, 2, tied // 2, tied):
            wanted = sorted([int(where[7]), *others[: num - 1]])
            assert kept_ids(ops, row, [num], None) == [wanted]
            total = math.e + len(where) - 1
            p = (math.e + num - 1.5) / total
            if p < 1:
                assert kept_ids(ops, row, None, [p]) == [wanted]


def test_signed_zeros_are_equal(ops: Ops) -> None:
    row = [[-1.0, 0.0, -0.0, 0.0, -0.0, -2.0], [-1.0, -0.0, 0.0, -0.0, 0.0, 0.5]]
    assert kept_ids(ops, row, [2, 3], None) == [[1, 2], [1, 2, 5]]
    assert kept_ids(ops, row, [4, 4], [0.4, 1.0]) == [[1, 2], [1, 2, 3, 5]]


def test_one_ulp_and_denormals_are_told_apart(ops: Ops) -> None:
    """A flush to zero, or a difference rounded away, would make ties of them."""
    ulp, tiny = 2.0**-23, 2.0**-149
    rows = [
        [1.0, 1.0 + ulp, 1.0, 1.0 + 2 * ulp],
        [0.0, tiny, -tiny, 2 * tiny],
        [-1.0, -1.0 + ulp / 2, -1.0 - ulp, -1.0 + ulp],
    ]
    assert kept_ids(ops, rows, [2, 2, 2], None) == [[1, 3]] * 3
    assert kept_ids(ops, rows, None, [0.3, 0.3, 0.3]) == [[1, 3]] * 3


def test_the_largest_numbers(ops: Ops) -> None:
    rows = [[LARGEST, -LARGEST, LARGEST, 0.0], [-LARGEST, -LARGEST, -INF, -LARGEST]]
    assert kept_ids(ops, rows, [3, 2], None) == [[0, 2, 3], [0, 1]]
    assert kept_ids(ops, rows, None, [0.9, 0.5]) == [[0, 2], [0, 1]]
    assert kept_ids(ops, rows, None, [0.5, 0.9]) == [[0], [0, 1, 3]]


# k


@pytest.mark.parametrize("vocab", [128, 1025])
def test_exactly_k_are_kept(ops: Ops, vocab: int) -> None:
    for k in under_interpreter(ops, [1, 2, 100, vocab - 1], range(1, 129)):
        rows = torch.cat([make_rows(kind, 1, vocab, k) for kind in ("normal", "three_values")])
        assert [len(ids) for ids in kept_ids(ops, rows, [k, k], None)] == [k, k]


def test_b1_13_sentinels_of_k(ops: Ops) -> None:
    ks = [0, -1, 1, 64, 128, 129, 1 << 30, -(2**31), 2**31 - 1]
    rows = make_rows("normal", 1, 128, 0).repeat(len(ks), 1)
    kept = kept_ids(ops, rows, ks, None)
    assert [len(ids) for ids in kept] == [128, 128, 1, 64, 128, 128, 128, 128, 128]
    assert kept[2] == [int(rows[0].argmax())]


def test_k_counts_what_is_above_minus_inf(ops: Ops) -> None:
    row = [[-INF, 3.0, -INF, 1.0, 2.0, -INF]]
    for k, wanted in ((1, [1]), (2, [1, 4]), (3, [1, 3, 4]), (4, [1, 3, 4]), (5, [1, 3, 4])):
        assert kept_ids(ops, row, [k], None) == [wanted]


# p


def test_p_is_of_what_k_left(ops: Ops) -> None:
    """Of (.4, .3, .2, .1): k = 2 leaves .571 and .429, k = 3 leaves .444, .333 and .222."""
    row = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for k, p, wanted in (
        (2, 0.55, [1]),
        (2, 0.6, [1, 3]),
        (0, 0.6, [1, 3]),
        (0, 0.75, [1, 2, 3]),
        (3, 0.75, [1, 3]),
        (3, 0.8, [1, 2, 3]),
        (1, 0.99, [1]),
    ):
        assert kept_ids(ops, row, [k], [p]) == [wanted]


def test_b1_08_mass_exactly_equal_to_p(ops: Ops) -> None:
    """Equal logits, whose shares are exact: n of V at p = n / V, one more an ulp above."""
    for vocab in (4, 8):
        row = torch.full((1, vocab), -3.25)
        for n in range(1, vocab):
            above = float(torch.tensor(n / vocab).nextafter(torch.tensor(2.0)))
            assert kept_ids(ops, row, None, [n / vocab]) == [list(range(n))]
            assert kept_ids(ops, row, None, [above]) == [list(range(n + 1))]


def test_b1_08_edges_of_unequal_shares(ops: Ops) -> None:
    """p at an edge, to within rounding, is in ``check``'s bound; a millionth from it is not."""
    for law, p, fewer, more in (
        ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3], [0, 1, 3]),
        ([0.5, 0.25, 0.125, 0.125], 0.75, [0, 1], [0, 1, 2]),
    ):
        row = torch.tensor([law]).log()
        assert kept_ids(ops, row, None, [p - 1e-6]) == [fewer]
        assert kept_ids(ops, row, None, [p])[0] in (fewer, more)
        assert kept_ids(ops, row, None, [p + 1e-6]) == [more]
    assert kept_ids(ops, torch.tensor([[0.6, 0.4]]).log(), None, [0.7]) == [[0, 1]]


def test_b1_07_p_just_below_one(ops: Ops) -> None:
    """Where an fp32 sum ends at 0.99981: 31997, 32000, and an ordinary nucleus beside them."""
    rows = torch.zeros(3, 32000)
    rows[2, :3] = torch.tensor([12.0, 13.0, 14.0])
    kept = kept_ids(ops, rows, None, [0.9999, 0.9999999, 0.9])
    assert kept[0] == list(range(31997))
    assert kept[1] == list(range(32000))
    assert kept[2] == [0, 1, 2]


@pytest.mark.parametrize("p", [0.0, -0.0, -1.0, -INF, 1e-45, 1e-30, 1e-9, 2.0**-24])
def test_no_p_loses_the_last_token(ops: Ops, p: float) -> None:
    """p below any resolution keeps the first of the order, of 65 rows too."""
    vocab = 300
    kinds = ("equal", "normal", "three_values", "far_apart", "denormal")
    rows = torch.cat([make_rows(kind, 13, vocab, 4) for kind in kinds])
    num = under_interpreter(ops, 10, 65)
    rows = rows[:: 65 // num][:num]
    kept = kept_ids(ops, rows, None, [p] * num)
    assert kept == [[int(x)] for x in rows.argmax(1)]


@pytest.mark.parametrize("p", [1.0, 1.5, INF, NAN])
def test_p_is_off_from_one_on(ops: Ops, p: float) -> None:
    rows = make_rows("far_apart", 2, 1000, 5)
    assert same_bits(check(ops, rows, None, [p, p]), rows)
    assert [len(ids) for ids in kept_ids(ops, rows, [5, 0], [p, p])] == [5, 1000]


def test_the_largest_p_below_one(ops: Ops) -> None:
    """Kept is what the first 1 - 2^-24 of the mass needs; the 60-nats-lower tail is not."""
    row = torch.full((1, 1000), -60.0)
    row[0, ::10] = 0.0
    assert kept_ids(ops, row, None, [1 - 2.0**-24]) == [list(range(0, 1000, 10))]


def test_the_goal_is_compared_as_an_integer(ops: Ops) -> None:
    """One fewer has the goal less 1, at 2^56, where a float64 cannot tell them apart."""
    row, p, num = row_whose_goal_needs_integers()
    assert kept_ids(ops, row, None, [p]) == [list(range(num))]


@pytest.mark.parametrize("vocab", [2**18, 2**18 + 1, 2**20])
def test_totals_of_large_vocabularies_fit(vocab: int) -> None:
    """Equal logits, whose masses add up to 2^62: a wrapped sum would be negative."""
    out = filtered(Cpu, torch.zeros(2, vocab), None, [0.5, 1 - 2.0**-24])
    wanted = [math.ceil(vocab / 2), math.ceil(vocab * (1 - 2.0**-24))]
    assert (out == 0).sum(1).tolist() == wanted
    assert (out[0, : wanted[0]] == 0).all()


@pytest.mark.parametrize("vocab", [2**18, 2**19, 2**19 + 1, 2**20])
def test_tails_lighter_than_a_unit_stay_within_the_bound(vocab: int) -> None:
    """Each token of the tail weighs a little less than the unit of masses, or half of it."""
    unit = 2.0 ** (mass_shift(vocab) - 44)
    rows = torch.zeros(2, vocab)
    rows[:, 1:] = torch.tensor([[0.99 * unit], [0.5 * unit]]).log()
    for p in (1 - 2.0**-24, 1 - 2.0**-23):
        ps = torch.tensor([p, p])
        assert_kept(rows, filtered(Cpu, rows, None, ps), None, ps)


# Rows without an ordinary distribution


def test_a_row_of_minus_inf_is_left_as_it_is(ops: Ops) -> None:
    rows = torch.full((4, 33), -INF)
    out = check(ops, rows, [3, 0, 0, 1], [0.5, 0.0, 1.0, 1.0], -7.0)
    assert same_bits(out, rows)


def test_plus_inf(ops: Ops) -> None:
    """With p on, the lowest alone; k orders them as any tie."""
    rows = [[1.0, INF, LARGEST, INF, -INF, INF]] * 5
    k, p = [0, 2, 2, 4, 5], [0.9, 1.0, 0.9, 1.0, 0.0]
    assert kept_ids(ops, rows, k, p) == [[1], [1, 3], [1], [1, 2, 3, 5], [1]]


def test_b1_14_nan(ops: Ops) -> None:
    """The first NaN alone, whatever else is in the row; without a filter nothing changes."""
    rows = torch.zeros(6, 1000)
    rows[0, 999] = NAN
    rows[1] = NAN
    rows[2, [500, 300, 700]] = torch.tensor([INF, NAN, NAN])
    rows[3] = -INF
    rows[3, 4] = NAN
    rows[4:, 10:20] = NAN
    out = check(ops, rows, [2, 0, 0, 5, 0, 2000], [1.0, 0.5, 0.0, 0.5, 1.0, NAN])
    kept = [row.nonzero().flatten().tolist() for row in out[:4] != -INF]
    assert kept == [[999], [0], [300], [4]]
    assert same_bits(out[4:], rows[4:])


def test_b1_14_broken_rows_leave_their_neighbours_alone(ops: Ops) -> None:
    rows = make_rows("normal", 5, 1000, 6)
    k, p = [50, 0, 50, 7, 0], [0.9, 0.5, 1.0, 0.5, 0.99]
    good = check(ops, rows, k, p)
    rows[1], rows[3, 999] = NAN, NAN
    out = check(ops, rows, k, p)
    assert same_bits(out[::2], good[::2])


def test_bits_that_are_kept(ops: Ops) -> None:
    """-0.0, denormals and the payload of a NaN survive in rows with and without a filter."""
    payload = torch.tensor([0x7FC12345, 0xFFC00012 - 2**32], dtype=I32)
    rows = torch.tensor([[0.0, -1.0, -0.0], [1e-45, -1e-45, -0.0], [0.0] * 3, [0.0] * 3])
    rows[2:, 1] = payload.view(torch.float32)
    assert rows[2:].isnan().any(1).all()
    for k in ([2, 2, 1, 2], [0, 0, 0, 0]):
        out = check(ops, rows, k, [1.0, 1.0, 1.0, 1.0])
        kept = out != -INF
        assert torch.equal(out[kept].view(I32), rows[kept].view(I32))


@pytest.mark.parametrize("mask_value", [-INF, -1e4, -LARGEST, 0.0, 5, 99.5, INF, NAN, 1e-45])
def test_mask_value(ops: Ops, mask_value: float) -> None:
    """What is masked becomes it, -inf does not."""
    broken = "inf" if math.isnan(mask_value) else "nan"
    rows = torch.cat([make_rows(k, 2, 300, 7) for k in ("far_from_zero", "grammar", broken)])
    rows[0, 200:] = -INF
    out = check(ops, rows, [3, 0, 2, 0, 5, 0], [0.9, 0.9, 1.0, 0.0, 0.5, 0.5], mask_value)
    masked = out[0].isnan() if math.isnan(mask_value) else out[0] == mask_value
    assert int(masked.sum()) >= (200 - 3 if mask_value != -INF else 300 - 3)


# A row's result depends on that row alone


@pytest.mark.parametrize("k", [2, 3])
def test_b1_01_tied_rows_in_every_batch(ops: Ops, k: int) -> None:
    row = [2.0, 1.0, 1.0, 1.0, 0.0, -1.0]
    for num in under_interpreter(ops, (1, 7, 9), (1, 7, 8, 9, 64)):
        assert kept_ids(ops, [row] * num, [k] * num, None) == [list(range(k))] * num


def test_any_batch(ops: Ops) -> None:
    """Alone, in parts, reversed: the bits of the whole batch."""
    rows = rows_of_all_kinds(under_interpreter(ops, 1, 6), 1025, seed=9)
    k, p = make_filters(len(rows), 1025, seed=9)
    together = check(ops, rows, k, p)

    def part(index: Tensor) -> None:
        assert same_bits(filtered(ops, rows[index], k[index], p[index]), together[index])

    for size in under_interpreter(ops, (7,), (1, 7, 65)):
        for index in torch.arange(len(rows)).split(size):
            part(index)
    part(torch.arange(len(rows)).flip(0))
    for row in (0, 5, len(rows) - 1):
        part(torch.tensor([row]))


@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("pad", [0, 1, 8, 2000])
def test_any_stride_and_offset(ops: Ops, pad: int, skip: int) -> None:
    """Rows inside a larger buffer, whose other elements keep their bits."""
    vocab = 1000
    rows = torch.cat([make_rows(kind, 1, vocab, pad + skip) for kind in list(KINDS)[::4]])
    k, p = make_filters(len(rows), vocab, seed=pad + skip)
    wanted = check(ops, rows, k, p)
    buffer = torch.full((len(rows) + 2, skip + vocab + pad), 100.0, device=ops.device)
    view = buffer[1:-1, skip : skip + vocab]
    view.copy_(rows)
    ops.top_k_top_p_(view, k.to(ops.device), p.to(ops.device), mask_value=-INF)
    assert same_bits(view, wanted)
    view.fill_(100.0)
    assert (buffer == 100.0).all()


def test_b1_02_rows_of_a_padded_head(ops: Ops) -> None:
    """The maxima stay where they are, the padding stays 100, nothing is NaN."""
    base = torch.zeros(4, 8)
    base[:, :5].fill_diagonal_(1.0)
    base[:, 5:] = 100.0
    for k, p in (([1] * 4, None), ([2] * 4, [0.9] * 4), (None, [0.3] * 4)):
        buffer = base.to(ops.device, copy=True)
        ks = None if k is None else torch.tensor(k, dtype=I32, device=ops.device)
        ps = None if p is None else torch.tensor(p, device=ops.device)
        ops.top_k_top_p_(buffer[:, :5], ks, ps)
        assert buffer[:, :5].argmax(1).tolist() == [0, 1, 2, 3]
        assert (buffer[:, 5:] == 100.0).all()
        assert not buffer.isnan().any()
        assert_kept(base[:, :5], buffer[:, :5], *(None if x is None else x for x in (ks, ps)))


def test_strided_filters(ops: Ops) -> None:
    """k and p may be columns, or one value expanded."""
    rows = make_rows("normal", 5, 300, 12).to(ops.device)
    k, p = (x.to(ops.device) for x in make_filters(5, 300, seed=12))
    for ks, ps in ((strided(k), strided(p)), (k[:1].expand(5), p[:1].expand(5))):
        out = ops.top_k_top_p_(rows.clone(), ks, ps)
        assert_kept(rows, out, ks, ps)
        assert same_bits(out, filtered(ops, rows, ks.contiguous(), ps.contiguous()))


# Sizes


def test_empty_batch(ops: Ops) -> None:
    for vocab in (1, 1000):
        logits = torch.empty(0, vocab, device=ops.device)
        k, p = logits.new_empty(0, dtype=I32), logits.new_empty(0)
        assert ops.top_k_top_p_(logits, k, p) is logits
        assert ops.top_k_top_p(logits, k, p).shape == (0, vocab)


def test_one_token(ops: Ops) -> None:
    values = [0.5, -0.0, INF, -INF, NAN, -LARGEST, 1e-45]
    for k, p in product((0, 1, 5), (0.0, 0.5, 1.0, NAN)):
        rows = torch.tensor(values)[:, None]
        assert same_bits(check(ops, rows, [k] * 7, [p] * 7, -2.0), rows)


def test_every_sentinel_with_every_other(ops: Ops) -> None:
    vocab = 65
    pairs = list(product(k_sentinels(vocab), P_SENTINELS))
    pairs = pairs[:: under_interpreter(ops, 7, 1)]
    k, p = (list(x) for x in zip(*pairs, strict=True))
    for kind in under_interpreter(ops, ["three_values", "normal"], KINDS):
        check(ops, make_rows(kind, len(pairs), vocab, 13), k, p)


# Cases of group 1


def test_b1_10_equal_logits_stay_equally_likely(ops: Ops) -> None:
    """80,000 draws of what k left of eight equal tokens. False alarms: one in a million."""
    for k in (8, 4):
        row = filtered(ops, torch.zeros(1, 8), [k], None)
        rows = 80_000
        ids = dspark_ops.gumbel_sample(
            row.expand(rows, 8),
            torch.zeros(rows, dtype=I32),
            torch.ones(1),
            torch.tensor([7]),
            torch.arange(rows),
        )
        counts = torch.bincount(ids, minlength=8)
        assert (counts[k:] == 0).all()
        assert (counts[:k] / rows - 1 / k).abs().max() < 0.0075
        assert_follows(ids, torch.full((k,), 1 / k))


@pytest.mark.parametrize("vocab", [32000, 128256])
def test_b1_11_peaked_rows(ops: Ops, vocab: int) -> None:
    """0.9 of the mass in one token, the rest slightly falling."""
    if ops is not Cpu and vocab > 32000 and ops.device == "cpu":
        pytest.skip("the smaller vocabulary takes the interpreter long enough")
    rest = torch.linspace(0.0, -0.01, vocab - 1)
    head = math.log(0.9 / 0.1) + float(rest.double().logsumexp(0))
    row = torch.cat([torch.tensor([head]), rest])[None].repeat(3, 1)
    kept = kept_ids(ops, row, [50, 0, 50], [1.0, 0.95, 0.95])
    assert kept[0] == list(range(50))
    assert 1000 < len(kept[1]) < vocab
    assert kept[1] == list(range(len(kept[1])))
    assert kept[2] == [0]  # of the 50, nearly all of the mass


def test_b1_22_padding_is_no_token(ops: Ops) -> None:
    """V 1000 in rows of 1024, the padding larger than every logit: its zeros stay, none is kept."""
    storage = torch.zeros(4, 1024, device=ops.device)
    storage[:, :1000] = -5.0
    k = torch.tensor([0, 10, 0, 900], dtype=I32, device=ops.device)
    p = torch.tensor([0.5, 1.0, 0.75, 0.25], device=ops.device)
    ops.top_k_top_p_(storage[:, :1000], k, p)
    assert (storage[:, 1000:] == 0).all()
    kept = storage[:, :1000] == -5.0
    assert kept.sum(1).tolist() == [500, 10, 750, 225]
    for row in range(4):
        num = int(kept[row].sum())
        assert kept[row, :num].all()


def test_b1_23_bf16_logits_of_a_large_vocabulary() -> None:
    """One token at +6 over 131071 zeros, p = 0.999: the float64 set, its ties included."""
    rows = torch.zeros(2, 131072)
    rows[:, 70_000] = 6.0
    p = torch.tensor([0.999, 0.5])
    total = math.exp(6.0) + 131071
    for row, ids in enumerate(kept_ids(Cpu, rows.bfloat16().float(), None, p)):
        assert len(ids) == 1 + math.ceil(float(p[row]) * total - math.exp(6.0))
        assert 70_000 in ids


# The checker itself


def test_the_checker_sees_faults() -> None:
    rows = make_rows("three_values", 4, 200, 14)
    rows[3, 100:] = -INF
    k, p = torch.tensor([20, 0, 20, 20], dtype=I32), torch.tensor([1.0, 0.3, 0.5, 1.0])
    right = filtered(Cpu, rows, k, p)
    assert assert_kept(rows, right, k, p) == 0
    faults: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {}

    def fault(f: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        faults[f.__name__] = f

    @fault
    def one_more(x: Tensor, kept: Tensor, rest: Tensor) -> None:
        x[rest[0]] = rows[1, rest[0]]

    @fault
    def one_fewer(x: Tensor, kept: Tensor, rest: Tensor) -> None:
        x[kept[-1]] = -INF

    @fault
    def another_of_the_ties(x: Tensor, kept: Tensor, rest: Tensor) -> None:
        tied = rest[rows[1, rest] == rows[1, kept].min()]
        x[tied[-1]] = rows[1, tied[-1]]
        x[kept[-1]] = -INF

    @fault
    def another_value(x: Tensor, kept: Tensor, rest: Tensor) -> None:
        x[rest[0]] = -1e30

    @fault
    def a_changed_bit(x: Tensor, kept: Tensor, rest: Tensor) -> None:
        x[kept[0]] = x[kept[0]].nextafter(torch.tensor(9.0))

    @fault
    def none_left(x: Tensor, kept: Tensor, rest: Tensor) -> None:
        x.fill_(-INF)

    order = rows[1].sort(descending=True, stable=True).indices
    num = int((right[1] > -INF).sum())
    for name, plant in faults.items():
        wrong = right.clone()
        plant(wrong[1], order[:num], order[num:])
        assert not same_bits(wrong, right), name
        with pytest.raises(AssertionError):
            assert_kept(rows, wrong, k, p)
    wrong = right.clone()
    wrong[3, 150] = -1e4
    with pytest.raises(AssertionError):
        assert_kept(rows, wrong, k, p)


def test_float_sums_would_be_seen() -> None:
    """What many do, softmax and cumsum in fp32, fails on some of the random rows."""
    rows = torch.cat([make_rows(kind, 20, 4000, 15) for kind in ("normal", "equal", "peaked")])
    p = torch.linspace(0, 1 - 2.0**-24, len(rows))
    ordered, ids = rows.sort(descending=True, stable=True)
    mass = ordered.softmax(1)
    keep = mass.cumsum(1) - mass < p[:, None]
    wrong = rows.where(torch.zeros_like(keep).scatter(1, ids, keep), -INF)
    with pytest.raises(AssertionError):
        assert_kept(rows, wrong, None, p)
    assert_kept(rows, top_k_top_p_ref(rows, None, p, -INF), None, p)
