"""rejection_sample: every clause of its contract, for the reference and for the kernels.

Both are compared with the numpy model of ``rejection_model.py``, from the same acceptance draws and
noise. That its rules keep the target's law is in test_rejection_sample_law.py.
"""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import dspark_ops

from .cases import BF16, F16, F32, INERT, strided
from .conftest import op_module
from .model import acceptance
from .rejection_cases import (
    I32,
    METHODS,
    Batch,
    Kernels,
    Ops,
    Reference,
    every_draft,
    from_probabilities,
    make_batch,
    module,
    repeated,
    under_interpreter,
)
from .rejection_model import assert_call

# What a GPU does without a word, numpy reports: log(0), inf - inf, 0/0.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow|All-NaN):RuntimeWarning"
)
NAN, INF = math.nan, math.inf


@pytest.fixture(params=[Reference, Kernels], ids=["reference", "kernel"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 ids, so that small vocabularies have many of them."""
    monkeypatch.setattr(module, "CHUNK_V", 64)
    monkeypatch.setattr(module, "TILE_V", 64)
    monkeypatch.setattr(module, "BLOCK_K", 2)
    monkeypatch.setattr(module, "STEP_TILE", 32)
    monkeypatch.setattr(module, "_variants", {})


# Every draft of small vocabularies


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("vocab", "steps", "seeds"), [(2, 1, (60, 3)), (2, 3, (60, 1)), (3, 2, (60, 1)), (4, 3, (9, 1))]
)
def test_every_draft_follows_the_model(
    ops: Ops, small_tiles: None, vocab, steps, seeds, method: str
) -> None:
    """Decisions and tokens, from the same acceptance draws and noise."""
    batch, _ = every_draft(vocab, steps, under_interpreter(ops, seeds[1], seeds[0]))
    assert_call(ops, batch.to(ops.device).args, num_steps=steps, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_every_guessed_draft_follows_the_model(ops: Ops, small_tiles: None, method: str) -> None:
    """One-hot q, whose R_i has a closed form."""
    batch, _ = every_draft(2, 3, under_interpreter(ops, 6, 60))
    batch.draft_logits = None
    assert_call(ops, batch.to(ops.device).args, num_steps=3, method=method)


# Against the model, over shapes and dtypes

RAGGED = [3, 0, 2, -1, 1, 3]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 150])
def test_small_chunks(ops: Ops, small_tiles: None, vocab, has_draft, method: str) -> None:
    """Vocabularies of one chunk, of several, of more than a kernel takes at once."""
    for seed in range(2 if ops is Reference else 1):
        batch = make_batch(ops.device, RAGGED, vocab, has_draft=has_draft, seed=seed)
        assert_call(ops, batch.args, num_steps=3, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [1023, 1025, 4097, 9000])
def test_usual_chunks(ops: Ops, vocab: int, method: str) -> None:
    batch = make_batch(ops.device, [3, 1], vocab, dtype=BF16, temperatures=(1.3,), apart=0.4)
    assert_call(ops, batch.args, num_steps=3, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "draft_dtype"), [(BF16, BF16), (F16, F16), (F32, F32), (F32, BF16), (BF16, F32)]
)
def test_dtypes(ops: Ops, small_tiles: None, dtype, draft_dtype, method: str) -> None:
    batch = make_batch(ops.device, [3, 0, 2], 80, dtype=dtype, draft_dtype=draft_dtype)
    assert_call(ops, batch.args, num_steps=3, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
def test_fp64_noise(ops: Ops, small_tiles: None, has_draft: bool, method: str) -> None:
    batch = make_batch(ops.device, [3, 0, 2], 80, has_draft=has_draft)
    plain = assert_call(ops, batch.args, num_steps=3, method=method)
    doubled = assert_call(ops, batch.args, num_steps=3, method=method, use_fp64=True)
    assert torch.equal(plain[1], doubled[1])
    assert not torch.equal(plain[0], doubled[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [1, 2, 16, 17, 33])
def test_numbers_of_steps(ops: Ops, small_tiles: None, steps: int, method: str) -> None:
    """Drafts near the target, so that long prefixes are accepted; 17 is past the usual tile."""
    drafts = [steps, steps // 2]
    batch = make_batch(
        ops.device, drafts, 40, temperatures=(1.0,), apart=min(0.15, 0.5 / steps), seed=1
    )
    _, num_sampled, _ = assert_call(ops, batch.args, num_steps=steps, method=method)
    assert num_sampled.max() > 1 + steps // 3


def test_no_steps(ops: Ops) -> None:
    batch = make_batch(ops.device, [0, 2, 0], 9)
    for draft in (batch.draft_logits, batch.draft_logits[:, :0], None):
        args = replace(batch, draft_logits=draft).args
        tokens, _, _ = assert_call(ops, args, num_steps=0)
        assert tokens.shape == (3, 1)


def test_num_steps_may_exceed_every_draft(ops: Ops, small_tiles: None) -> None:
    """-1 fills the rest; the cache may have more columns than are used."""
    batch = make_batch(ops.device, [2, 0, 1], 30, num_steps=7)
    short = ops.rejection_sample(*batch.args, num_steps=2)
    long = assert_call(ops, batch.args, num_steps=6)
    assert torch.equal(long[0][:, :3], short[0])
    assert (long[0][:, 3:] == -1).all()
    assert all(torch.equal(x, y) for x, y in zip(short[1:], long[1:], strict=True))


# Clauses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("has_draft", [True, False])
def test_bonus_and_placeholder_tokens_are_those_of_gumbel_sample(
    ops: Ops, small_tiles: None, has_draft: bool, use_fp64: bool, method: str
) -> None:
    """After all of a draft, and where a placeholder ends it: equal bits, sampled and greedy."""
    drafts = [0, 2, 2, 2, 2, 1, 0]
    batch = make_batch(ops.device, drafts, 100, temperatures=(1.0, 0.5, 0.0), has_draft=has_draft)
    start = batch.cu_num_logits.long()[:-1]
    for b, g in enumerate(drafts):  # tokens that no draw refuses
        for i in range(g):
            batch.target_logits[start[b] + i] = -50.0
            batch.target_logits[start[b] + i, 7] = 50.0
            batch.draft_token_ids[start[b] + i + 1] = 7
    if has_draft:
        batch.draft_logits.zero_()
    ended = {1: 0, 2: 1, 3: 1}  # row: its step with a placeholder
    for b, i in ended.items():
        batch.draft_token_ids[start[b] + i + 1] = -1
    flags = {"num_steps": 2, "method": method, "use_fp64": use_fp64}
    tokens, num_sampled, _ = assert_call(ops, batch.args, **flags)
    wanted = [ended.get(b, g) for b, g in enumerate(drafts)]
    assert (num_sampled - 1).tolist() == wanted
    row = start + torch.tensor(wanted, device=ops.device)
    sampler = dspark_ops.gumbel_sample
    if ops is Kernels:
        sampler = op_module("gumbel_sample")._gumbel_sample_launch
    drawn = sampler(
        batch.target_logits[row],
        *(batch.idx_mapping, batch.temperature, batch.seeds, batch.pos[row]),
        apply_temperature=False,
        use_fp64=use_fp64,
    )
    assert torch.equal(tokens.gather(1, num_sampled.long()[:, None] - 1)[:, 0], drawn)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placeholder", [-1, -2, -(2**31)])
def test_placeholders_end_the_draft(ops: Ops, small_tiles: None, placeholder, method) -> None:
    """At each place, with valid ids behind it; they count as rejected."""
    batch = make_batch(ops.device, [3, 3, 3, 3], 40, temperatures=(1.0, 0.0), apart=0.0)
    start = batch.cu_num_logits.long()
    for b in range(4):
        if b < 3:
            batch.draft_token_ids[start[b] + 1 + b] = placeholder
    _, num_sampled, num_rejected = assert_call(ops, batch.args, num_steps=3, method=method)
    assert num_sampled[0] == 1
    assert num_sampled[1] <= 2
    assert num_sampled[2] <= 3
    assert torch.equal(num_sampled + num_rejected, torch.full_like(num_sampled, 4))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("beyond", [0, 1, 2**30])
def test_ids_from_v_on_are_rejected(ops: Ops, small_tiles: None, beyond, has_draft, method) -> None:
    """p = q = 0, and the token comes from the residual; also where the buffers have a column."""
    vocab = 40
    batch = make_batch(
        ops.device, [3, 3, 1], vocab, temperatures=(1.0, 1.0, 0.0), has_draft=has_draft, apart=0.1
    )
    wide = torch.full((batch.target_logits.shape[0], vocab + 8), 30.0, device=ops.device)
    wide[:, :vocab] = batch.target_logits
    batch.target_logits = wide[:, :vocab]
    batch.draft_token_ids[[1, 6, 9]] = vocab + beyond
    _, num_sampled, _ = assert_call(ops, batch.args, num_steps=3, method=method)
    assert num_sampled[0] == num_sampled[2] == 1
    assert num_sampled[1] <= 2


@pytest.mark.parametrize("method", METHODS)
def test_inert_rows_and_rows_without_logits(ops: Ops, small_tiles: None, method: str) -> None:
    batch = make_batch(ops.device, [2, -1, 2, 2, -1, 2, 1], 30)
    for row, slot in ((2, INERT), (3, 9), (4, INERT), (5, 2**31 - 1)):
        batch.idx_mapping[row] = slot
    tokens, num_sampled, _ = assert_call(ops, batch.args, num_steps=2, method=method)
    assert (tokens[1:6] == -1).all()
    assert (num_sampled > 0).tolist() == [True, False, False, False, False, False, True]


CU = {
    "negative": [-5, 2, 3, 6],
    "beyond": [0, 3, 2**31 - 1, 2**31 - 1],
    "decreasing": [4, 1, 5, 2],
    "lowest": [-(2**31), -(2**31), 2**31 - 1, -(2**31)],
    "too_long": [0, 6, 6, 6],
    "last": [6, 6, 7, 9],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CU)
def test_starts_out_of_range_are_clamped(ops: Ops, small_tiles: None, case, method: str) -> None:
    """Logit rows stay in [0, L), and only the first num_steps + 1 of a row count."""
    batch = make_batch(ops.device, [2, 1, 0], 30, temperatures=(1.0, 0.0), num_steps=3, apart=0.2)
    batch.cu_num_logits = torch.tensor(CU[case], dtype=I32, device=ops.device)
    tokens, num_sampled, num_rejected = assert_call(ops, batch.args, num_steps=3, method=method)
    assert ((tokens >= -1) & (tokens < 30)).all()
    assert (num_sampled + num_rejected <= 4).all()


@pytest.mark.parametrize("method", METHODS)
def test_empty_batches(ops: Ops, method: str) -> None:
    batch = make_batch(ops.device, [], 5, num_steps=2)
    tokens, _, _ = assert_call(ops, batch.args, num_steps=2, method=method)
    assert tokens.shape == (0, 3)
    batch = make_batch(ops.device, [-1, -1], 5, num_steps=2)  # L = 0
    assert (assert_call(ops, batch.args, num_steps=2, method=method)[0] == -1).all()
    batch = make_batch(ops.device, [1, 1], 5)
    state = {"temperature": batch.temperature[:0], "seeds": batch.seeds[:0]}  # S = 0
    batch = replace(batch, draft_logits=batch.draft_logits[:0], **state)
    assert (assert_call(ops, batch.args, num_steps=1, method=method)[0] == -1).all()


@pytest.mark.parametrize("has_draft", [True, False])
def test_greedy_rows_compare_with_the_argmax(ops: Ops, small_tiles: None, has_draft: bool) -> None:
    """Whatever q is, in either method, for every temperature that means greedy (DESIGN 2.2)."""
    temperatures = (0.0, -1.0, 9.99e-6, NAN, INF, -INF)
    drafts = [3] * 6
    batch = make_batch(ops.device, drafts, 70, temperatures=temperatures, has_draft=has_draft)
    if has_draft:
        batch.draft_logits[::2] = NAN
    outputs = [assert_call(ops, batch.args, num_steps=3, method=method) for method in METHODS]
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
    best = batch.target_logits.argmax(-1).view(6, 4)
    drafted = batch.draft_token_ids.view(6, 4)[:, 1:]
    matches = (drafted == best[:, :3]).long().cumprod(-1)
    assert torch.equal(outputs[0][1] - 1, matches.sum(-1).int())
    assert 0 < matches.sum() < 18
    for row, length in enumerate(matches.sum(-1).tolist()):
        assert outputs[0][0][row, : length + 1].tolist() == best[row, : length + 1].tolist()


ARGMAX_ROWS = {
    "b1_19_nan_first": ([NAN, 6.0, 8.0], 0),
    "b1_19_inf_nan": ([INF, NAN], 1),
    "b1_19_nan_inf": ([NAN, INF], 0),
    "b1_19_all_minus_inf": ([-INF] * 5, 0),
    "b1_19_signed_zeros": ([-1.0, -2.0, -3.0, -0.0] + [-4.0] * 5 + [0.0], 3),
    "two_nans": ([1.0, NAN, 2.0, NAN], 1),
    "tie": ([1.0, 3.0, 3.0], 1),
}


@pytest.mark.parametrize("case", ARGMAX_ROWS)
def test_b1_19_greedy_rows_with_nan_and_ties(ops: Ops, case: str) -> None:
    """Accepted where the draft has torch.argmax's id, and that id where it has not."""
    logits, best = ARGMAX_ROWS[case]
    for x in (best, (best + 1) % len(logits)):
        batch = repeated(torch.tensor([logits, logits]), None, [x], 1, temperature=0.0)
        tokens, _, _ = assert_call(ops, batch.to(ops.device).args, num_steps=1)
        assert tokens.tolist() == ([[best, best]] if x == best else [[best, -1]])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
def test_target_rows_that_are_no_distribution(
    ops: Ops, small_tiles: None, has_draft: bool, method: str
) -> None:
    """NaN, +inf, only -inf: the token is rejected and the id is that of DESIGN 2.4."""
    vocab, broken = 100, 5
    batch = make_batch(ops.device, [2] * broken, vocab, temperatures=(1.0,), has_draft=has_draft)
    row = batch.target_logits[3 * torch.arange(broken, device=ops.device)]
    row[0, 90] = NAN
    row[1, [80, 95]] = INF
    row[2] = -INF
    row[3] = NAN
    row[4, 50], row[4, 10] = INF, NAN
    batch.target_logits[3 * torch.arange(broken, device=ops.device)] = row
    tokens, num_sampled, _ = assert_call(ops, batch.args, num_steps=2, method=method)
    assert tokens[:, 0].tolist() == [90, 80, 0, 0, 10]
    assert (num_sampled == 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [0, 1])
def test_draft_rows_that_are_no_distribution(ops: Ops, small_tiles: None, step, method) -> None:
    """The draft ends there, as at a placeholder: the same outputs in every bit."""
    batch = make_batch(ops.device, [3] * 4, 100, temperatures=(1.0, 0.6), apart=0.1)
    broken = replace(batch, draft_logits=batch.draft_logits.clone())
    slots = batch.idx_mapping.long()
    broken.draft_logits[slots[0], step, 99] = NAN
    broken.draft_logits[slots[1], step] = -INF
    broken.draft_logits[slots[2], step, 70] = INF
    broken.draft_logits[slots[3], step] = NAN
    outputs = assert_call(ops, broken.args, num_steps=3, method=method)
    batch.draft_token_ids[4 * torch.arange(4, device=ops.device) + 1 + step] = -1
    wanted = ops.rejection_sample(*batch.args, num_steps=3, method=method)
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_minus_infinity_and_huge_logits(ops: Ops, small_tiles: None, method: str) -> None:
    """Filtered ids, a row of one id, logits far apart or far from zero: no NaN, ids that exist."""
    batch = make_batch(ops.device, [3] * 6, 100, temperatures=(1.0, 0.6))
    t, slots = batch.target_logits, batch.idx_mapping.long()
    t[:4, ::2] = -INF
    t[4:8] = -INF
    t[4:8, 99] = -3.0
    t[8:12] += 1e4
    t[12:16] *= 1e3
    t[16:20] = t[16:20] * 1e36
    batch.draft_logits[slots[0], :, 50:] = -INF
    batch.draft_logits[slots[1], :, :99] = -INF
    batch.draft_logits[slots[2]] -= 3e4
    batch.draft_logits[slots[3]] *= 1e3
    batch.draft_logits[slots[5]] *= 1e37
    tokens, num_sampled, _ = assert_call(ops, batch.args, True, num_steps=3, method=method)
    used = torch.arange(4, device=ops.device) < num_sampled[:, None]
    assert ((tokens >= 0) & (tokens < 100) == used).all()


def test_tiny_probabilities_are_compared_as_ratios(ops: Ops) -> None:
    """p and q below any fp32 number, p twice q: always accepted; q twice p: half of the time."""
    num = under_interpreter(ops, 8, 40)
    for ratio, method in product((math.log(2), -math.log(2)), METHODS):
        ps = torch.tensor([[0.0, -200.0 + ratio, -1.0], [0.0, 0.0, 0.0]])
        batch = repeated(ps, torch.tensor([[0.0, -200.0, -1.0]]), [1], num)
        batch = batch.to(ops.device)
        _, num_sampled, _ = assert_call(ops, batch.args, True, num_steps=1, method=method)
        accepted = int((num_sampled == 2).sum())
        assert accepted == num if ratio > 0 else 0 < accepted < num


def test_p_and_q_at_their_ends(ops: Ops) -> None:
    """p = 0 is never accepted; q = 0 < p always is; p = q is, but for a draw of exactly 1."""
    for p_x, q_x, wanted in ((-INF, 0.0, 1), (0.0, -INF, 2), (-INF, -INF, 1), (0.0, 0.0, 2)):
        for method in METHODS:
            ps = torch.tensor([[p_x, 0.0], [0.0, 0.0]])
            batch = repeated(ps, torch.tensor([[q_x, 0.0]]), [0], 3).to(ops.device)
            _, num_sampled, _ = assert_call(ops, batch.args, True, num_steps=1, method=method)
            assert (num_sampled == wanted).all()


def test_a_prefix_of_zero_stays_zero(ops: Ops) -> None:
    """Block: after p(x_1) = 0 no token is accepted, also where q(x_2) = 0 makes the ratio inf."""
    ps = torch.tensor([[-INF, 0.0], [0.0, 0.0], [0.0, 0.0]])
    for first, second in ((0.0, -INF), (-INF, -INF), (0.0, -200.0)):
        batch = repeated(ps, torch.tensor([[first, 0.0], [second, 0.0]]), [0, 0], 3)
        _, num_sampled, _ = assert_call(
            ops, batch.to(ops.device).args, True, num_steps=2, method="block"
        )
        assert (num_sampled == 1).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("vocab", [5, 100])
def test_a_residual_of_zero_draws_from_the_target(
    ops: Ops, small_tiles: None, vocab: int, use_fp64: bool, method: str
) -> None:
    """p = q in every bit, at temperature 1 and another, and an id >= V: as at a placeholder."""
    num = under_interpreter(ops, 2, 12)
    batch = make_batch(ops.device, [2] * num, vocab, temperatures=(1.0, 0.7), seed=3)
    slots = batch.idx_mapping.long()
    assert batch.temperature[slots].unique().numel() == 2
    temperature = batch.temperature[slots]
    scaled = batch.draft_logits[slots] / temperature[:, None, None]
    batch.target_logits.view(num, 3, vocab)[:, :2] = scaled
    batch.draft_token_ids.view(num, 3)[:, 1] = vocab
    flags = {"num_steps": 2, "method": method, "use_fp64": use_fp64}
    outputs = assert_call(ops, batch.args, True, **flags)
    batch.draft_token_ids.view(num, 3)[:, 1] = -1
    wanted = ops.rejection_sample(*batch.args, **flags)
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


def test_one_hot_residual_of_zero_draws_from_the_target(ops: Ops) -> None:
    """p = 1 is rejected by a draw of 1 alone, one in 2^25: seed and position were searched for."""
    seed, pos = 11, 291338
    assert acceptance(seed, pos, 0) == 1.0
    for method in METHODS:
        batch = repeated(torch.tensor([[-INF, 0.0], [0.0, 0.0]]), None, [1], 1)
        batch.seeds[0], batch.pos[0] = seed, pos
        outputs = assert_call(ops, batch.to(ops.device).args, num_steps=1, method=method)
        # u < 1 is false, u <= 1 is true.
        assert outputs[1].item() == (1 if method == "standard" else 2)
        assert outputs[0][0, 0].item() == 1


# A row's result does not depend on its batch


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_draft", [True, False])
def test_b1_17_row_alone_and_in_other_batches(ops: Ops, has_draft: bool, method: str) -> None:
    drafts = [3, 0, 2]
    batch = make_batch(ops.device, drafts, 5000, has_draft=has_draft, apart=0.2)
    together = ops.rejection_sample(*batch.args, num_steps=3, method=method)
    for chosen in ([2, 0, 1], [0]):
        part = batch.rows(chosen)
        outputs = assert_call(ops, part.args, num_steps=3, method=method)
        for x, y in zip(outputs, together, strict=True):
            assert torch.equal(x, y[chosen])


def test_b1_14_broken_row_leaves_its_neighbours_alone(ops: Ops, small_tiles: None) -> None:
    batch = make_batch(ops.device, [2, 2, 2], 90, temperatures=(1.0,))
    for method in METHODS:
        good = ops.rejection_sample(*batch.args, num_steps=2, method=method)
        broken = replace(batch, target_logits=batch.target_logits.clone())
        broken.target_logits[3:6] = NAN
        outputs = assert_call(ops, broken.args, num_steps=2, method=method)
        for x, y in zip(outputs, good, strict=True):
            assert torch.equal(x[[0, 2]], y[[0, 2]])


@pytest.mark.parametrize("method", METHODS)
def test_strided_inputs(ops: Ops, small_tiles: None, method: str) -> None:
    """Logit rows, cache, metadata; what lies between them and past V is NaN or far out of range."""
    batch = make_batch(ops.device, RAGGED, 70, dtype=BF16)
    wanted = ops.rejection_sample(*batch.args, num_steps=3, method=method)
    cache = torch.full((8, 2, 5, 90), NAN, dtype=BF16, device=ops.device)
    cache[:, 1, 2:, 3:73] = batch.draft_logits
    wide = torch.full((batch.pos.shape[0], 2, 75), NAN, dtype=BF16, device=ops.device)
    wide[:, 1, :70] = batch.target_logits
    spread = Batch(
        wide[:, 1, :70],
        cache[:, 1, 2:, 3:],
        *(strided(x) for x in batch.args[2:6]),
        *batch.args[6:],
    )
    outputs = assert_call(ops, spread.args, num_steps=3, method=method)
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))
    transposed = batch.draft_logits.transpose(0, 1).contiguous().transpose(0, 1)
    outputs = ops.rejection_sample(
        *replace(batch, draft_logits=transposed).args, num_steps=3, method=method
    )
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_dtypes(ops: Ops, small_tiles: None, dtype: torch.dtype) -> None:
    batch = make_batch(ops.device, [2, 1], 30)
    batch.pos %= 100
    wanted = ops.rejection_sample(*batch.args, num_steps=2)
    batch.pos, batch.idx_mapping = batch.pos.to(dtype), batch.idx_mapping.to(dtype)
    batch.draft_token_ids = batch.draft_token_ids.to(dtype if dtype.itemsize > 2 else I32)
    outputs = assert_call(ops, batch.args, num_steps=2)
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


