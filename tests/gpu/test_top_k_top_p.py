"""top_k_top_p_ on a GPU: float64 sums, the CPU implementation's bits, sizes, capture, streams."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_ops
from dspark_ops.mass import masses_ref
from dspark_ops.top_k_top_p import top_k_top_p_ref

from ..ops import test_mass
from ..ops.top_k_top_p_cases import (
    I32,
    INF,
    KINDS,
    NAN,
    Cpu,
    filtered,
    make_filters,
    make_rows,
    row_whose_goal_needs_integers,
    rows_of_all_kinds,
    same_bits,
)
from ..ops.top_k_top_p_model import bound_of
from .test_capture import capture
from .test_launch import compilations, misaligned

pytestmark = pytest.mark.usefixtures("poisoned_empty")

VOCAB = 151936
# Without NaN and infinities, whose rules ``assert_filtered`` leaves to the CPU implementation.
FINITE = [kind for kind in KINDS if kind not in ("nan", "inf", "of_everything", "minus_inf")]


def rows_by_turns(kinds: list[str], num_rows: int, vocab: int, seed: int) -> Tensor:
    """Kinds by turns, so that neighbours differ."""
    each = -(-num_rows // len(kinds))
    rows = torch.stack([make_rows(kind, each, vocab, seed, "cuda") for kind in kinds], 1)
    return rows.flatten(0, 1)[:num_rows]


def assert_filtered(before: Tensor, after: Tensor, k: Tensor, p: Tensor) -> int:
    """The model's rule in float64 on the device; rows that the bound let differ from exact.

    For rows without NaN and +inf and with one number at least; masked is -inf.
    """
    vocab = before.shape[1]
    kept = after > -INF
    assert torch.equal(after.view(I32)[kept], before.view(I32)[kept])
    assert (after[~kept] == -INF).all()
    k_on, p_on = (k > 0) & (k < vocab), p < 1
    # Adding 0.0 makes 0.0 of -0.0, so that the two are equal to every kind of sort.
    ordered, ids = (before + 0.0).sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab, device="cuda")
    is_left = (ordered > -INF) & (rank < torch.where(k_on, k, vocab)[:, None])
    mass = torch.where(is_left, (ordered.double() - ordered[:, :1]).exp(), 0.0)
    share = mass.cumsum(1)
    share /= share[:, -1:].clone()
    wanted_p = p.double().clamp(min=0).where(p_on, 1.0)[:, None]
    before_it = torch.nn.functional.pad(share, (1, 0))[:, :-1]
    num_left = is_left.sum(1)
    exact = (is_left & (before_it < wanted_p)).sum(1).clamp(min=1)
    exact = exact.where(p_on, num_left)

    num = kept.sum(1)
    assert torch.equal(kept.gather(1, ids), rank < num[:, None]), "no prefix of the order"
    assert (num >= 1).all()
    assert (num <= num_left).all()
    lowest = before.masked_fill(~kept, INF).amin(1)
    highest = before.masked_fill(kept, -INF).amax(1)
    assert (lowest >= highest).all()
    assert torch.equal(num[~p_on], num_left[~p_on])
    reached = share.gather(1, num[:, None] - 1)
    one_fewer = before_it.gather(1, num[:, None] - 1)
    bound = bound_of(vocab)
    within = (reached >= wanted_p - bound) & ((one_fewer < wanted_p + bound) | (num == 1)[:, None])
    differs = num != exact
    assert within[differs].all(), (num[differs], exact[differs])
    return int(differs.sum())


def gpu_filters(num_rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    return make_filters(num_rows, vocab, seed, "cuda")


def run(rows: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float = -INF) -> Tensor:
    return dspark_ops.top_k_top_p_(rows.clone(), k, p, mask_value=mask_value)


def on_cpu(rows: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float = -INF) -> Tensor:
    return filtered(Cpu, rows.cpu(), *(x if x is None else x.cpu() for x in (k, p)), mask_value)


# Against float64 and against the CPU implementation


@pytest.mark.parametrize("num_rows", [65, 100, 128, 256])
def test_10000_random_rows(num_rows: int) -> None:
    """2500 rows in batches of each size.

    Sets that are not those of float64 must be so by a prefix within 1e-7 of p. In flat rows a token
    weighs 1e-6 to 1e-5 and a prefix errs by 1e-8, so that these are about one row in 600.
    """
    differ = 0
    batches = -(-2500 // num_rows)
    for seed in range(batches):
        rows = rows_by_turns(FINITE, num_rows, VOCAB, seed + num_rows)
        k, p = gpu_filters(num_rows, VOCAB, seed + num_rows)
        differ += assert_filtered(rows, run(rows, k, p), k, p)
    assert differ <= batches * num_rows // 250


@pytest.mark.parametrize("mask_value", [-INF, -1e4])
def test_the_bits_of_the_cpu_implementation(mask_value: float) -> None:
    """154 rows of every kind and each mask value, with both filters and with one."""
    rows = rows_of_all_kinds(7, VOCAB, 1, "cuda")
    k, p = gpu_filters(len(rows), VOCAB, 2)
    filters = [(k, p)] if mask_value == -INF else [(k, None), (None, p)]
    for ks, ps in filters:
        part = slice(None) if ks is not None and ps is not None else slice(0, None, 2)
        x, ks, ps = rows[part], *(None if f is None else f[part] for f in (ks, ps))
        assert same_bits(run(x, ks, ps, mask_value), on_cpu(x, ks, ps, mask_value))


@pytest.mark.parametrize(
    "vocab", [1, 2, 7, 1000, 1024, 1025, 4097, 32000, 129280, 248320, 2**18 + 1]
)
def test_vocabularies(vocab: int) -> None:
    """Every kind of row, in batches on both sides of any switch by size."""
    each = 1 if vocab > 100_000 else 12
    rows = rows_of_all_kinds(each, vocab, vocab, "cuda")
    k, p = gpu_filters(len(rows), vocab, vocab)
    wanted = on_cpu(rows, k, p)
    assert same_bits(run(rows, k, p), wanted)
    for start in range(0, min(len(rows), 40), 5):
        part = slice(start, start + 5)
        assert same_bits(run(rows[part], k[part], p[part]), wanted[part])
    if vocab >= 1000:  # with fewer, a row of mostly -inf may have no other
        finite = rows_by_turns(FINITE, 66, vocab, vocab + 1)
        k, p = gpu_filters(66, vocab, vocab + 1)
        assert_filtered(finite, run(finite, k, p), k, p)


def test_every_row_alone() -> None:
    rows = rows_of_all_kinds(2, VOCAB, 3, "cuda")
    k, p = gpu_filters(len(rows), VOCAB, 3)
    together = run(rows, k, p)
    for b in range(len(rows)):
        part = slice(b, b + 1)
        assert same_bits(run(rows[part], k[part], p[part]), together[part]), b


def test_a_vocabulary_of_a_million() -> None:
    """Masses drop two bits; equal logits add up to 2^62."""
    rows = rows_by_turns(["equal", "normal", "peaked", "three_values"], 8, 2**20, 4)
    k = torch.tensor([0, 0, 0, 0, 2**19, 50, 2**20 - 1, 1000], dtype=I32, device="cuda")
    p = torch.tensor([0.5, 0.9, 1 - 2**-24, 0.3, 0.5, 0.9, 1.0, 0.5], device="cuda")
    out = run(rows, k, p)
    assert_filtered(rows, out, k, p)
    assert same_bits(out, on_cpu(rows, k, p))


def test_the_goal_is_compared_as_an_integer() -> None:
    row, p, num = row_whose_goal_needs_integers()
    for rows in (1, 80):
        out = run(row.cuda().repeat(rows, 1), None, torch.full((rows,), p, device="cuda"))
        assert ((out > -INF).sum(1) == num).all()


@pytest.mark.parametrize("shift", [0, 2])
def test_masses_are_those_of_the_reference(shift: int) -> None:
    x, top = test_mass.pairs()
    wanted = masses_ref(x, top, shift).flatten()
    assert torch.equal(test_mass.kernel_masses(x, top, shift), wanted)
    assert torch.equal(masses_ref(x.cuda(), top.cuda(), shift).flatten().cpu(), wanted)


# Ties, tiny p


@pytest.mark.parametrize("num_rows", [1, 65])
@pytest.mark.parametrize("where", ["first", "last", "scattered", "all"])
def test_more_ties_at_the_edge_than_any_buffer_holds(where: str, num_rows: int) -> None:
    """20,000 and more tokens of one logit, cut by k, by p, by both; the lowest ids stay."""
    tied = VOCAB if where == "all" else 20_000
    scattered = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    start = VOCAB - tied if where == "last" else 0
    ids = scattered[:tied] if where == "scattered" else torch.arange(start, start + tied)
    ids = ids.sort().values.to("cuda")
    rows = torch.full((num_rows, VOCAB), -40.0, device="cuda")
    rows[:, ids] = 3.5
    for num in (1, 2, 1023, 1024, 16_383, 16_384, 16_385, tied - 1, tied):
        wanted = torch.full((num_rows, VOCAB), -INF, device="cuda")
        wanted[:, ids[:num]] = 3.5
        k = torch.full((num_rows,), num, dtype=I32, device="cuda")
        if num < VOCAB:
            assert torch.equal(run(rows, k, None), wanted), num
        p = torch.full((num_rows,), (num - 0.5) / tied, device="cuda")
        assert torch.equal(run(rows, None, p), wanted), num
        assert torch.equal(run(rows, torch.full_like(k, tied), p), wanted), num


def test_ties_at_the_edge_below_a_head() -> None:
    """Coarse logits: the edge falls into groups of thousands at every level."""
    for seed in range(4):
        rows = rows_by_turns(["coarse", "three_values", "bf16", "signed_zeros"], 128, VOCAB, seed)
        k, p = gpu_filters(128, VOCAB, seed + 50)
        out = run(rows, k, p)
        assert_filtered(rows, out, k, p)
        assert same_bits(out[:12], on_cpu(rows[:12], k[:12], p[:12]))


@pytest.mark.parametrize("num_rows", [1, 7, 65, 256])
@pytest.mark.parametrize("p", [0.0, -1.0, -INF, 1e-45, 1e-30, 1e-9, 6e-8])
def test_tiny_p_keeps_one_token(p: float, num_rows: int) -> None:
    kinds = [kind for kind in FINITE if kind not in ("mostly_minus_inf", "grammar")]
    rows = rows_by_turns(kinds, num_rows, VOCAB, 5)
    out = run(rows, None, torch.full((num_rows,), p, device="cuda"))
    first = (rows + 0.0).sort(dim=1, descending=True, stable=True).indices[:, 0]
    kept = out > -INF
    assert (kept.sum(1) == 1).all()
    assert torch.equal(kept.long().argmax(1), first)


# The same set whatever the call


def test_any_batch_stride_and_alignment() -> None:
    """B = 1, 7, 65, 256; logits[:, 1:], rows apart, a wide head; the bits of one call."""
    rows = rows_by_turns(list(KINDS), 256, VOCAB, 6)
    k, p = gpu_filters(256, VOCAB, 6)
    wanted = run(rows, k, p)
    for num in (1, 7, 65, 256):
        starts = range(0, 256, num) if num > 1 else range(0, 256, 11)
        for start in starts:
            part = slice(start, start + num)
            assert same_bits(run(rows[part], k[part], p[part]), wanted[part]), (num, start)
    for num, (skip, pad) in product((7, 65), ((1, 0), (0, 1), (3, 64), (0, 128), (2, VOCAB))):
        buffer = torch.full((num + 2, skip + VOCAB + pad), 100.0, device="cuda")
        view = buffer[1:-1, skip : skip + VOCAB]
        view.copy_(rows[:num])
        dspark_ops.top_k_top_p_(view, k[:num], p[:num])
        assert same_bits(view, wanted[:num]), (num, skip, pad)
        view.fill_(100.0)
        assert (buffer == 100.0).all(), "written beyond the view"
    backwards = torch.arange(255, -1, -1, device="cuda")
    assert same_bits(run(rows[backwards], k[backwards], p[backwards]), wanted[backwards])


def test_again_and_again() -> None:
    """No order of atomics shows: 30 times the same bits."""
    rows = rows_by_turns(FINITE, 70, VOCAB, 7)
    k, p = gpu_filters(70, VOCAB, 7)
    wanted, few = run(rows, k, p), run(rows[:3], k[:3], p[:3])
    for _ in range(30):
        assert torch.equal(run(rows, k, p), wanted)
        assert torch.equal(run(rows[:3], k[:3], p[:3]), few)


def test_calls_by_turns() -> None:
    """Sizes, filters and mask values, twice over: no kept variant is taken for another."""
    for _ in range(2):
        for vocab, num_rows, has_k, has_p, mask_value in product(
            (1000, 1024, 5000), (1, 2, 16, 70), (True, False), (True, False), (-INF, -1e4)
        ):
            rows = rows_by_turns(FINITE, num_rows, vocab, num_rows)
            k, p = gpu_filters(num_rows, vocab, num_rows)
            k, p = k if has_k else None, p if has_p else None
            out = run(rows, k, p, mask_value)
            assert same_bits(out, on_cpu(rows, k, p, mask_value))


def test_b6_02_sliced_filters() -> None:
    """k[1:], p[3:], columns: the same bits, and nothing is compiled for them."""
    rows = rows_by_turns(FINITE, 9, 5008, 8)
    k, p = gpu_filters(9, 5008, 8)
    wanted = run(rows, k, p)
    columns = torch.zeros(9, 3, dtype=I32, device="cuda")
    columns[:, 1] = k
    with compilations() as seen:
        assert same_bits(run(rows, misaligned(k, 1), misaligned(p, 3)), wanted)
        assert same_bits(run(rows, columns[:, 1], p), wanted)
    assert seen == []


def test_the_op_that_is_not_in_place() -> None:
    """Its input keeps its bits; expanded rows are taken; the function skips the dispatcher."""
    rows = rows_of_all_kinds(1, VOCAB, 9, "cuda")
    k, p = gpu_filters(len(rows), VOCAB, 9)
    wanted = run(rows, k, p, -1e4)
    logits = misaligned(rows, 1)
    out = torch.ops.dspark.top_k_top_p(logits, k, p, -1e4)
    assert same_bits(out, wanted)
    assert same_bits(logits, rows)
    assert out.is_contiguous()
    in_place = rows.clone()
    torch.ops.dspark.top_k_top_p_(in_place, k, p, -1e4)
    assert same_bits(in_place, wanted)
    row = make_rows("normal", 1, VOCAB, 10, "cuda")
    out = torch.ops.dspark.top_k_top_p(row.expand(len(rows), VOCAB), k, p, -INF)
    assert same_bits(out, run(row.repeat(len(rows), 1), k, p))


# Large offsets and grids


@pytest.mark.parametrize("num_rows", [1, 3])
def test_b6_04_rows_2_30_elements_apart(num_rows: int) -> None:
    """The third row starts at element 2^31; 8.6 GB. What lies around the rows keeps its bits."""
    vocab, stride = 128, 2**30
    storage = torch.full(((num_rows - 1) * stride + 4096,), 55.0, device="cuda")
    far = storage.as_strided((num_rows, vocab), (stride, 1), 128)
    rows = rows_by_turns(["normal", "coarse", "normal"], num_rows, vocab, 11)
    rows[-1, 77] = 40.0
    for k, p in (([5, 0, 3], [1.0, 0.7, 0.9]), ([0, 20, 10], [0.0, 0.9, 1.0])):
        ks = torch.tensor(k[-num_rows:], dtype=I32, device="cuda")
        ps = torch.tensor(p[-num_rows:], device="cuda")
        far.copy_(rows)
        wanted = on_cpu(rows, ks, ps)
        assert same_bits(torch.ops.dspark.top_k_top_p(far, ks, ps, -INF), wanted)
        dspark_ops.top_k_top_p_(far, ks, ps)
        assert same_bits(far, wanted)
        assert far[-1, 77] == 40.0
    far.fill_(55.0)
    assert all((part == 55.0).all() for part in storage.split(2**28))


def test_b6_04_more_than_2_31_logits() -> None:
    """14,200 rows of V 151936, 8.6 GB: the last rows start beyond element 2^31."""
    num_rows = 14_200
    logits = torch.empty(num_rows, VOCAB, device="cuda")
    for part in logits.split(1000):
        part.normal_()
    last = logits[-70:].clone()
    k, p = gpu_filters(num_rows, VOCAB, 12)
    dspark_ops.top_k_top_p_(logits, k, p)
    assert same_bits(logits[-70:], run(last, k[-70:], p[-70:]))
    assert_filtered(last, logits[-70:], k[-70:], p[-70:])
    # Every row: what is kept is no more than what k asks for, and at least one token.
    num = torch.cat([(part > -INF).sum(1) for part in logits.split(1000)])
    most = torch.where((k > 0) & (k < VOCAB), k, VOCAB)
    assert ((num >= 1) & (num <= most)).all()
    assert ((num == most) | (p < 1)).all()


def test_b6_07_70000_rows() -> None:
    vocab = 64
    rows = rows_by_turns(list(KINDS), 70_000, vocab, 13)
    k, p = gpu_filters(70_000, vocab, 13)
    out = run(rows, k, p)
    assert same_bits(out, on_cpu(rows, k, p))
    assert same_bits(torch.ops.dspark.top_k_top_p(rows, k, p, -INF), out)


def test_empty_batch() -> None:
    for vocab in (1, VOCAB):
        logits = torch.empty(0, vocab, device="cuda")
        k, p = logits.new_empty(0, dtype=I32), logits.new_empty(0)
        assert dspark_ops.top_k_top_p_(logits, k, p) is logits
        assert torch.ops.dspark.top_k_top_p(logits, k, None, -INF).shape == (0, vocab)


# Capture, streams, errors


@pytest.mark.parametrize("num_rows", [1, 7, 65])
@pytest.mark.parametrize("vocab", [1025, VOCAB])
def test_captured_call_follows_its_inputs(vocab: int, num_rows: int) -> None:
    """Other rows and filters in the same buffers, filters on and off; other calls in between."""
    logits = torch.zeros(num_rows, vocab, device="cuda")
    source = torch.zeros_like(logits)
    k = torch.zeros(num_rows, dtype=I32, device="cuda")
    p = torch.ones(num_rows, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        logits.copy_(source)
        dspark_ops.top_k_top_p_(logits, k, p)
        return logits, torch.ops.dspark.top_k_top_p(source, k, None, -1e4)

    graph, out = capture(step)
    other = rows_by_turns(FINITE, num_rows + 3, vocab, 1)
    for seed in range(6):
        rows = rows_by_turns(list(KINDS)[seed:] + list(KINDS)[:seed], num_rows, vocab, seed)
        ks, ps = gpu_filters(num_rows, vocab, seed)
        if seed == 3:
            ks.zero_()
            ps.fill_(NAN)
        for x, value in ((source, rows), (k, ks), (p, ps)):
            x.copy_(value)
        run(other, *gpu_filters(num_rows + 3, vocab, seed + 9))
        for x in out:
            x.fill_(-9.0)
        graph.replay()
        replayed = [x.clone() for x in out]
        assert same_bits(source, rows)
        assert same_bits(replayed[0], run(rows, ks, ps))
        assert same_bits(replayed[1], run(rows, ks, None, -1e4))
        if num_rows < 65 or vocab == 1025:
            assert same_bits(replayed[0], on_cpu(rows, ks, ps))


@pytest.mark.parametrize("num_rows", [2, 70])
def test_no_synchronization(num_rows: int) -> None:
    rows = rows_by_turns(FINITE, num_rows, 5000, 14)
    k, p = gpu_filters(num_rows, 5000, 14)
    calls = [(k, p), (k, None), (None, p), (None, None)]
    for ks, ps in calls:
        run(rows, ks, ps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ks, ps in calls:
            run(rows, ks, ps)
            torch.ops.dspark.top_k_top_p(rows, ks, ps, -1e4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_launches_on_the_current_stream() -> None:
    """Logits that become ready late on a side stream are waited for there."""
    rows = rows_by_turns(FINITE, 66, VOCAB, 15)
    k, p = gpu_filters(66, VOCAB, 15)
    wanted = run(rows, k, p)
    logits = torch.zeros_like(rows)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        logits.copy_(rows)
        dspark_ops.top_k_top_p_(logits, k, p)
    stream.synchronize()
    assert same_bits(logits, wanted)


def test_two_streams_at_once() -> None:
    """Calls that overlap share no work space."""
    batches = [rows_by_turns(FINITE, num, VOCAB, num) for num in (66, 5)]
    filters = [gpu_filters(len(rows), VOCAB, 16) for rows in batches]
    wanted = [run(rows, *f) for rows, f in zip(batches, filters, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    outputs: list[list[Tensor]] = [[], []]
    for _ in range(10):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[n].append(run(batches[n], *filters[n]))
    torch.cuda.synchronize()
    for n, outs in enumerate(outputs):
        assert all(same_bits(out, wanted[n]) for out in outs)


def test_inputs_on_another_device_than_the_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rows = rows_by_turns(FINITE, 4, 3000, 17)
    k, p = gpu_filters(4, 3000, 17)
    there = run(*(x.to("cuda:1") for x in (rows, k, p)))
    assert there.device == torch.device("cuda:1")
    assert same_bits(there, run(rows, k, p))


def test_bad_metadata_on_a_gpu_writes_nothing() -> None:
    rows = rows_by_turns(FINITE, 4, 100, 18)
    k, p = gpu_filters(4, 100, 18)
    logits = rows.clone()
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((logits.t(), k, p), r"logits must be contiguous .* strides \(1, 100\)"),
        ((logits[:1].expand(4, 100), k, p), r"an address for each entry; got strides \(0, 1\)"),
        ((logits.half(), k, p), "logits must have dtype float32; got torch.float16"),
        ((logits, k.cpu(), p), "k must be on cuda:0.*; got cpu"),
        ((logits, k, p.cpu()), "p must be on cuda:0.*; got cpu"),
        ((logits, k.long(), p), "k must have dtype int32; got torch.int64"),
        ((logits, k, p[:3]), r"p must have shape \[B\] = \[4\]"),
    ]
    for args, text in refused:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=text):
                dspark_ops.top_k_top_p_(*args)
    assert same_bits(logits, rows)


def test_the_reference_on_a_gpu_is_that_on_a_cpu() -> None:
    """Integer sums: the same bits from torch's own kernels, here with both masks."""
    rows = rows_of_all_kinds(2, 20_000, 19, "cuda")
    k, p = gpu_filters(len(rows), 20_000, 19)
    for mask_value in (-INF, -1e4):
        wanted = on_cpu(rows, k, p, mask_value)
        assert same_bits(top_k_top_p_ref(rows, k, p, mask_value), wanted)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    rows = rows_by_turns(list(KINDS), 30, VOCAB // 8, 20)
    k, p = gpu_filters(30, VOCAB // 8, 20)

    def call(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
        dspark_ops.top_k_top_p_(logits, k, p)
        return logits

    logits = rows.clone()
    out = torch.compile(call, fullgraph=True)(logits, k, p)
    assert same_bits(out, run(rows, k, p))
    assert same_bits(logits, out)
