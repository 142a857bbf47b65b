"""rejection_sample keeps the target's law: exactly by enumeration, and in what is drawn.

The rules of the numpy model are enumerated over every draft; the op follows them draw by draw
(test_rejection_sample.py), and here in its frequencies. Chi-squares of 1e5 draws of the reference;
1e6 of the kernels are in gpu/test_rejection_sample.py. Seeds are fixed, so runs are repeatable.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import dspark_ops

from .rejection_cases import (
    METHODS,
    Pair,
    constant_pair,
    every_draft,
    first_tokens,
    from_probabilities,
    make_batch,
    random_pair,
    random_tables,
    repeated,
)
from .rejection_model import acceptance_law, log_softmax, residual_law
from .test_statistics import assert_follows

INF = math.inf

# The rules: enumerated, exact


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("vocab", "steps"), [(2, 1), (2, 3), (3, 2), (4, 3)])
def test_rules_of_the_model_are_lossless(vocab, steps, zeros, method: str) -> None:
    """Over every draft: accepted tokens, the one after, and the target's own tokens after those
    have the target's law, to 1e-14. So what equals the model is lossless."""
    p = random_tables(vocab, steps + 1, 1, zeros)
    q = random_tables(vocab, steps, 2, zeros)
    law = dict.fromkeys(product(range(vocab), repeat=steps + 1), 0.0)
    for xs in product(range(vocab), repeat=steps):
        drawn = np.prod([q[xs[:i]][x] for i, x in enumerate(xs)])
        if drawn == 0:
            continue
        ps = [p[xs[:i]] for i in range(steps + 1)]
        qs = [q[xs[:i]] for i in range(steps)]
        lengths, after = acceptance_law(ps, qs, list(xs), method)
        assert lengths.sum() == pytest.approx(1, abs=1e-14)
        for sequence in law:
            for i, chance in enumerate(lengths):
                if sequence[:i] == xs[:i]:
                    rest = [p[sequence[:j]][sequence[j]] for j in range(i + 1, steps + 1)]
                    law[sequence] += drawn * chance * after[i][sequence[i]] * np.prod(rest)
    for sequence, chance in law.items():
        wanted = np.prod([p[sequence[:i]][x] for i, x in enumerate(sequence)])
        assert chance == pytest.approx(wanted, abs=1e-14)


def test_b2_04_accepted_lengths_of_the_model() -> None:
    """The case's means, and the same by enumeration: block accepts more."""
    for p, q, steps, wanted in (
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, {"standard": 10 / 9, "block": 11 / 9}),
        ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), 3, {"standard": 1.176, "block": 1.284}),
    ):
        for method in METHODS:
            mean = 0.0
            for xs in product(range(len(p)), repeat=steps):
                ps, qs = [np.array(p)] * (steps + 1), [np.array(q)] * steps
                lengths, _ = acceptance_law(ps, qs, list(xs), method)
                drawn = math.prod(q[x] for x in xs)
                mean += drawn * float(lengths @ np.arange(steps + 1))
            assert mean == pytest.approx(wanted[method], abs=5e-4)


def test_residual_law_of_the_model() -> None:
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.2, 0.5, 0.3])
    assert residual_law(1.0, p, q).tolist() == [1.0, 0.0, 0.0]
    assert residual_law(1.0, p, p) is p
    assert log_softmax(np.array([-INF, 0.0])).tolist() == [-INF, 0.0]
    assert np.isnan(log_softmax(np.array([INF, 0.0]))).any()
    assert np.isnan(log_softmax(np.array([-INF, -INF]))).all()


# What is drawn


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("vocab", "steps", "num"), [(3, 2, 4000), (4, 3, 1500)])
def test_every_draft_has_its_law(vocab: int, steps: int, num: int, method: str) -> None:
    """(accepted length, token after) over seeds, for each draft. False alarms: 1e-6 each."""
    batch, drafts = every_draft(vocab, steps, num)
    tokens, num_sampled, _ = dspark_ops.rejection_sample(
        *batch.args, num_steps=steps, method=method
    )
    length = num_sampled.long() - 1
    after = tokens.gather(1, length[:, None])[:, 0]
    cells = (length * vocab + after).view(len(drafts), num)
    for (xs, ps, qs), drawn in zip(drafts, cells, strict=True):
        lengths, laws = acceptance_law(ps, qs, list(xs), method)
        law = torch.tensor(np.concatenate([n * x for n, x in zip(lengths, laws, strict=True)]))
        possible = law > 1e-12  # rounding leaves a residual where p = q
        assert possible[drawn].all()
        assert_follows((possible.cumsum(0) - 1)[drawn], law[possible])


