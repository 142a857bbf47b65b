"""markov_step and markov_loop: every head against a model in float64, then the sampler's contract.

The model is written from the formulas, in numpy. A bias may differ from it in the last bit: its sum
is accumulated in fp32 in an order of the GEMM's own. What is sampled from is compared by bits with
what is cached.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dspark_ops

from .cases import BF16, DTYPES, F16, F32, INERT, make_cache, make_inputs, random_values, strided
from .conftest import op_module
from .model import expect, values_of

FP8, INT8 = torch.float8_e4m3fn, torch.int8
HEADS = ("vanilla", "gated", "rnn")
SLOTS = (1, INERT, 2, 4, 0)
NUM_ROWS, STEPS, V, VT, R, H = 5, 3, 61, 130, 16, 12


def make_head(
    head: str = "vanilla",
    dtype: torch.dtype = F32,
    vocab: int = V,
    num_targets: int | None = None,
    rank: int = R,
    w2_dtype: torch.dtype | None = None,
    steps: int | None = None,
    rows: int = NUM_ROWS,
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """(w1, w2) and keywords of both functions; with ``steps`` those of the loop."""
    w1 = random_values((num_targets or vocab, rank), dtype, 21) / 2
    w2 = random_values((vocab, rank), dtype, 22) / 4
    options: dict[str, Any] = {}
    if w2_dtype is not None:
        options["w2_scale"] = random_values((vocab,), F32, 23).abs() / 100 + 1e-3
        codes = (w2.float() * 30).clamp(-127, 127)
        w2 = codes.round().to(INT8) if w2_dtype == INT8 else codes.to(w2_dtype)
    if head != "vanilla":
        leading = (rows,) if steps is None else (rows, steps)
        options["hidden"] = random_values((*leading, H), dtype, 24) / 3
        outputs, inputs = (rank, H + rank) if head == "gated" else (3 * rank, H + 2 * rank)
        weight = random_values((outputs, inputs), dtype, 25) / 12
        options["gate"] = (weight, random_values((outputs,), dtype, 26) / 3)
    if head == "rnn":
        options["state"] = random_values((rows, rank), dtype, 27) / 3
    return (w1, w2), options


def make_d2t(vocab: int = V, num_targets: int = VT) -> Tensor:
    """Offsets to ids that are neither dense nor in steps of one size."""
    generator = torch.Generator().manual_seed(31)
    ids = torch.randperm(num_targets, generator=generator)[:vocab].sort().values
    return ids - torch.arange(vocab)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def model_bias(
    prev: Tensor, w1: Tensor, w2: Tensor, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Bias [B, V] and the state after, in float64."""
    table = values_of(w1).astype(np.float64)
    inside = (prev.numpy() >= 0) & (prev.numpy() < len(table))
    x = table[np.where(inside, prev.numpy(), 0)] * inside[:, None]
    state = None
    if options.get("gate") is not None:
        weight, bias = (values_of(t).astype(np.float64) for t in options["gate"])
        hidden = values_of(options["hidden"]).astype(np.float64)
        if options.get("state") is None:
            x = sigmoid(np.concatenate([hidden, x], -1) @ weight.T + bias) * x
        else:
            old = values_of(options["state"]).astype(np.float64)
            z = np.concatenate([old, x, hidden], -1) @ weight.T + bias
            gate, candidate, output = np.split(z, 3, -1)
            state = sigmoid(gate) * old + (1 - sigmoid(gate)) * np.tanh(candidate)
            x = np.tanh(output)
    matrix = values_of(w2).astype(np.float64)
    if options.get("w2_scale") is not None:
        matrix = matrix * options["w2_scale"].double().numpy()[:, None]
    return x @ matrix.T, state


def model_scaled(x: np.ndarray, scale: float = 1.0, softcap: float | None = None) -> np.ndarray:
    x = x * scale
    return x if softcap is None else softcap * np.tanh(x / softcap)


# Roundings to the head dtype on the way to a logit, of values up to about 16: a gated or rnn head
# has several before the GEMM, whose errors add up over R.
def tolerance(dtype: torch.dtype, head: str) -> float:
    return 16 * torch.finfo(dtype).eps * (4 if head == "vanilla" else 12)


def call_state(slots: tuple[int, ...] = SLOTS) -> tuple[Tensor, ...]:
    """idx_mapping, temperature, seeds, pos."""
    return make_inputs("cpu", 1, slots).args[1:]


PREV = torch.tensor([3, 0, 60, 17, 3])


