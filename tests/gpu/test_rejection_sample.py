"""rejection_sample on a GPU: the numpy model, sizes, laws at 1e6 draws, capture, launches."""

import importlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_ops

from ..ops.rejection_cases import (
    I32,
    METHODS,
    Batch,
    constant_pair,
    every_draft,
    first_tokens,
    make_batch,
    module,
    random_pair,
)
from ..ops.rejection_model import assert_call, assert_verified, read
from ..ops.test_rejection_sample_law import assert_joint_law
from ..ops.test_statistics import assert_follows
from .compilations import compilations
from .test_capture import capture
from .test_launch import misaligned

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")
VOCAB = 151936
KERNEL_FILES = ("statistics", "decide", "residual", "draw")


def same(outputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


def put_special_rows(batch: Batch) -> None:
    """NaN, infinities and -inf in the last logit rows of each, and placeholders among the ids."""
    target, draft = batch.target_logits, batch.draft_logits
    vocab = target.shape[1]
    target[3, vocab // 2] = NAN
    target[5] = -INF
    target[7, -1] = INF
    target[9, ::2] = -INF
    batch.draft_token_ids[11], batch.draft_token_ids[13] = -1, vocab
    if draft is not None:
        slots = batch.idx_mapping.long()
        draft[slots[-1], 0, vocab // 3] = NAN
        draft[slots[-2], 1] = -INF
        draft[slots[-3], :, ::3] = -INF
    batch.idx_mapping[1] = -1


# Against the model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [1, 7, 1023, 1025, 4096, 8193, 129280, VOCAB, 248320])
def test_kernels_equal_the_model(vocab: int, method: str) -> None:
    """Ragged drafts of each kind of row, near the target and far from it, with every dtype."""
    drafts = [3, 0, 2, -1, 4, 4, 1, 4]
    dtypes = (BF16, F16, F32) if vocab < 10_000 else (BF16,)
    for (number, dtype), special in product(enumerate(dtypes), (False, True)):
        apart = 0.7 if special else 0.1
        batch = make_batch("cuda", drafts, vocab, dtype=dtype, apart=apart, seed=number)
        if special:
            put_special_rows(batch)
        for draft in (batch.draft_logits, None):
            args = replace(batch, draft_logits=draft).args
            # Few ids, and rows of few, make ties.
            has_ties = special or vocab < 1000
            outputs = assert_call(dspark_ops, args, has_ties, num_steps=4, method=method)
            tokens, num_sampled, _ = outputs
            used = torch.arange(5, device="cuda") < num_sampled[:, None]
            assert ((tokens >= 0) & (tokens < vocab) == used).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [1, 2, 7, 16, 17, 40])
def test_numbers_of_steps_equal_the_model(steps: int, method: str) -> None:
    drafts = [steps, steps // 2, steps, 0, steps]
    apart = min(0.15, 0.5 / steps)
    batch = make_batch("cuda", drafts, 20_000, dtype=BF16, temperatures=(1.0, 0.8), apart=apart)
    for use_fp64 in (False, True):
        flags = {"num_steps": steps, "method": method, "use_fp64": use_fp64}
        assert_call(dspark_ops, batch.args, **flags)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("vocab", "steps"), [(2, 1), (2, 3), (3, 2), (4, 3)])
def test_every_draft_follows_the_model(vocab: int, steps: int, method: str) -> None:
    batch, _ = every_draft(vocab, steps, 200)
    batch = batch.to("cuda")
    for draft in (batch.draft_logits, None):
        args = replace(batch, draft_logits=draft).args
        assert_call(dspark_ops, args, num_steps=steps, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_kernels_equal_the_cpu_reference(method: str) -> None:
    """200 rows: equal but where rounding leaves a row open."""
    batch = make_batch("cpu", [4, 2, 4, 1] * 50, 2000, dtype=BF16, apart=0.3)
    wanted = dspark_ops.rejection_sample(*batch.args, num_steps=4, method=method)
    outputs = dspark_ops.rejection_sample(*batch.to("cuda").args, num_steps=4, method=method)
    num_open = assert_verified(outputs, read(*batch.args, num_steps=4, method=method))
    differs = torch.zeros(200, dtype=torch.bool)
    for x, y in zip(outputs, wanted, strict=True):
        differs |= (x.cpu() != y).view(200, -1).any(-1)
    assert int(differs.sum()) <= num_open <= 5


# Clauses that large rows can break


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_bonus_tokens_are_those_of_gumbel_sample(method: str, use_fp64: bool) -> None:
    """256 rows whose draft ends at once: equal bits."""
    batch = make_batch("cuda", [1] * 256, VOCAB // 16, dtype=BF16)
    batch.draft_token_ids.fill_(-1)
    flags = {"num_steps": 1, "method": method, "use_fp64": use_fp64}
    tokens, _, _ = dspark_ops.rejection_sample(*batch.args, **flags)
    first = batch.cu_num_logits[:-1].long()
    drawn = dspark_ops.gumbel_sample(
        batch.target_logits[first],
        *(batch.idx_mapping, batch.temperature, batch.seeds, batch.pos[first]),
        apply_temperature=False,
        use_fp64=use_fp64,
    )
    assert torch.equal(tokens[:, 0], drawn)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_residual_of_zero_draws_from_the_target(temperature: float, method: str) -> None:
    """p = q over 38 chunks, and an id >= V: as at a placeholder, bit for bit."""
    num = 64
    batch = make_batch("cuda", [1] * num, VOCAB, temperatures=(temperature,))
    # What the kernel divides by the temperature has to give the target's logits in every bit.
    batch.draft_logits = batch.draft_logits.round()
    divided = batch.draft_logits[batch.idx_mapping.long(), 0]
    if temperature != 1.0:
        batch.draft_logits = torch.zeros_like(batch.draft_logits)
        divided = torch.zeros_like(divided)
    batch.target_logits.view(num, 2, VOCAB)[:, 0] = divided
    batch.draft_token_ids.fill_(VOCAB)
    outputs = dspark_ops.rejection_sample(*batch.args, num_steps=1, method=method)
    batch.draft_token_ids.fill_(-1)
    wanted = dspark_ops.rejection_sample(*batch.args, num_steps=1, method=method)
    assert (outputs[1] == 1).all()
    assert same(outputs, wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
def test_b1_17_rows_in_other_batches(has_draft: bool, method: str) -> None:
    """Together, in parts, alone, reversed: the same bits."""
    batch = make_batch(
        "cuda", [4, 3, 4, 0, 2, 4] * 8, 50_000, dtype=BF16, has_draft=has_draft, apart=0.15
    )

    def verify(rows: list[int]) -> tuple[Tensor, ...]:
        return dspark_ops.rejection_sample(*batch.rows(rows).args, num_steps=4, method=method)

    together = verify(list(range(48)))
    for size in (1, 5, 16):
        for start in range(0, 48, size):
            rows = list(range(start, min(start + size, 48)))
            assert same(verify(rows), tuple(x[rows] for x in together))
    backwards = list(range(47, -1, -1))
    assert same(verify(backwards), tuple(x[backwards] for x in together))


def test_b6_04_cache_and_logits_beyond_2_31_elements() -> None:
    """Rows and columns 2^30 elements apart: the third starts at element 2^31. 6.4 and 4.3 GB."""
    vocab, stride = 3000, 2**30
    small = make_batch("cuda", [3], vocab, dtype=BF16, temperatures=(1.0,), apart=0.02)
    storage = torch.full((2**31 + 4096,), NAN, dtype=BF16, device="cuda")
    far = storage.as_strided((1, 3, vocab), (0, stride, 1))
    far.copy_(small.draft_logits[small.idx_mapping.long()])
    rows = torch.full((3 * 2**30 + 4096,), NAN, dtype=BF16, device="cuda")
    target = rows.as_strided((4, vocab), (stride, 1))
    target.copy_(small.target_logits)
    state = {
        "idx_mapping": torch.zeros(1, dtype=I32, device="cuda"),
        "temperature": torch.ones(1, device="cuda"),
        "seeds": small.seeds[:1].clone(),
    }
    longest = 0
    for method, seed in product(METHODS, range(8)):
        state["seeds"].fill_(seed)
        near = replace(small, target_logits=target.clone(), draft_logits=far.clone(), **state)
        wanted = assert_call(dspark_ops, near.args, num_steps=3, method=method)
        batch = replace(near, target_logits=target, draft_logits=far)
        assert same(dspark_ops.rejection_sample(*batch.args, num_steps=3, method=method), wanted)
        longest = max(longest, int(wanted[1]))
    assert longest == 4


def test_b6_07_70000_rows() -> None:
    batch, _ = every_draft(2, 3, 70_000 // 8)
    outputs = dspark_ops.rejection_sample(*batch.to("cuda").args, num_steps=3, method="block")
    part = batch.rows(list(range(69_800, 70_000)))
    last = tuple(x[-200:] for x in outputs)
    assert_verified(last, read(*part.args, num_steps=3, method="block"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [1024, 5008])
def test_b6_02_misaligned_logits(vocab: int, method: str) -> None:
    """Rows at odd addresses, by turns with aligned ones of equal metadata: right each time."""
    batch = make_batch("cuda", [3, 2, 3], vocab, dtype=BF16, apart=0.2)
    wanted = dspark_ops.rejection_sample(*batch.args, num_steps=3, method=method)

    def padded(x: Tensor, skip: int) -> Tensor:
        buffer = x.new_full((*x.shape[:-1], vocab + 16), NAN)
        buffer[..., skip : skip + vocab] = x
        return buffer[..., skip : skip + vocab]

    for skips in [*product((0, 1), repeat=2), (0, 0), (8, 8), (3, 0), (0, 0)]:
        logits = {
            "target_logits": padded(batch.target_logits, skips[0]),
            "draft_logits": padded(batch.draft_logits, skips[1]),
        }
        args = replace(batch, **logits).args
        outputs = dspark_ops.rejection_sample(*args, num_steps=3, method=method)
        assert same(outputs, wanted), skips


# Laws


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_greedy", [False, True])
def test_joint_law_of_1e6_draws(is_greedy: bool, method: str) -> None:
    """Marginal of the first token, joint of two across rounds. False alarms: 1e-6 each."""
    pair = random_pair(6, temperature=0.8, is_greedy=is_greedy)
    first, second, _ = first_tokens(pair, 1_000_000, 3, method, "cuda")
    assert_joint_law(pair, first, second)


@pytest.mark.parametrize("method", METHODS)
def test_b2_01_draft_and_recovery_noise_differ(method: str) -> None:
    """1e6 seeds: p within 0.002. Shared noise would give (0.100, 0.442, 0.457)."""
    p = (0.1, 0.5, 0.4)
    pair = constant_pair(p, (0.7, 0.25, 0.05))
    first, _, _ = first_tokens(pair, 1_000_000, 1, method, "cuda")
    assert (torch.bincount(first) / 1e6).tolist() == pytest.approx(p, abs=0.002)
    assert_follows(first, torch.tensor(p))


@pytest.mark.parametrize(
    ("p", "q", "steps", "accepted"),
    [
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, (10 / 9, 11 / 9)),
        ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), 3, (1.176, 1.284)),
    ],
)
def test_b2_04_block_accepts_more(p, q, steps, accepted) -> None:
    """Means of 1e6 trials within 0.005; the joint law is the target's."""
    pair = constant_pair(p, q)
    for method, wanted in zip(METHODS, accepted, strict=True):
        first, second, lengths = first_tokens(pair, 1_000_000, steps, method, "cuda")
        assert float(lengths.double().mean()) == pytest.approx(wanted, abs=0.005)
        assert_joint_law(pair, first, second)


def test_b2_13_residual_of_the_whole_draft() -> None:
    p = (0.5, 0.2, 0.3)
    for method in METHODS:
        first, _, _ = first_tokens(constant_pair(p, (0.2, 0.5, 0.3)), 1_000_000, 1, method, "cuda")
        assert_follows(first, torch.tensor(p))


# Capture, launches


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
def test_captured_call_follows_its_inputs(has_draft: bool, method: str) -> None:
    """Other drafts, lengths, temperatures and seeds in the same buffers; fewer rows too."""
    drafts = [[4, 2, 3, 0, 4], [1, 4, 4, 4, 0], [4, 4, 4, 4, -1], [0, -1, -1, -1, -1]]
    kinds = [
        make_batch("cuda", g, 5000, dtype=BF16, has_draft=has_draft, num_steps=4, seed=n)
        for n, g in enumerate(drafts)
    ]
    num_logits = max(b.pos.shape[0] for b in kinds)

    def padded(batch: Batch) -> Batch:
        def longer(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_full((num_logits - x.shape[0], *x.shape[1:]), 1)])

        return replace(
            batch,
            target_logits=longer(batch.target_logits),
            draft_token_ids=longer(batch.draft_token_ids),
            pos=longer(batch.pos),
        )

    batches = [padded(b) for b in kinds]
    buffers = replace(batches[0])
    for field in vars(buffers):
        if getattr(buffers, field) is not None:
            setattr(buffers, field, getattr(buffers, field).clone())
    flags = {"num_steps": 4, "method": method}
    graph, out = capture(lambda: dspark_ops.rejection_sample(*buffers.args, **flags))
    for batch in (*batches[1:], *batches):
        for x, y in zip(buffers.args, batch.args, strict=True):
            if x is not None:
                x.copy_(y)
        for x in out:
            x.fill_(-9)
        graph.replay()
        replayed = tuple(x.clone() for x in out)
        assert same(replayed, dspark_ops.rejection_sample(*batch.args, **flags))
        assert_verified(replayed, read(*batch.args, **flags))


@pytest.mark.parametrize("method", METHODS)
def test_no_synchronization(method: str) -> None:
    batch = make_batch("cuda", [3, 1], 5000)
    dspark_ops.rejection_sample(*batch.args, num_steps=3, method=method)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dspark_ops.rejection_sample(*batch.args, num_steps=3, method=method)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def clear_kernels() -> list[str]:
    """Forget compiled variants; names of the kernels for aligned rows."""
    names = []
    for part in KERNEL_FILES:
        for name, kernel in vars(importlib.import_module(f"{module.__name__}_{part}")).items():
            if name.startswith("_rejection") and name.endswith("_kernel"):
                kernel.device_caches.clear()
                if "unaligned" not in name:
                    names.append(name)
    return names


def test_no_compilation_over_batches_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two calls nothing is compiled up to 64 rows, 1 to 16 steps, any L; metadata sliced."""
    monkeypatch.setattr(module, "_variants", {})
    names = clear_kernels()

    def call(rows: int, steps: int) -> None:
        num_logits = rows * (steps + 1)
        target = torch.randn(num_logits, 5008, device="cuda").to(BF16)
        ids = torch.zeros(num_logits, dtype=torch.int64, device="cuda")
        dspark_ops.rejection_sample(
            target,
            torch.zeros(65, 16, 5008, dtype=BF16, device="cuda"),
            ids,
            torch.arange(rows + 1, dtype=I32, device="cuda") * (steps + 1),
            ids + rows,
            torch.arange(rows, dtype=I32, device="cuda"),
            torch.ones(65, device="cuda"),
            torch.arange(65, device="cuda"),
            num_steps=steps,
            method="block",
        )

    with compilations() as seen:
        call(2, 3)
        call(3, 2)
    assert len(seen) == len(names)
    assert all(any(name in text for text in seen) for name in names)
    with compilations() as seen:
        for rows, steps in [*product((1, 2, 17), range(1, 17)), *product(range(1, 65), (1, 7))]:
            call(rows, steps)
    assert seen == []


def test_b6_02_sliced_metadata_compiles_nothing() -> None:
    batch = make_batch("cuda", [3, 0, 2, 3], 5008, dtype=BF16)
    wanted = dspark_ops.rejection_sample(*batch.args, num_steps=3, method="block")
    vectors = ("draft_token_ids", "cu_num_logits", "pos", "idx_mapping", "temperature", "seeds")
    sliced = replace(batch, **{name: misaligned(getattr(batch, name), 1) for name in vectors})
    module._variants.clear()  # so that each launch asks Triton
    with compilations() as seen:
        outputs = dspark_ops.rejection_sample(*sliced.args, num_steps=3, method="block")
    assert seen == []
    assert same(outputs, wanted)


def test_calls_by_turns() -> None:
    """Methods, dtypes, one-hot, sizes, twice over: no kept variant is taken for another."""
    batches = [
        make_batch("cuda", drafts, vocab, dtype=dtype, has_draft=has_draft, num_steps=4)
        for drafts, vocab, dtype, has_draft in product(
            ([3, 1], [4, 4, 0]), (1000, 1024), (BF16, F32), (True, False)
        )
    ]
    for _ in range(2):
        for batch, method, use_fp64 in product(batches, METHODS, (False, True)):
            flags = {"num_steps": 4, "method": method, "use_fp64": use_fp64}
            assert_call(dspark_ops, batch.args, **flags)


def test_memory_of_a_call() -> None:
    """Work space of a call of 64 rows, 7 steps: below 10 MB beside 155 MB of target logits."""
    batch = make_batch("cuda", [0] * 64, VOCAB, num_steps=7)
    batch.target_logits = torch.zeros(64 * 8, VOCAB, dtype=BF16, device="cuda")
    batch.draft_logits = torch.zeros(66, 7, VOCAB, dtype=BF16, device="cuda")
    batch.draft_token_ids = torch.zeros(64 * 8, dtype=torch.int64, device="cuda")
    batch.pos = torch.zeros(64 * 8, dtype=torch.int64, device="cuda")
    batch.cu_num_logits = torch.arange(65, dtype=I32, device="cuda") * 8
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = dspark_ops.rejection_sample(*batch.args, num_steps=7, method="block")
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
        del outputs
    assert grown < 10e6


def test_op_and_public_function_agree() -> None:
    """The function skips the dispatcher for plain tensors; compiled by Inductor it does not."""
    torch._dynamo.reset()
    batch = make_batch("cuda", [3, 2, 0], 5000, dtype=BF16)
    wanted = dspark_ops.rejection_sample(*batch.args, num_steps=3, method="block")
    op = torch.ops.dspark.rejection_sample.default
    assert same(op(*batch.args, 3, "block"), wanted)

    def call(*args: Any) -> Any:
        return dspark_ops.rejection_sample(*args, num_steps=3, method="block")

    assert same(torch.compile(call, fullgraph=True)(*batch.args), wanted)


def test_bad_metadata_on_a_gpu() -> None:
    batch = make_batch("cuda", [2, 1], 50)
    for name, text in (
        ("draft_logits", "draft_logits must be on cuda:0.*; got cpu"),
        ("draft_token_ids", "draft_token_ids must be on cuda:0.*; got cpu"),
        ("cu_num_logits", "cu_num_logits must be on cuda:0.*; got cpu"),
        ("pos", "pos must be on cuda:0.*; got cpu"),
        ("idx_mapping", "idx_mapping must be on cuda:0.*; got cpu"),
        ("temperature", "temperature must be on cuda:0.*; got cpu"),
        ("seeds", "seeds must be on cuda:0.*; got cpu"),
    ):
        args = replace(batch, **{name: getattr(batch, name).cpu()}).args
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                dspark_ops.rejection_sample(*args, num_steps=2)
