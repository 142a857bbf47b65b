"""Health counters against a numpy count, in both implementations; counting changes nothing.

Batches are random with every kind of row and of device value planted.
"""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dspark_ops

from .cases import BF16, DTYPES, F16, F32, Inputs, make_cache, strided
from .conftest import Kernel, Reference, op_module
from .rejection_cases import METHODS, Batch, Kernels, make_batch
from .rejection_cases import Reference as RejectionReference

# What a GPU does without a word, numpy reports: inf - inf, overflow of f16.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow):RuntimeWarning"
)

health_module = op_module("health")
INF, NAN = math.inf, math.nan
SAMPLERS = ("gumbel_block_argmax", "gumbel_sample")
# Longer than the counting kernel's tile, and not a multiple of it.
VOCABS = (1, 7, 4099)


def counts_of(op: str, counted: dict[str, Any]) -> dict[str, int]:
    """The counters of ``op`` that are not zero, the other ops' being zero."""
    for other, counts in counted.items():
        assert other == op or not any(counts), other
    return {name: n for name, n in counted[op]._asdict().items() if n}


def kind(x: np.ndarray) -> str:
    if np.isnan(x).any():
        return "nan_rows"
    if (x == INF).any():
        return "inf_rows"
    return "usual_rows" if np.isfinite(x).any() else "no_finite_rows"


def tally(*names: str) -> dict[str, int]:
    return {name: names.count(name) for name in names}


def plant(x: Tensor, rng: np.random.Generator) -> None:
    """Rows of ``x`` [.., V] by chance usual, with NaN, with +inf, of -inf, of -inf and one more."""
    for row in x.view(-1, x.shape[-1]):
        at = int(rng.integers(row.shape[0]))
        match int(rng.integers(7)):
            case 0:
                row[at] = NAN
            case 1:
                row[at] = INF
            case 2:
                row[:] = -INF
            case 3:
                row[:] = -INF
                row[at] = (0.0, NAN, INF)[int(rng.integers(3))]
            case 4:
                row[at] = -INF


# Samplers