@pytest.mark.parametrize("with_d2t", [False, True])
@pytest.mark.parametrize("w2_dtype", [None, FP8, INT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_equals_the_model(head, dtype, w2_dtype, with_d2t: bool) -> None:
    """The cached logits and the state are the model's; the ids follow from the cached logits."""
    num_targets = VT if with_d2t else V
    weights, options = make_head(head, dtype, num_targets=num_targets, w2_dtype=w2_dtype)
    scales = {"base_scale": 0.5, "base_softcap": 8.0, "bias_scale": 1.5, "bias_softcap": 6.0}
    base = random_values((NUM_ROWS, V), dtype, 4)
    bias, state = model_bias(PREV, *weights, options)
    wanted = model_scaled(values_of(base), 0.5, 8.0) + model_scaled(bias, 1.5, 6.0)
    options |= scales
    if with_d2t:
        options["d2t"] = make_d2t()
        row = np.full((NUM_ROWS, VT), -np.inf)
        row[:, (torch.arange(V) + options["d2t"]).numpy()] = wanted
        wanted = row
    slots = (0, 1, 2, 3, 4)
    cache = make_cache("cpu", num_targets, dtype)
    token = dspark_ops.markov_step(
        PREV, base, *weights, *call_state(slots), logits_cache=cache, cache_col=1, **options
    )
    atol = tolerance(dtype, head)
    sampled = cache[:, 1, :num_targets].clone()
    np.testing.assert_allclose(values_of(sampled), wanted, rtol=0, atol=atol)
    if state is not None:
        np.testing.assert_allclose(values_of(options["state"]), state, rtol=0, atol=atol)
    assert_sampled_from(sampled, token, call_state(slots), logits_cache=cache, cache_col=1)
    assert (cache[:, [0, 2]] == 7.0).all()
    assert (cache[..., num_targets:] == 7.0).all()


def assert_sampled_from(logits: Tensor, token: Tensor, state: tuple[Tensor, ...], **kwargs) -> None:
    """``token`` is drawn from ``logits`` [B, V], by ``gumbel_sample`` and by the model in numpy."""
    again = dspark_ops.gumbel_sample(logits, *state, is_drafting=True, **kwargs)
    assert token.tolist() == again.tolist()
    assert token.tolist() == expect(logits, *state, is_drafting=True, **kwargs).tokens


@pytest.mark.parametrize(("dtype", "base_dtype"), list(product(DTYPES, DTYPES)))
def test_vanilla_equals_embedding_linear_gumbel_sample(dtype, base_dtype) -> None:
    """Bit for bit: the reference's GEMM is the one of the unfused step."""
    (w1, w2), _ = make_head(dtype=dtype, rank=64)
    base = strided(random_values((NUM_ROWS, V), base_dtype, 4))
    state = call_state()
    summed = torch.promote_types(dtype, base_dtype)
    caches = [make_cache("cpu", V, summed) for _ in range(2)]
    columns = [torch.full((NUM_ROWS, 3), -9, dtype=torch.int32) for _ in range(2)]
    bias = F.linear(F.embedding(PREV, w1), w2)
    options: dict[str, Any] = {"is_drafting": True, "pos_offset": -1, "cache_col": 2}
    wanted = dspark_ops.gumbel_sample(
        *(base, *state),
        bias=bias,
        logits_cache=caches[0],
        draft_tokens=columns[0][:, 1],
        **options,
    )
    token = dspark_ops.markov_step(
        *(strided(PREV), base, w1, w2, *state),
        logits_cache=caches[1],
        draft_tokens=columns[1][:, 1],
        **options,
    )
    assert torch.equal(token, wanted)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    assert torch.equal(*columns)
    assert (columns[0][:, 1] == wanted).all()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_equals_its_module(dtype, head: str) -> None:
    """Bit for bit, as a module of the head dtype computes it."""
    (w1, w2), options = make_head(head, dtype)
    e = F.embedding(PREV, w1)
    if head == "gated":
        joint = torch.cat([options["hidden"], e], -1)
        e = torch.sigmoid(F.linear(joint, *options["gate"])) * e
    new_state = None
    if head == "rnn":
        joint = torch.cat([options["state"], e, options["hidden"]], -1)
        gate, candidate, output = F.linear(joint, *options["gate"]).chunk(3, -1)
        gate = torch.sigmoid(gate)
        new_state = gate * options["state"] + (1.0 - gate) * torch.tanh(candidate)
        e = torch.tanh(output)
    base = random_values((NUM_ROWS, V), dtype, 4)
    cache = make_cache("cpu", V, dtype)
    dspark_ops.markov_step(
        *(PREV, base, w1, w2, *call_state((0, 1, 2, 3, 4))),
        logits_cache=cache,
        cache_col=0,
        **options,
    )
    assert torch.equal(cache[:, 0, :V], base + F.linear(e, w2))
    if new_state is not None:
        assert torch.equal(options["state"], new_state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("w2_dtype", [FP8, INT8])
def test_a_quantised_bias_is_rounded_once(w2_dtype, dtype) -> None:
    """Codes that make the fp32 sum exact: the bias is that sum times the scale, rounded once."""
    w1 = torch.randint(-4, 5, (V, 32), generator=torch.Generator().manual_seed(1)).to(dtype)
    w2 = torch.randint(-8, 9, (V, 32), generator=torch.Generator().manual_seed(2)).to(w2_dtype)
    scale = random_values((V,), F32, 3)
    exact = (w1[PREV].double() @ w2.double().T).float()
    cache = make_cache("cpu", V, dtype)
    dspark_ops.markov_step(
        *(PREV, torch.zeros(NUM_ROWS, V, dtype=dtype), w1, w2, *call_state((0, 1, 2, 3, 4))),
        w2_scale=scale,
        logits_cache=cache,
        cache_col=0,
    )
    assert torch.equal(cache[:, 0, :V], (exact * scale).to(dtype))


def test_quantised_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark_ops import markov_head

    (w1, w2), options = make_head(w2_dtype=INT8)
    bias = markov_head.markov_bias_ref(PREV, w1, w2, options["w2_scale"])
    monkeypatch.setattr(markov_head, "CHUNK_V", 20)
    again = markov_head.markov_bias_ref(PREV, w1, w2, options["w2_scale"])
    torch.testing.assert_close(again, bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_and_caps_round_once(dtype) -> None:
    """base and bias are each scaled and capped in fp32 and rounded to their own dtype."""
    w1 = torch.eye(V, dtype=dtype)
    table = random_values((V, V), dtype, 9)  # w2 = table^T, so the bias is a row of the table
    base = random_values((NUM_ROWS, V), F16, 4)
    cache = make_cache("cpu", V, torch.promote_types(F16, dtype))
    options = {"base_scale": 3, "base_softcap": 5.5, "bias_scale": 0.7, "bias_softcap": 4}
    dspark_ops.markov_step(
        *(PREV, base, w1, table.T.contiguous(), *call_state((0, 1, 2, 3, 4))),
        logits_cache=cache,
        cache_col=0,
        **options,
    )
    capped = 5.5 * torch.tanh(base.float() * 3 / 5.5)
    bias = 4 * torch.tanh(table[PREV].float() * 0.7 / 4)
    assert torch.equal(cache[:, 0, :V], capped.to(F16) + bias.to(dtype))
    assert values_of(cache[:, 0, :V]).max() <= 9.5


def test_scale_alone_and_cap_alone() -> None:
    weights, _ = make_head()
    base = random_values((NUM_ROWS, V), F32, 4)
    bias = F.linear(weights[0][PREV], weights[1])
    for options, wanted in (
        ({"base_scale": 2.0}, base * 2 + bias),
        ({"bias_scale": 0.0}, base + bias * 0),
        ({"base_softcap": 2.0}, 2 * torch.tanh(base / 2) + bias),
        ({"bias_softcap": 2.0}, base + 2 * torch.tanh(bias / 2)),
    ):
        cache = make_cache("cpu", V, F32)
        dspark_ops.markov_step(
            *(PREV, base, *weights, *call_state((0, 1, 2, 3, 4))),
            logits_cache=cache,
            cache_col=0,
            **options,
        )
        assert torch.equal(cache[:, 0, :V], wanted)


# Rows: inert, greedy, what a previous token may be


def test_inert_and_greedy_rows() -> None:
    weights, options = make_head("rnn")
    base = random_values((NUM_ROWS, V), F32, 4)
    bias, state = model_bias(PREV, *weights, options)
    cache = make_cache("cpu", V, F32)
    column = torch.full((NUM_ROWS,), -9)
    idx_mapping, *rest = call_state((INERT, 2, 3, 9, 1))  # 2 and 3 are greedy, 9 is no slot
    token = dspark_ops.markov_step(
        *(PREV, base, *weights, idx_mapping, *rest),
        logits_cache=cache,
        cache_col=0,
        draft_tokens=column,
        **options,
    )
    best = (base.numpy() + bias).argmax(-1)
    assert token[:4].tolist() == best[:4].tolist()
    assert token.tolist() == column.tolist()
    written = (cache != 7.0).any(-1)[:, 0]
    assert written.tolist() == [False, True, True, True, False]
    np.testing.assert_allclose(values_of(options["state"]), state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_a_token_outside_the_table_has_the_embedding_zero(head: str) -> None:
    (w1, w2), options = make_head(head)
    prev = torch.tensor([-1, V, 2**62, -(2**63), 5])
    base = random_values((NUM_ROWS, V), F32, 4)
    bias, _ = model_bias(prev, w1, w2, options)
    if head != "rnn":
        assert (bias[:4] == 0).all()
    cache = make_cache("cpu", V, F32)
    w1[0] = torch.nan  # not read
    dspark_ops.markov_step(
        *(prev, base, w1, w2, *call_state((0, 1, 2, 3, 4))),
        logits_cache=cache,
        cache_col=0,
        **options,
    )
    np.testing.assert_allclose(values_of(cache[:, 0, :V]), base.numpy() + bias, rtol=0, atol=1e-5)


def test_nan_and_infinities() -> None:
    """The first NaN wins, a row of only -inf gives 0, a masked token stays masked."""
    weights, _ = make_head()
    base = torch.zeros(NUM_ROWS, V)
    base[0, [7, 20]] = torch.nan
    base[1] = -torch.inf
    base[2] = -torch.inf
    base[2, 9] = -50.0
    base[3, 30] = torch.inf
    base[4, :30] = -torch.inf
    token = dspark_ops.markov_step(PREV, base, *weights, *call_state((0, 1, 4, 0, 1)))
    assert token[:4].tolist() == [7, 0, 9, 30]
    assert token[4] >= 30
    # A soft-cap is no mask: what it is given as -inf it makes -softcap.
    cache = make_cache("cpu", V, F32)
    dspark_ops.markov_step(
        *(PREV, base, *weights, *call_state((0, 1, 4, 0, 1))),
        base_softcap=3.0,
        bias_scale=0.0,
        logits_cache=cache,
        cache_col=0,
    )
    assert cache[4, 0, 0] == -3.0


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize(
    ("column", "options"),
    [
        (2, {}),
        (torch.tensor(1), {"is_drafting": False}),
        (torch.tensor([0, 5, -2, 1, 2]), {"pos_offset": -3}),
    ],
)
def test_keys_and_columns_are_gumbel_samples(column, options, use_fp64: bool) -> None:
    weights, _ = make_head(num_targets=VT, dtype=BF16)
    base = random_values((NUM_ROWS, V), BF16, 4)
    options = {"is_drafting": True, **options, "use_fp64": use_fp64, "cache_col": column}
    caches = [make_cache("cpu", V, BF16) for _ in range(2)]
    bias = F.linear(weights[0][PREV], weights[1])
    wanted = expect(base, *call_state(), bias=bias, logits_cache=caches[0], **options)
    token = dspark_ops.markov_step(
        *(PREV, base, *weights, *call_state()), logits_cache=caches[0], **options
    )
    assert token.tolist() == wanted.tokens
    again = dspark_ops.gumbel_sample(
        *(base, *call_state()), bias=bias, logits_cache=caches[1], **options
    )
    assert torch.equal(token, again)
    assert torch.equal(caches[0], caches[1])
    # The same step without a cache: the column does not enter the seed.
    del options["cache_col"]
    wanted = expect(base, *call_state(), bias=bias, **options)
    token = dspark_ops.markov_step(PREV, base, *weights, *call_state(), **options)
    assert token.tolist() == wanted.tokens


# A part of the vocabulary


def test_b2_14_reduced_vocabulary() -> None:
    """W1 takes target ids, W2 gives draft ids, and the mapped id feeds the next step."""
    d2t = torch.tensor([10, 19, 28, 37])  # targets 10, 20, 30, 40
    w1 = torch.zeros(45, 2)
    w1[30, 0], w1[2, 1] = 1.0, 1.0  # that of draft id 2 would add to another
    w2 = torch.zeros(4, 2)
    w2[0, 0], w2[3, 1] = 100.0, 100.0
    base = torch.zeros(1, 2, 4)
    base[0, 0, 2] = 1.0
    cache = torch.full((1, 2, 45), 7.0)
    tokens = dspark_ops.markov_loop(
        *(
            torch.tensor([44]),
            base,
            w1,
            w2,
            torch.tensor([0]),
            torch.zeros(1),
            torch.zeros(1).long(),
        ),
        torch.tensor([5]),
        d2t=d2t,
        logits_cache=cache,
    )
    assert tokens.tolist() == [[30, 10]]
    targets = [10, 20, 30, 40]
    others = [v for v in range(45) if v not in targets]
    assert cache[0, 0, targets].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert cache[0, 1, targets].tolist() == [100.0, 0.0, 0.0, 0.0]
    assert (cache[0][:, others] == -torch.inf).all()


def test_d2t_noise_is_keyed_by_target_id() -> None:
    """The same target tokens at the same logits give the same ids, whatever the draft ids are."""
    d2t = make_d2t()
    targets = torch.arange(V) + d2t
    weights, _ = make_head(num_targets=VT)
    base = random_values((NUM_ROWS, V), F32, 4)
    token = dspark_ops.markov_step(PREV, base, *weights, *call_state(), d2t=d2t)
    backwards = targets.flip(0) - torch.arange(V)
    flipped = (weights[0], weights[1].flip(0))
    again = dspark_ops.markov_step(PREV, base.flip(-1), *flipped, *call_state(), d2t=backwards)
    assert torch.equal(token, again)
    row = torch.full((NUM_ROWS, VT), -torch.inf)
    row[:, targets] = base + F.linear(weights[0][PREV], weights[1])
    assert token.tolist() == expect(row, *call_state(), is_drafting=True).tokens
    assert set(token.tolist()) <= set(targets.tolist())


def test_d2t_that_maps_nothing_new() -> None:
    weights, _ = make_head()
    base = random_values((NUM_ROWS, V), F32, 4)
    plain = dspark_ops.markov_step(PREV, base, *weights, *call_state())
    d2t = torch.zeros(V, dtype=torch.int64)
    assert torch.equal(dspark_ops.markov_step(PREV, base, *weights, *call_state(), d2t=d2t), plain)


def test_d2t_out_of_range_or_twice() -> None:
    """Values on the device can't raise: such a token is dropped, of two the higher counts."""
    d2t = torch.tensor([-1, 4, 3, 7, 2**63 - 1, 0])  # targets -1, 5, 5, 10, beyond, 5
    w1, w2 = torch.zeros(10, 2), torch.zeros(6, 2)
    base = torch.tensor([[9.0, 5.0, 4.0, 9.0, 9.0, 3.0]])
    cache = torch.full((1, 1, 11), 7.0)
    token = dspark_ops.markov_step(
        *(torch.tensor([0]), base, w1, w2, torch.tensor([0]), torch.ones(1), torch.tensor([3])),
        torch.tensor([5]),
        d2t=d2t,
        logits_cache=cache,
        cache_col=0,
    )
    assert token.tolist() == [5]
    assert cache[0, 0].tolist() == [-np.inf] * 5 + [3.0] + [-np.inf] * 4 + [7.0]


# Sizes


@pytest.mark.parametrize("rank", [1, 33, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("vocab", [1, 7, 1025])
def test_any_rank_and_vocabulary(vocab: int, rank: int) -> None:
    weights, _ = make_head(vocab=vocab, rank=rank)
    base = random_values((NUM_ROWS, vocab), F32, 4)
    prev = PREV % vocab
    bias, _ = model_bias(prev, *weights, {})
    cache = make_cache("cpu", vocab, F32)
    state = call_state((0, 1, 2, 3, 4))
    token = dspark_ops.markov_step(*(prev, base, *weights, *state), logits_cache=cache, cache_col=0)
    sampled = cache[:, 0, :vocab].clone()
    np.testing.assert_allclose(values_of(sampled), base.numpy() + bias, rtol=1e-5, atol=1e-4)
    assert_sampled_from(sampled, token, state, logits_cache=cache, cache_col=0)


@pytest.mark.parametrize("with_d2t", [False, True])
@pytest.mark.parametrize("w2_dtype", [None, INT8])
@pytest.mark.parametrize("head", HEADS)
def test_no_rows(head: str, w2_dtype, with_d2t: bool) -> None:
    """B == 0, as a step and as a loop."""
    for steps in (None, STEPS):
        weights, options = make_head(
            head, BF16, num_targets=VT, w2_dtype=w2_dtype, steps=steps, rows=0
        )
        options["d2t"] = make_d2t() if with_d2t else None
        cache = make_cache("cpu", VT, BF16, cols=STEPS)
        args = (torch.zeros(0).long(), torch.zeros(0, STEPS, V, dtype=BF16), *weights)
        state = call_state(())
        if steps is None:
            token = dspark_ops.markov_step(
                args[0],
                args[1][:, 0],
                *args[2:],
                *state,
                logits_cache=cache,
                cache_col=1,
                **options,
            )
            assert token.shape == (0,)
        else:
            token = dspark_ops.markov_loop(*args, *state, logits_cache=cache, **options)
            assert token.shape == (0, STEPS)
        assert token.dtype == torch.int64
        assert (cache == 7.0).all()


# The loop


@pytest.mark.parametrize("steps", [1, 2, 16])
@pytest.mark.parametrize("with_d2t", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_loop_equals_its_steps(head: str, with_d2t: bool, steps: int) -> None:
    """Ids, cache, column writes and state, with a [B] and with a [B, N] form of each row."""
    weights, options = make_head(head, BF16, num_targets=VT, w2_dtype=FP8, steps=steps)
    options |= {"bias_softcap": 5.0, "base_scale": 0.9, "pos_offset": -1}
    options["d2t"] = make_d2t() if with_d2t else None
    state_before = options.pop("state", None)
    base = strided(random_values((NUM_ROWS, steps, V), BF16, 4))
    idx_mapping, temperature, seeds, pos = call_state()
    each = (idx_mapping[:, None].expand(-1, steps), pos[:, None] + torch.arange(steps))
    given = (base, *weights)
    cache = make_cache("cpu", VT, BF16, cols=steps)
    state = None if state_before is None else state_before.clone()
    prev, wanted = PREV, []
    for i in range(steps):
        step = dict(options)
        if "hidden" in step:
            step["hidden"] = step["hidden"][:, i]
        prev = dspark_ops.markov_step(
            *(prev, base[:, i], *weights, idx_mapping, temperature, seeds, pos + i),
            state=state,
            logits_cache=cache,
            cache_col=i,
            **step,
        )
        wanted.append(prev)
    for rows in ((idx_mapping, pos), each, (each[0], pos), (idx_mapping, each[1])):
        loop_cache = make_cache("cpu", VT, BF16, cols=steps)
        column = torch.full((NUM_ROWS, steps + 1), -9, dtype=torch.int32)
        loop_state = None if state_before is None else state_before.clone()
        tokens = dspark_ops.markov_loop(
            *(PREV, *given, rows[0], temperature, seeds, rows[1]),
            state=loop_state,
            logits_cache=loop_cache,
            draft_tokens=column[:, 1:],
            **options,
        )
        assert torch.equal(tokens, torch.stack(wanted, 1))
        assert torch.equal(column[:, 1:].long(), tokens)
        assert (column[:, 0] == -9).all()
        assert torch.equal(loop_cache.view(torch.uint8), cache.view(torch.uint8))
        assert state is None or torch.equal(loop_state, state)


def test_positions_of_a_narrow_dtype_do_not_wrap() -> None:
    weights, _ = make_head()
    base = random_values((NUM_ROWS, 16, V), F32, 4)
    idx_mapping, temperature, seeds, _ = call_state()
    pos = torch.full((NUM_ROWS,), 250)
    state = (idx_mapping, temperature, seeds)
    narrow = dspark_ops.markov_loop(PREV, base, *weights, *state, pos.to(torch.uint8))
    assert torch.equal(narrow, dspark_ops.markov_loop(PREV, base, *weights, *state, pos))


def test_b2_16_every_step_reads_its_own_row() -> None:
    base = torch.zeros(1, 3, 8)
    for i, best in enumerate((2, 4, 6)):
        base[0, i, best] = 1.0
    row = (torch.tensor([0]), torch.zeros(1), torch.zeros(1).long(), torch.tensor([9]))
    none = (torch.zeros(8, 8), torch.zeros(8, 8))
    anchor = torch.tensor([0])
    assert dspark_ops.markov_loop(anchor, base, *none, *row).tolist() == [[2, 4, 6]]
    after = (torch.eye(8), 100 * torch.eye(8).roll(1, 0))  # +100 to prev + 1
    assert dspark_ops.markov_loop(anchor, base, *after, *row).tolist() == [[1, 2, 3]]


def test_loop_without_a_cache_equals_the_unfused_loop() -> None:
    (w1, w2), _ = make_head(dtype=BF16)
    base = random_values((NUM_ROWS, STEPS, V), BF16, 4)
    idx_mapping, temperature, seeds, pos = call_state()
    prev, wanted = PREV, []
    for i in range(STEPS):
        logits = base[:, i] + F.linear(F.embedding(prev, w1), w2)
        block_max, block_argmax = dspark_ops.gumbel_block_argmax(
            logits, idx_mapping, temperature, seeds, pos + i, is_drafting=True
        )
        prev = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)
        wanted.append(prev)
    tokens = dspark_ops.markov_loop(
        PREV, base, w1, w2, idx_mapping, temperature, seeds, pos, use_fp64=False
    )
    assert torch.equal(tokens, torch.stack(wanted, 1))


@pytest.mark.parametrize("w2_dtype", [None, FP8, INT8])
def test_compiled_equals_eager(w2_dtype) -> None:
    """All mutated arguments at once, fp8 too, which opcheck does not take."""
    torch._dynamo.reset()
    base = random_values((NUM_ROWS, STEPS, V), BF16, 4)

    def draft(weights, state, options, cache, column) -> Tensor:
        return dspark_ops.markov_loop(
            *(PREV, base, *weights, *state), logits_cache=cache, draft_tokens=column, **options
        )

    found = []
    for function in (draft, torch.compile(draft, fullgraph=True, backend="aot_eager")):
        weights, options = make_head("rnn", BF16, V, VT, w2_dtype=w2_dtype, steps=STEPS)
        options |= {"d2t": make_d2t(), "base_softcap": 9.0}
        cache = make_cache("cpu", VT, BF16, cols=STEPS)
        column = torch.full((NUM_ROWS, STEPS), -9)
        tokens = function(weights, call_state(), options, cache, column)
        found.append((tokens, cache, column, options["state"]))
    for eager, compiled_one in zip(*found, strict=True):
        assert torch.equal(eager, compiled_one)


LAUNCHED = [(f, n) for f in ("markov_step", "markov_loop") for n in range(24)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets CPU tensors only")
@pytest.mark.parametrize(("op_file", "number"), LAUNCHED)
def test_launcher_equals_the_reference(op_file: str, number: int) -> None:
    """What runs on a GPU, with the sampler's kernel interpreted: every sample of the ops."""
    module = op_module(op_file)
    found = []
    for launched in (False, True):
        name, args, kwargs = module.sample_inputs("cpu")[number]
        op = getattr(torch.ops.dspark, name).default
        named = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
        function = getattr(module, f"_{op_file}_launch") if launched else op
        token = function(**named, **kwargs)
        written = ("logits_cache", "draft_tokens", "state")
        found.append((token, *(kwargs[key] for key in written if key in kwargs)))
    for reference, launched_one in zip(*found, strict=True):
        assert torch.equal(reference, launched_one)


def test_health_counts_the_sampler() -> None:
    weights, _ = make_head()
    base = torch.zeros(NUM_ROWS, STEPS, V)
    base[0, 1, 5] = torch.nan
    with dspark_ops.health("cpu") as h:
        dspark_ops.markov_loop(PREV, base, *weights, *call_state())
    counts = h.read()["gumbel_sample"]
    assert (counts.rows, counts.inert_rows, counts.nan_rows) == (15, 3, 1)


# Wrong metadata

GATE, RNN_GATE = torch.zeros(R, H + R), torch.zeros(3 * R, 2 * R + H)


def good(function: str) -> dict[str, Any]:
    loop = function == "markov_loop"
    (w1, w2), _ = make_head()
    steps = (STEPS,) if loop else ()
    idx_mapping, temperature, seeds, pos = call_state()
    arguments = {
        "anchor" if loop else "prev": PREV.clone(),
        "base": torch.ones(NUM_ROWS, *steps, V),
        "w1": w1,
        "w2": w2,
        "idx_mapping": idx_mapping,
        "temperature": temperature,
        "seeds": seeds,
        "pos": pos,
        "logits_cache": make_cache("cpu", V, F32, cols=STEPS),
        "draft_tokens": torch.full((NUM_ROWS, *steps), -9),
        "state": torch.ones(NUM_ROWS, R),
        "hidden": torch.ones(NUM_ROWS, *steps, H),
        "gate": (RNN_GATE, torch.zeros(3 * R)),
    }
    return arguments if loop else {**arguments, "cache_col": 1}


def meta(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


NO_GATE = {"gate": None, "state": None, "hidden": None}
# changed arguments, error, text; of both functions
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"base": [1.0]}, TypeError, r"base must be a Tensor, got list"),
    ({"base": torch.ones(5, 3, V).double()}, TypeError, "base must have dtype .*; got .*float64"),
    ({"base": torch.ones(V)}, ValueError, r"base must have shape \[B, .*V\].*; got \(61,\)"),
    ({"w1": 3}, TypeError, "w1 must be a Tensor, got int: 3"),
    ({"w1": torch.ones(V, R).int()}, TypeError, "w1 must have dtype .*; got torch.int32"),
    ({"w1": torch.ones(V - 1, R)}, ValueError, r"w1 must have shape .* V = 61 .*got \(60, 16\)"),
    ({"w1": torch.ones(V)}, ValueError, r"w1 must have shape \[Vt, R\].*; got \(61,\)"),
    ({"w1": torch.ones(V, 0)}, ValueError, r"w1 must have shape .*R >= 1; got \(61, 0\)"),
    ({"w1": torch.ones(R, V).T}, ValueError, r"w1 must be contiguous .* strides \(1, 61\)"),
    ({"w1": meta(V, R)}, ValueError, "w1 must be on cpu, where base is; got meta"),
    ({"w2": torch.ones(V, R).half()}, TypeError, "w2 must have dtype float32.*got torch.float16"),
    ({"w2": torch.ones(V, R + 1)}, ValueError, r"w2 must .* \[V, R\] = \[61, 16\]; got \(61, 17\)"),
    ({"w2": torch.ones(V, R).to(INT8)}, ValueError, "w2_scale must be given with w2 of torch.int8"),
    ({"w2_scale": torch.ones(V)}, ValueError, "w2_scale must be given only with w2 of float8"),
    (
        {"w2": torch.ones(V, R).to(FP8), "w2_scale": torch.ones(V, 1)},
        ValueError,
        r"w2_scale must have shape \[V\] = \[61\]; got \(61, 1\)",
    ),
    (
        {"w2": torch.ones(V, R).to(FP8), "w2_scale": torch.ones(V).to(BF16)},
        TypeError,
        "w2_scale must have dtype float32; got torch.bfloat16",
    ),
    ({"gate": GATE}, ValueError, r"gate must have shape \[3 R, 2 R \+ H\] = \[48, 44\]; got"),
    (
        {"state": None},
        ValueError,
        r"gate must have shape \[R, H \+ R\] = \[16, 28\]; got \(48, 44\)",
    ),
    ({"gate": 1.0}, TypeError, "gate must be the weight of a Linear or .*, got float: 1.0"),
    ({"gate": (RNN_GATE,)}, TypeError, "gate must be the weight of a Linear or"),
    ({"gate": (1.0, None)}, TypeError, "gate weight must be a Tensor, got float: 1.0"),
    (
        {"gate": (RNN_GATE, torch.ones(R))},
        ValueError,
        r"gate bias must have shape \[3 R\] = \[48\]; got \(16,\)",
    ),
    ({"gate": RNN_GATE.half()}, TypeError, "gate must have dtype float32; got torch.float16"),
    ({"gate": None}, ValueError, "state must be given only with gate"),
    ({"gate": None, "state": None}, ValueError, "hidden must be given only with gate"),
    ({"hidden": None}, ValueError, "hidden must be given with gate: .*; got None"),
    ({"hidden": torch.ones(4, H)}, ValueError, r"hidden must have shape .*H\]; got \(4, 12\)"),
    ({"hidden": 0}, TypeError, "hidden must be a Tensor, got int: 0"),
    ({"state": torch.ones(5, R + 1)}, ValueError, r"state must have shape .*; got \(5, 17\)"),
    ({"state": torch.ones(5, R).half()}, TypeError, "state must have dtype float32; got"),
    (
        {"state": torch.ones(1, R).expand(5, R)},
        ValueError,
        r"state is written in place .* strides \(0, 1\)",
    ),
    ({"base_scale": "1"}, TypeError, "base_scale must be a float, got str: '1'"),
    ({"base_scale": True}, TypeError, "base_scale must be a float, got bool: True"),
    ({"base_scale": float("nan")}, ValueError, "base_scale must be finite; got nan"),
    ({"bias_scale": torch.ones(())}, TypeError, "bias_scale must be a float, got Tensor"),
    ({"bias_scale": float("inf")}, ValueError, "bias_scale must be finite; got inf"),
    ({"base_softcap": 0.0}, ValueError, "base_softcap must be finite and above 0; .*; got 0.0"),
    ({"bias_softcap": -3}, ValueError, "bias_softcap must be finite and above 0; .*; got -3"),
    ({"d2t": torch.zeros(V).int()}, TypeError, "d2t must have dtype int64; got torch.int32"),
    ({"d2t": torch.zeros(V - 1).long()}, ValueError, r"d2t must .*\[V\] = \[61\]; got \(60,\)"),
    (
        {"d2t": torch.zeros(V).long(), "w1": torch.ones(VT, R)},
        ValueError,
        r"logits_cache must have shape \[S, C, >= V\] = \[5, C, >= 130\]; got \(5, 3, 66\)",
    ),
    (
        {"logits_cache": make_cache("cpu", V, BF16)},
        ValueError,
        "logits_cache must have the dtype .*float32.*; got torch.bfloat16",
    ),
    ({"logits_cache": [1.0]}, TypeError, r"logits_cache must be a Tensor, got list: \[1.0\]"),
    ({"idx_mapping": torch.ones(5)}, TypeError, "idx_mapping must have dtype .*; got"),
    ({"idx_mapping": torch.ones(4).int()}, ValueError, r"idx_mapping must .*; got \(4,\)"),
    ({"pos": torch.ones(5, 9).long()}, ValueError, r"pos must have shape .*; got \(5, 9\)"),
    ({"temperature": torch.ones(5).half()}, TypeError, "temperature must have dtype float32; got"),
    ({"seeds": torch.arange(4)}, ValueError, r"seeds must .*\(5,\); got \(4,\)"),
    ({"draft_tokens": torch.ones(5)}, TypeError, "draft_tokens must have dtype int32, int64; got"),
    ({"draft_tokens": torch.ones(2, 9).int()}, ValueError, r"draft_tokens must .*got \(2, 9\)"),
    ({"pos_offset": 1.5}, TypeError, "pos_offset must be an int, got float: 1.5"),
    ({"is_drafting": 1}, TypeError, "is_drafting must be True or False, got int: 1"),
    ({"use_fp64": "no"}, TypeError, "use_fp64 must be True or False, got str: 'no'"),
]
REFUSED_STEP = [
    ({"prev": PREV.int()}, TypeError, "prev must have dtype int64; got torch.int32"),
    ({"prev": PREV[:4]}, ValueError, r"prev must have shape \[B\] = \[5\]; got \(4,\)"),
    ({"cache_col": None}, ValueError, "cache_col must be given with logits_cache"),
    ({"cache_col": -1}, ValueError, "cache_col must be in .*; got -1"),
    ({"logits_cache": None}, ValueError, "logits_cache must be given with cache_col"),
]
REFUSED_LOOP = [
    ({"anchor": PREV.int()}, TypeError, "anchor must have dtype int64; got torch.int32"),
    ({"anchor": 1}, TypeError, "anchor must be a Tensor, got int: 1"),
    ({"base": torch.ones(5, 0, V)}, ValueError, r"base must have shape .*N >= 1; got \(5, 0, 61\)"),
    (
        {"logits_cache": make_cache("cpu", V, F32, cols=STEPS - 1)},
        ValueError,
        r"logits_cache must have a column for each of N = 3 steps; got \(5, 2, 66\)",
    ),
    ({"draft_tokens": torch.ones(5).int()}, ValueError, r"draft_tokens must .*; got \(5,\)"),
]


def refused() -> list[Any]:
    both = {"markov_step": REFUSED + REFUSED_STEP, "markov_loop": REFUSED + REFUSED_LOOP}
    return [
        pytest.param(function, *case, id=f"{function}-{'-'.join(case[0])}-{number}")
        for function, cases in both.items()
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("function", "changed", "error", "text"), refused())
def test_refused(function: str, changed: dict[str, Any], error, text: str) -> None:
    """Nothing is written before an error."""
    arguments = {**good(function), **changed}
    tensors = [x for x in arguments.values() if isinstance(x, Tensor) and not x.is_meta]
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=text):
        getattr(dspark_ops, function)(**arguments)
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x.float(), old.float())


@pytest.mark.parametrize("function", ["markov_step", "markov_loop"])
def test_good_arguments_are_taken(function: str) -> None:
    arguments = good(function)
    token = getattr(dspark_ops, function)(**arguments)
    assert torch.equal(arguments["draft_tokens"], token)
    assert (arguments["state"] != 1).any()
    arguments = {**good(function), **NO_GATE}
    getattr(dspark_ops, function)(**arguments)
    assert (arguments["logits_cache"][2, 1, :V] != 7.0).any()