def test_inputs_keep_their_bits(ops: Ops) -> None:
    batch = make_batch(ops.device, [2, 1], 30)
    before = [x.clone() for x in batch.args]
    ops.rejection_sample(*batch.args, num_steps=2, method="block")
    assert all(torch.equal(x, y) for x, y in zip(before, batch.args, strict=True))


# Streams


def test_known_acceptance_draws(ops: Ops) -> None:
    """accept.json: p(x) just above u is accepted, just below it is not, at the step's own key."""
    known = json.loads((Path(__file__).parent.parent / "data" / "accept.json").read_text())
    assert len(known) == 24
    steps = max(case["step"] for case in known) + 1
    count = len(known) * 2
    sure, even = [0.0, -INF], [0.0, 0.0]
    rows, ids, pos, starts, wanted = [], [], [], [0], []
    for case, nudge in product(known, (5e-5, -5e-5)):
        step, chance = case["step"], case["u"] + nudge
        rows += [sure] * step + [[math.log(chance / (1 - chance)), 0.0], even]
        ids += [0] * (step + 2)
        pos += [7 * i for i in range(step)] + [case["pos"], 1]
        starts.append(len(rows))
        wanted.append(step + 1 + (nudge > 0))
    batch = Batch(
        torch.tensor(rows),
        None,
        torch.tensor(ids),
        torch.tensor(starts, dtype=I32),
        torch.tensor(pos),
        torch.arange(count),
        torch.ones(count),
        torch.tensor([case["seed"] for case, _ in product(known, range(2))]),
    ).to(ops.device)
    for method in METHODS[: under_interpreter(ops, 1, 2)]:
        _, num_sampled, _ = assert_call(ops, batch.args, num_steps=steps, method=method)
        assert num_sampled.tolist() == wanted