def sampler_batch(vocab: int, dtype: torch.dtype, seed: int) -> Inputs:
    """12 rows in 5 slots; temperatures of every kind."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(12, vocab)) * 3).to(dtype)
    plant(logits, rng)
    slots = rng.choice([0, 1, 2, 3, 4, -1, -9, 5, 2**30], size=12)
    return Inputs(
        logits,
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor([1.0, NAN, 0.0, INF, -2.0]),
        torch.arange(5) * 7919,
        torch.arange(12) + 40,
    )


def sampler_model(inputs: Inputs, sums: Tensor, cols: Any, num_cols: int) -> dict[str, int]:
    names = []
    x = sums.float().numpy()
    temperature = inputs.temperature.numpy()
    for b, slot in enumerate(inputs.idx_mapping.tolist()):
        names.append("rows")
        if slot < 0:
            names.append("inert_rows")
        elif slot >= len(temperature):
            names.append("slots_out_of_range")
        else:
            names.append(kind(x[b]))
            if not np.isfinite(temperature[slot]):
                names.append("temperatures_not_finite")
            if cols is not None and not 0 <= cols[b] < num_cols:
                names.append("columns_out_of_range")
    return tally(*names)


def put(x: Tensor, device: str) -> Tensor:
    return strided(x).to(device) if x.dim() < 2 else x.to(device)


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("op", SAMPLERS)
def test_samplers_count_what_numpy_counts(ops: Any, op: str, case: int) -> None:
    """With a cache or without, every spelling of the column and of the bias, strided rows."""
    vocab, dtype = VOCABS[case % 3], DTYPES[case // 2]
    inputs = sampler_batch(vocab, dtype, case)
    sums, cols, kwargs = inputs.logits, None, {}
    if op == "gumbel_sample" and case != 5:
        rng = np.random.default_rng(100 + case)
        shape = ((12, vocab), (1, vocab), (vocab,))[case % 3]
        bias = torch.tensor(rng.normal(size=shape)).to((BF16, F32)[case % 2])
        bias.view(-1)[rng.integers(bias.numel())] = -INF
        kwargs["bias"] = bias.to(ops.device)
        sums = (inputs.logits.double() + bias.double()).float()
        sums = sums.to(torch.promote_types(dtype, bias.dtype))
    if case != 1:
        given = (2, torch.tensor(3), torch.arange(12) % 6 - 1, 7, torch.tensor(-1), 0)[case]
        given_tensor = given if isinstance(given, Tensor) else torch.tensor(given)
        cols = given_tensor.expand(12).tolist()
        kwargs["logits_cache"] = make_cache(ops.device, vocab, sums.dtype)
        kwargs["cache_col"] = put(given, ops.device) if case == 2 else given
        if isinstance(given, Tensor) and case != 2:
            kwargs["cache_col"] = given.to(ops.device)
    args = [put(x, ops.device) if x.shape == (12,) else x.to(ops.device) for x in inputs.args]
    args[0] = strided(inputs.logits).to(ops.device)
    with dspark_ops.health(ops.device) as h:
        getattr(ops, op)(*args, **kwargs)
    assert counts_of(op, h.read()) == sampler_model(inputs, sums, cols, 3)


def test_what_is_sampled_is_counted(ops: Any) -> None:
    """The rounded sum: inf - inf is NaN, f16 overflows to inf, -inf everywhere is no finite row."""
    logits = torch.tensor([[INF, 0.0], [65504.0, 0.0], [0.0, 0.0], [1.0, -INF]])
    bias = torch.tensor([[-INF, 0.0], [65504.0, 0.0], [-INF, -INF], [1.0, 2.0]])
    inputs = sampler_batch(2, F16, 0)
    args = (logits.half(), torch.arange(4), torch.ones(4), inputs.seeds[:4], inputs.pos[:4])
    args = tuple(x.to(ops.device) for x in args)
    with dspark_ops.health(ops.device) as h:
        ops.gumbel_sample(*args, bias=bias.half().to(ops.device))
    assert counts_of("gumbel_sample", h.read()) == {
        **{"rows": 4, "nan_rows": 1, "inf_rows": 1, "no_finite_rows": 1, "usual_rows": 1}
    }


# rejection_sample


def request_batch(device: str, has_draft: bool, seed: int) -> tuple[Batch, int, int]:
    """(batch, num_steps, V): requests with every fault; ``cu`` falls and ends beyond L."""
    rng = np.random.default_rng(seed)
    vocab, steps = (7, 4, 4099)[seed % 3], (3, 1, 4)[seed % 3]
    drafts = [int(g) for g in rng.integers(-1, steps + 3, size=9)]
    temperatures = (1.0, 0.7, 0.0, NAN, INF, 1.6)
    dtype = DTYPES[seed % 3]
    made = make_batch("cpu", drafts, vocab, temperatures=temperatures, dtype=dtype, num_steps=steps)
    plant(made.target_logits, rng)
    plant(made.draft_logits, rng)
    ids = made.draft_token_ids
    at = torch.tensor(rng.random(len(ids)))
    ids[at < 0.15] = -1
    ids[(at > 0.15) & (at < 0.4)] = vocab
    ids[at > 0.95] = 2**40
    cu = made.cu_num_logits.clone()
    cu[-1] += 2
    cu[3] = int(cu[2]) - 1
    if seed % 2:
        cu[0] = -2
    made.cu_num_logits = strided(cu)
    made.draft_token_ids = strided(ids)
    for row, slot in ((1, -1), (5, -4), (7, 11), (8, int(made.idx_mapping[8]))):
        made.idx_mapping[row] = slot
    if not has_draft:
        made.draft_logits = None
    return made.to(device), steps, vocab


def request_model(batch: Batch, steps: int, vocab: int) -> dict[str, int]:
    names = []
    batch = batch.to("cpu")
    target = batch.target_logits.float().numpy()
    num_logits = len(target)
    cu, ids = batch.cu_num_logits.numpy(), batch.draft_token_ids.numpy()
    temperature = batch.temperature.numpy()
    for b, slot in enumerate(batch.idx_mapping.tolist()):
        names.append("rows")
        if not 0 <= slot < len(temperature):
            names.append("inert_rows" if slot < 0 else "slots_out_of_range")
            continue
        t = temperature[slot]
        if not np.isfinite(t):
            names.append("temperatures_not_finite")
        owned = list(range(cu[b], cu[b + 1]))
        kept = [r for r in owned if 0 <= r < num_logits]
        if cu[b + 1] < cu[b] or kept != owned or len(owned) > steps + 1:
            names.append("spans_out_of_range")
        for i, row in enumerate(kept[: steps + 1]):
            if i > 0:
                x = int(ids[row])
                if x < 0:
                    break
                if x >= vocab:
                    names.append("draft_ids_out_of_range")
                if batch.draft_logits is not None and np.float32(1e-5) <= t < INF:
                    draft = batch.draft_logits[slot, i - 1, :vocab].float().numpy()
                    names.append("draft_" + kind(draft))
            names.append(kind(target[row]))
    return tally(*names)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_draft", [True, False])
@pytest.mark.parametrize("ops", [RejectionReference, Kernels], ids=["reference", "kernel"])
def test_rejection_sample_counts_what_numpy_counts(ops: Any, has_draft: bool, seed: int) -> None:
    batch, steps, vocab = request_batch(ops.device, has_draft, seed)
    with dspark_ops.health(ops.device) as h:
        ops.rejection_sample(*batch.args, num_steps=steps, method=METHODS[seed % 2])
    assert counts_of("rejection_sample", h.read()) == request_model(batch, steps, vocab)


def test_the_batches_have_every_fault() -> None:
    """No counter is always zero in the tests above."""
    seen: set[str] = set()
    for seed in range(6):
        batch, steps, vocab = request_batch("cpu", True, seed)
        seen |= set(request_model(batch, steps, vocab))
        inputs = sampler_batch(VOCABS[seed % 3], F32, seed)
        seen |= set(sampler_model(inputs, inputs.logits, [9] * 12, 3))
    assert seen == set(health_module.Counts._fields)


# Nothing changes


def results_of_every_op(ops: Any, rejection: Any) -> list[Tensor]:
    device = ops.device
    inputs = [x.to(device) for x in sampler_batch(1030, F32, 4).args]
    cache = make_cache(device, 1030, F32, cols=10)
    cols = torch.arange(12, device=device) - 1  # rows of one slot must not meet in the cache
    tokens = torch.full((12,), -9, device=device)
    out = [*ops.gumbel_block_argmax(*inputs, logits_cache=cache, cache_col=cols)]
    bias = torch.linspace(-1, 1, 1030, device=device)
    sample = {"bias": bias, "logits_cache": cache, "cache_col": cols, "draft_tokens": tokens}
    out += [ops.gumbel_sample(*inputs, **sample), cache, tokens]
    batch, steps, _ = request_batch(device, True, 0)
    return out + [*rejection.rejection_sample(*batch.args, num_steps=steps), *batch.args]


@pytest.mark.parametrize("both", [(Reference, RejectionReference), (Kernel, Kernels)])
def test_results_are_the_same_bits(both: Any) -> None:
    wanted = results_of_every_op(*both)
    with dspark_ops.health(both[0].device) as h:
        actual = results_of_every_op(*both)
    assert all(counts.rows for counts in h.read().values())
    for x, y in zip(actual, wanted, strict=True):
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


class _Forbidden:
    """A kernel that must not be launched."""

    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError("launched")


@pytest.mark.parametrize("both", [(Reference, RejectionReference), (Kernel, Kernels)])
def test_off_launches_and_allocates_nothing(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before a context, nor after it: no hook is even called."""
    with dspark_ops.health(both[0].device) as h:
        pass
    assert not health_module.ACTIVE
    for name in [n for n in vars(health_module) if n.endswith("_kernel")]:
        monkeypatch.setattr(health_module, name, _Forbidden())

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("called")

    for op in health_module.OPS:
        for name in ("count_rows", "count_rows_ref", "count_requests", "count_requests_ref"):
            monkeypatch.setattr(op_module(op), name, forbidden, raising=False)
    monkeypatch.setattr(health_module.Health, "__init__", forbidden)
    results_of_every_op(*both)
    assert not any(any(counts) for counts in h.read().values())