def assert_joint_law(pair: Pair, first: Tensor, second: Tensor) -> None:
    """Marginal of the first token, joint of two. False alarms: 1e-6 each."""
    law, vocab = pair.law, pair.target.shape[0]
    assert_follows(first, law[0])
    assert_follows(first * vocab + second, (law[0][:, None] * law).view(-1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_greedy", [False, True])
def test_joint_law_of_1e5_draws(is_greedy: bool, method: str) -> None:
    pair = random_pair(6, temperature=0.8, is_greedy=is_greedy)
    first, second, _ = first_tokens(pair, 100_000, 3, method, use_fp64=is_greedy)
    assert_joint_law(pair, first, second)


def test_joint_law_rejects_a_wrong_residual() -> None:
    """The chi-square can fail: a draft declared at another temperature is seen."""
    pair = random_pair(6, temperature=0.8)
    first, second, _ = first_tokens(pair, 100_000, 3, "standard")
    pair.temperature = 0.85
    with pytest.raises(AssertionError):
        assert_joint_law(pair, first, second)


def frequencies(first: Tensor, vocab: int) -> list[float]:
    return (torch.bincount(first, minlength=vocab) / first.numel()).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_b2_01_draft_and_recovery_noise_differ(method: str) -> None:
    """Shared noise would give (0.100, 0.442, 0.457)."""
    p = (0.1, 0.5, 0.4)
    first, _, _ = first_tokens(constant_pair(p, (0.7, 0.25, 0.05)), 100_000, 1, method)
    assert_follows(first, torch.tensor(p))
    assert frequencies(first, 3) == pytest.approx(p, abs=0.008)


@pytest.mark.parametrize(
    ("p", "q", "steps", "accepted"),
    [
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, (10 / 9, 11 / 9)),
        ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), 3, (1.176, 1.284)),
    ],
)
def test_b2_04_block_accepts_more(p, q, steps, accepted) -> None:
    """Means of 1e5 trials within 0.014, 4.9 sigma; the joint law is the target's."""
    pair = constant_pair(p, q)
    for method, wanted in zip(METHODS, accepted, strict=True):
        first, second, lengths = first_tokens(pair, 100_000, steps, method)
        assert float(lengths.double().mean()) == pytest.approx(wanted, abs=0.014)
        assert_joint_law(pair, first, second)


def test_b2_05_block_without_draft_logits() -> None:
    """One-hot q, p = (0.6, 0.4), 4 steps: both accept 0.6 + .. + 0.6^4 = 1.3056 on average."""
    pair = constant_pair((0.6, 0.4), (0.9, 0.1), is_greedy=True)
    for method in METHODS:
        first, second, lengths = first_tokens(pair, 100_000, 4, method)
        assert float(lengths.double().mean()) == pytest.approx(1.3056, abs=0.024)
        assert_joint_law(pair, first, second)
    batch = make_batch("cpu", [4] * 20, 6, temperatures=(0.0,), has_draft=False)
    outputs = [dspark_ops.rejection_sample(*batch.args, num_steps=4, method=m) for m in METHODS]
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


def test_b2_07_acceptance_is_a_draw() -> None:
    """p = (0.1, 0.9), q = (0.9, 0.1): 0.2 of 1e5 drafts are accepted; a draw of 0 accepts all."""
    p = (0.1, 0.9)
    first, _, lengths = first_tokens(constant_pair(p, (0.9, 0.1)), 100_000, 1, "standard")
    assert float(lengths.double().mean()) == pytest.approx(0.2, abs=0.0063)
    assert_follows(first, torch.tensor(p))


def test_b2_08_the_cache_is_the_law_of_the_draft() -> None:
    """Declared q other than the sampler's: (0.5, 0.4375, 0.0625, 0). With what it cached: p."""
    p, sampled, declared = (0.4, 0.4, 0.2, 0.0), (0.625, 0.375, 0, 0), (0.5, 0.3, 0.1, 0.1)
    num = 100_000
    pair = constant_pair(p, sampled)
    first, _, _ = first_tokens(pair, num, 1, "standard")
    assert frequencies(first, 4) == pytest.approx(p, abs=0.008)
    drafted = (torch.arange(num) % 8 >= 5).long()  # 0.625 : 0.375
    rows = from_probabilities(np.array(p))
    batch = repeated(torch.cat([rows, rows]), from_probabilities(np.array(declared)), [0], num)
    batch.draft_token_ids = torch.stack([drafted, drafted], 1).view(-1)
    tokens, _, _ = dspark_ops.rejection_sample(*batch.args, num_steps=1)
    assert frequencies(tokens[:, 0], 4) == pytest.approx((0.5, 0.4375, 0.0625, 0.0), abs=0.008)


@pytest.mark.parametrize("method", METHODS)
def test_b2_10_temperature_is_applied_once(method: str) -> None:
    """T = 0.5, logits (0, ln 2): target logits come divided, cached ones not."""
    logits = torch.tensor([0.0, math.log(2)]).expand(2, 2)
    pair = Pair(logits, torch.zeros(2, 2), temperature=0.5)
    first, second, _ = first_tokens(pair, 100_000, 2, method)
    assert frequencies(first, 2) == pytest.approx((0.2, 0.8), abs=0.0063)
    assert_joint_law(pair, first, second)
    same = Pair(logits, logits, temperature=0.5)  # p = q only if the cache is divided
    assert (first_tokens(same, 1000, 2, method)[2] == 2).all()


@pytest.mark.parametrize("method", METHODS)
def test_b2_13_residual_of_the_whole_draft(method: str) -> None:
    """Subtracting only the drafted token's q would give (0.3875, 0.2, 0.4125)."""
    p = (0.5, 0.2, 0.3)
    first, _, _ = first_tokens(constant_pair(p, (0.2, 0.5, 0.3)), 100_000, 1, method)
    assert frequencies(first, 3) == pytest.approx(p, abs=0.008)
    assert_follows(first, torch.tensor(p))


@pytest.mark.parametrize("method", METHODS)
def test_b2_17_filters_reach_the_verified_token(method: str) -> None:
    """4000 draws at T = 1: id 0 1820 +- 126 times; with k = 1 or p = 0.0001 always."""
    row = torch.tensor([2.0, 1.5, 1.0, 0.5])
    pair = Pair(row.expand(4, 4), torch.zeros(4, 4))
    first, _, _ = first_tokens(pair, 4000, 2, method)
    assert abs(int((first == 0).sum()) - 1820) <= 126
    pair.target = torch.tensor([2.0, -INF, -INF, -INF]).expand(4, 4)  # as top_k_top_p_ leaves it
    first, second, _ = first_tokens(pair, 4000, 2, method)
    assert (first == 0).all()
    assert (second == 0).all()