def test_seeds_and_positions_change_the_result(ops: Ops) -> None:
    batch = make_batch(ops.device, [2] * 3, 60, temperatures=(1.0,), apart=1.0)
    first = ops.rejection_sample(*batch.args, num_steps=2)
    batch.seeds += 1
    second = ops.rejection_sample(*batch.args, num_steps=2)
    batch.pos += 1
    third = ops.rejection_sample(*batch.args, num_steps=2)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(second[0], third[0])
    batch.seeds -= 1
    batch.pos -= 1
    assert torch.equal(ops.rejection_sample(*batch.args, num_steps=2)[0], first[0])


# Cases of group 2; those about laws are in test_rejection_sample_law.py


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["nan", "minus_inf", "zero_residual"])
def test_b2_02_recovery_without_a_residual(ops: Ops, case: str, method: str) -> None:
    """Always rejected, never id 0, about 0.97 of id 1: 10000 seeds, 15 under the interpreter."""
    law = [1e-22, 0.97, 0.01, 0.01, 0.01]
    p = from_probabilities(law, law)
    q = {"nan": torch.full((1, 5), NAN), "minus_inf": torch.full((1, 5), -INF)}.get(case, p[:1])
    x = 5 if case == "zero_residual" else 0  # p = q rejects only what the vocabulary has not
    num = under_interpreter(ops, 15, 10_000)
    batch = repeated(p, q, [x], num).to(ops.device)
    tokens, num_sampled, _ = ops.rejection_sample(*batch.args, num_steps=1, method=method)
    assert (num_sampled == 1).all()
    assert (tokens[:, 0] > 0).all()
    sigma = math.sqrt(0.97 * 0.03 / num)
    assert abs(float((tokens[:, 0] == 1).float().mean()) - 0.97) < 4.9 * sigma