def test_the_hooks_reach_the_counting_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers do use what the test above forbids."""
    inputs = [x.to(Kernel.device) for x in sampler_batch(7, F32, 0).args]
    batch, steps, _ = request_batch(Kernel.device, True, 0)
    for name in [n for n in vars(health_module) if n.endswith("_kernel")]:
        monkeypatch.setattr(health_module, name, _Forbidden())
    calls = (
        lambda: Kernel.gumbel_block_argmax(*inputs),
        lambda: Kernel.gumbel_sample(*inputs),
        lambda: Kernels.rejection_sample(*batch.args, num_steps=steps),
    )
    for call in calls:
        with dspark_ops.health(Kernel.device), pytest.raises(AssertionError, match="launched"):
            call()


# The context


def call_once(device: str = "cpu") -> None:
    args = sampler_batch(7, F32, 1).args
    dspark_ops.gumbel_sample(*(x.to(device) for x in args))


def test_counts_add_up_until_reset_and_the_context_may_be_entered_again() -> None:
    h = dspark_ops.health("cpu")
    for calls in (1, 2):
        with h:
            call_once()
            call_once()
        call_once()
        assert h.read()["gumbel_sample"].rows == 24 * calls
    h.reset()
    assert not any(any(counts) for counts in h.read().values())
    with h:
        call_once()
        assert h.read()["gumbel_sample"].rows == 12


def test_an_error_inside_closes_the_context() -> None:
    with pytest.raises(KeyError), dspark_ops.health("cpu"):
        raise KeyError
    assert not health_module.ACTIVE


def test_refused_calls_are_not_counted() -> None:
    args = sampler_batch(7, F32, 1).args
    with dspark_ops.health("cpu") as h, pytest.raises(TypeError):
        dspark_ops.gumbel_sample(*args[:3], args[3].int(), args[4])
    assert not any(h.read()["gumbel_sample"])


def test_empty_batches(ops: Any) -> None:
    args = [x.to(ops.device) for x in sampler_batch(7, F32, 1).args]
    for i in (0, 1, 4):
        args[i] = args[i][:0]
    with dspark_ops.health(ops.device) as h:
        ops.gumbel_sample(*args)
        ops.gumbel_block_argmax(*args)
        batch = make_batch(ops.device, [], 7)
        dspark_ops.rejection_sample(*batch.args, num_steps=0)
    assert not any(any(counts) for counts in h.read().values())


def test_no_slots(ops: Any) -> None:
    logits, _, _, _, pos = (x.to(ops.device) for x in sampler_batch(7, F32, 1).args)
    none = torch.empty(0, device=ops.device)
    with dspark_ops.health(ops.device) as h:
        ops.gumbel_sample(logits, pos, none, none.long(), pos)
    assert counts_of("gumbel_sample", h.read()) == {"rows": 12, "slots_out_of_range": 12}


def test_every_thread_is_counted() -> None:
    def work() -> None:
        for _ in range(20):
            call_once()

    with dspark_ops.health("cpu") as h:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert h.read()["gumbel_sample"].rows == 60 * 12


def test_inference_mode_and_a_default_device() -> None:
    with torch.inference_mode():
        h = dspark_ops.health("cpu")
        with h:
            call_once()
    with h, torch.device("meta"):
        h_rows = h.read()["gumbel_sample"].rows
    with h:
        call_once()
    assert (h_rows, h.read()["gumbel_sample"].rows) == (12, 24)


def test_one_context_a_device() -> None:
    with dspark_ops.health("cpu") as h:
        for other in (h, dspark_ops.health("cpu")):
            with pytest.raises(RuntimeError, match="open on cpu already"), other:
                pass
        call_once()
    assert h.read()["gumbel_sample"].rows == 12


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        (None, TypeError, "NoneType: None"),
        (True, TypeError, "bool: True"),
        ("meta", ValueError, "'meta'"),
        ("gpu", ValueError, "'gpu'"),
        ("cuda:99", RuntimeError, "'cuda:99'"),
        (99, RuntimeError, "'cuda:99'"),
    ],
)
def test_refused_devices(device: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        dspark_ops.health(device)


# Compiled code


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_is_counted(backend: str) -> None:
    """Compiled before the context, inside it, and run after it: what counts is when it runs."""
    torch._dynamo.reset()
    inputs = sampler_batch(50, F32, 3)
    batch, steps, vocab = request_batch("cpu", True, 0)
    bias = torch.linspace(-1, 1, 50)

    def step(args: Any, requests: Any) -> Any:
        token = dspark_ops.gumbel_sample(*args, bias=bias)
        return token, *dspark_ops.rejection_sample(*requests, num_steps=steps)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    wanted = compiled(inputs.args, batch.args)
    with dspark_ops.health("cpu") as h:
        actual = compiled(inputs.args, batch.args)
    counted = h.read()
    compiled(inputs.args, batch.args)
    assert h.read() == counted
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))
    model = sampler_model(inputs, inputs.logits + bias, None, 0)
    assert {k: n for k, n in counted["gumbel_sample"]._asdict().items() if n} == model
    model = request_model(batch, steps, vocab)
    assert {k: n for k, n in counted["rejection_sample"]._asdict().items() if n} == model


def test_compiling_counts_nothing_of_its_own() -> None:
    """Fake tensors run through no implementation: one run, one count."""
    torch._dynamo.reset()
    args = sampler_batch(50, F32, 3).args
    with dspark_ops.health("cpu") as h:
        torch.compile(lambda *a: dspark_ops.gumbel_sample(*a), fullgraph=True)(*args)
    assert h.read()["gumbel_sample"].rows == 12


@pytest.mark.parametrize("makes", [True, False])
def test_a_context_inside_of_compiled_code_breaks_the_graph(makes: bool) -> None:
    """It counts all the same, and is never traced into something that counts nothing."""
    torch._dynamo.reset()
    h = dspark_ops.health("cpu")

    def step(*args: Tensor) -> Any:
        opened = dspark_ops.health("cpu") if makes else h
        with opened:
            dspark_ops.gumbel_sample(*args)
        return opened

    args = sampler_batch(7, F32, 1).args
    assert torch.compile(step, backend="eager")(*args).read()["gumbel_sample"].rows == 12
    assert not health_module.ACTIVE
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="eager", fullgraph=True)(*args)
