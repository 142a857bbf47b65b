"""Health counters on a GPU: against numpy's counts, under capture, replay and compilation."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_ops

from ..ops.cases import DTYPES, F32
from ..ops.test_health import (
    SAMPLERS,
    counts_of,
    health_module,
    request_batch,
    request_model,
    sampler_batch,
    sampler_model,
)
from .test_capture import capture

pytestmark = pytest.mark.usefixtures("poisoned_empty")

VOCAB = 9001  # three tiles of the counting kernel


def on_gpu(inputs: Any) -> list[Tensor]:
    return [x.cuda() for x in inputs.args]


def nothing(h: Any) -> bool:
    return not any(any(counts) for counts in h.read().values())


def call(op: str, args: Any, **kwargs: Any) -> Any:
    return getattr(dspark_ops, op)(*args, **kwargs)


def test_results_are_the_same_bits_and_the_counts_those_of_numpy() -> None:
    for seed, dtype in enumerate(DTYPES * 2):
        inputs = sampler_batch(VOCAB, dtype, seed)
        cols = torch.arange(12) - 1  # rows of one slot must not meet in the cache
        options = {"cache_col": cols.cuda()}
        for op in SAMPLERS:
            results = []
            for is_counted in (False, True):
                cache = torch.full((5, 10, VOCAB), 7.0, dtype=dtype, device="cuda")
                args = on_gpu(inputs)
                if is_counted:
                    with dspark_ops.health("cuda") as h:
                        out = call(op, args, logits_cache=cache, **options)
                else:
                    out = call(op, args, logits_cache=cache, **options)
                outs = out if isinstance(out, tuple) else (out,)
                results.append([x.view(torch.uint8) for x in (*outs, cache)])
            assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
            model = sampler_model(inputs, inputs.logits, cols.tolist(), 10)
            assert counts_of(op, h.read()) == model


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("has_draft", [True, False])
def test_requests(has_draft: bool, method: str) -> None:
    for seed in range(6):
        batch, steps, vocab = request_batch("cuda", has_draft, seed)
        options = {"num_steps": steps, "method": method}
        wanted = dspark_ops.rejection_sample(*batch.args, **options)
        with dspark_ops.health(0) as h:
            actual = dspark_ops.rejection_sample(*batch.args, **options)
        assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))
        assert counts_of("rejection_sample", h.read()) == request_model(batch, steps, vocab)


def test_bias_of_every_shape_is_counted_as_it_is_summed() -> None:
    for seed, dtype in enumerate(DTYPES):
        inputs = sampler_batch(VOCAB, dtype, seed)
        inputs.logits *= 4
        for shape in ((12, VOCAB), (1, VOCAB), (VOCAB,)):
            bias = torch.full(shape, 65504.0).to(dtype)  # the sum overflows in f16
            bias[..., ::3] = float("-inf")
            with dspark_ops.health("cuda") as h:
                dspark_ops.gumbel_sample(*on_gpu(inputs), bias=bias.cuda())
            model = sampler_model(inputs, inputs.logits + bias, None, 0)
            assert counts_of("gumbel_sample", h.read()) == model


def captured_step() -> tuple[Any, torch.cuda.CUDAGraph, list[Tensor], Any]:
    """(context, graph, the sampler's inputs, the requests), captured in the context."""
    args = on_gpu(sampler_batch(VOCAB, F32, 0))
    batch, steps, _ = request_batch("cuda", True, 0)

    def step() -> Any:
        block_max, _ = dspark_ops.gumbel_block_argmax(*args)
        token = dspark_ops.gumbel_sample(*args)
        return block_max, token, dspark_ops.rejection_sample(*batch.args, num_steps=steps)

    with dspark_ops.health("cuda") as h:
        graph, _ = capture(step)
    return h, graph, args, batch


def test_replays_count_also_after_the_context() -> None:
    """What was captured follows its inputs: overwritten in place, replayed, counted anew."""
    h, graph, args, batch = captured_step()
    counted = h.read()
    assert all(counts.rows for counts in counted.values())  # warm-up runs; a capture runs nothing
    for seed in range(1, 4):
        inputs = sampler_batch(VOCAB, F32, seed)
        for x, y in zip(args, inputs.args, strict=True):
            x.copy_(y)
        batch.target_logits[seed].fill_(float("nan"))
        h.reset()
        assert nothing(h)
        for _ in range(seed):
            graph.replay()
        counted = h.read()
        model = sampler_model(inputs, inputs.logits, None, 0)
        for op in SAMPLERS:
            once = {name: n // seed for name, n in counted[op]._asdict().items() if n}
            assert all(n % seed == 0 for n in counted[op])
            assert once == model
        _, steps, vocab = request_batch("cpu", True, 0)
        model = request_model(batch, steps, vocab)
        assert counted["rejection_sample"] == health_module.Counts(
            *(seed * model.get(name, 0) for name in health_module.Counts._fields)
        )


def test_a_graph_of_a_forgotten_context_writes_into_memory_of_its_own() -> None:
    h, graph, _, _ = captured_step()
    del h
    gc.collect()
    torch.cuda.synchronize()
    others = [torch.zeros(48, dtype=torch.int64, device="cuda") for _ in range(200)]
    graph.replay()
    torch.cuda.synchronize()
    assert not any(x.any() for x in others)


def test_a_graph_captured_outside_never_counts() -> None:
    args = on_gpu(sampler_batch(VOCAB, F32, 0))
    graph, _ = capture(lambda: dspark_ops.gumbel_sample(*args))
    with dspark_ops.health("cuda") as h:
        graph.replay()
    assert nothing(h)


def test_under_capture_a_context_may_be_entered_but_not_made_or_read() -> None:
    args = on_gpu(sampler_batch(VOCAB, F32, 0))
    dspark_ops.gumbel_sample(*args)
    h = dspark_ops.health("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for refused in (lambda: dspark_ops.health("cuda"), h.read, h.reset):
            with pytest.raises(RuntimeError, match="capture"):
                refused()
        with h:
            dspark_ops.gumbel_sample(*args)
        dspark_ops.gumbel_sample(*args)
    assert nothing(h)
    for replays in (1, 2):
        graph.replay()
        assert h.read()["gumbel_sample"].rows == 12 * replays


def test_other_streams_are_counted() -> None:
    args = on_gpu(sampler_batch(VOCAB, F32, 0))
    torch.cuda.synchronize()
    with dspark_ops.health("cuda") as h:
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                dspark_ops.gumbel_sample(*args)
        assert h.read()["gumbel_sample"].rows == 36


def test_devices_are_counted_apart() -> None:
    inputs = sampler_batch(VOCAB, F32, 0)
    with dspark_ops.health("cpu") as cpu, dspark_ops.health("cuda:0") as gpu:
        dspark_ops.gumbel_sample(*inputs.args)
        assert nothing(gpu)
        dspark_ops.gumbel_sample(*on_gpu(inputs))
    assert cpu.read() == gpu.read()


def kernels_of(run: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_one_launch_more_when_on_and_none_when_off() -> None:
    args = on_gpu(sampler_batch(VOCAB, F32, 0))

    def run() -> None:
        dspark_ops.gumbel_sample(*args)

    run()
    off = [name for name in kernels_of(run) if "kernel" in name]
    with dspark_ops.health("cuda"):
        run()
        on = [name for name in kernels_of(run) if "kernel" in name]
    assert not [name for name in off if "_count_" in name]
    assert [name for name in on if "_count_" not in name] == off
    assert len([name for name in on if "_count_" in name]) == 1


def test_compiled_and_reduce_overhead() -> None:
    """Recorded in the context: every later replay counts, one for each call."""
    torch._dynamo.reset()
    inputs = sampler_batch(VOCAB, F32, 0)
    args = on_gpu(inputs)
    compiled = torch.compile(
        lambda *a: dspark_ops.gumbel_sample(*a) + 1, mode="reduce-overhead", fullgraph=True
    )
    with dspark_ops.health("cuda") as h:
        for calls in range(1, 6):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(*args)
            assert h.read()["gumbel_sample"].rows == 12 * calls
    model = sampler_model(inputs, inputs.logits, None, 0)
    assert counts_of("gumbel_sample", h.read()) == {name: 5 * n for name, n in model.items()}