@pytest.mark.parametrize("method", METHODS)
def test_b2_11_placeholders_are_no_index(ops: Ops, method: str) -> None:
    """Drafts [1, 0, 1, -1, -1], V = 4, and ids >= V: at most 3 accepted, -1 only behind."""
    num = under_interpreter(ops, 6, 1000)
    p = from_probabilities(*[[0.5, 0.4, 0.05, 0.05]] * 6)
    q = torch.cat([p[:3], torch.full((2, 4), NAN)])
    for xs in ([1, 0, 1, -1, -1], [1, 0, 1, 4, 7]):
        batch = repeated(p, q, xs, num).to(ops.device)
        tokens, num_sampled, num_rejected = assert_call(ops, batch.args, num_steps=5, method=method)
        assert (num_sampled <= 4).all()
        assert (num_sampled + num_rejected == 6).all()
        used = torch.arange(6, device=ops.device) < num_sampled[:, None]
        assert torch.equal(tokens >= 0, used)
        assert (num_sampled == 4).float().mean() > 0.5


# Cases of group 1


@pytest.mark.parametrize("marker", [0.0, -1.0])
def test_b1_04_negative_temperature_and_inf(ops: Ops, marker: float) -> None:
    """A greedy row with -inf beside a sampled one: id 2, and never id 2."""
    rows = torch.tensor([[1.0, -INF, 3.0, -INF]] * 2 + [[0.0, 0.0, -INF, 0.0]] * 2)
    for seed, x, method in product(range(2), (1, 2), METHODS):
        batch = Batch(
            rows,
            torch.zeros(2, 1, 4),
            torch.tensor([0, x, 0, x]),
            torch.tensor([0, 2, 4], dtype=I32),
            torch.arange(4),
            torch.arange(2),
            torch.tensor([marker, 1.0]),
            torch.arange(2) + seed,
        ).to(ops.device)
        tokens, _, _ = assert_call(ops, batch.args, num_steps=1, method=method)
        assert tokens[0].tolist() == ([2, 2] if x == 2 else [2, -1])
        assert (tokens[1] != 2).all()


@pytest.mark.parametrize("dtype", [F16, F32])
def test_b1_05_tiny_temperature(ops: Ops, dtype: torch.dtype) -> None:
    """The cache is divided in fp32: q is one-hot at id 2 as p is, and id 2 comes out."""
    temperatures = (1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-30)
    row = torch.tensor([2.875, 2.955, 11.0625, -2.447])
    num = len(temperatures)
    target = row / torch.tensor(temperatures).clamp(min=1e-5)[:, None]
    batch = Batch(
        target.repeat_interleave(2, 0),
        row.to(dtype).expand(num, 1, 4).contiguous(),
        torch.full((2 * num,), 2),
        torch.arange(num + 1, dtype=I32) * 2,
        torch.arange(2 * num),
        torch.arange(num),
        torch.tensor(temperatures),
        torch.arange(num),
    ).to(ops.device)
    for method in METHODS:
        tokens, _, _ = assert_call(ops, batch.args, num_steps=1, method=method)
        assert (tokens == 2).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b1_22_ids_stay_below_the_real_vocabulary(ops: Ops, temperature: float) -> None:
    """Target and cache of 1024 columns, the last 24 zeros, every real logit -5."""
    num = 6
    target = torch.zeros(2 * num, 1024)
    target[:, :1000] = -5.0
    batch = Batch(
        target[:, :1000],
        target.view(num, 2, 1024)[:, :1],
        torch.full((2 * num,), 1000),
        torch.arange(num + 1, dtype=I32) * 2,
        torch.arange(2 * num),
        torch.arange(num),
        torch.full((num,), temperature),
        torch.arange(num),
    ).to(ops.device)
    for method in METHODS:
        tokens, num_sampled, _ = assert_call(ops, batch.args, True, num_steps=1, method=method)
        assert (num_sampled == 1).all()
        assert ((tokens[:, 0] >= 0) & (tokens[:, 0] < 1000)).all()
