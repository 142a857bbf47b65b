"""The compiled draft loop on a GPU: equal to eager, captured, without copies or compilations."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import dspark_ops
import inductor_passes

VOCAB, RANK, STEPS, SLOTS = 5000, 32, 3, 64


@dataclass
class Step:
    base: Tensor  # bf16 [B, N, V]
    prev: Tensor  # i64 [B]
    w1: Tensor  # bf16 [V, R]
    w2: Tensor  # bf16 [V, R]
    idx_mapping: Tensor  # i32 [B, N]
    temperature: Tensor  # f32 [S]
    seeds: Tensor  # i64 [S]
    pos: Tensor  # i64 [B, N]
    logits_cache: Tensor  # bf16 [S, N, V]
    draft_tokens: Tensor  # i64 [B, N]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def fill(self, seed: int) -> None:
        """Fresh values in place; row 0 greedy, row 1 inert where there are several."""
        generator = torch.Generator("cuda").manual_seed(seed)
        rows = len(self.prev)
        self.base.normal_(generator=generator)
        self.prev.random_(0, len(self.w1), generator=generator)
        self.w1.normal_(0, 0.3, generator=generator)
        self.w2.normal_(0, 0.3, generator=generator)
        slots = torch.randperm(len(self.seeds), device="cuda", generator=generator)[:rows]
        self.idx_mapping.copy_(slots[:, None].expand(rows, STEPS))
        self.temperature.uniform_(0.3, 1.5, generator=generator)
        self.temperature[slots[0]] = 0.0
        if rows > 1:
            self.idx_mapping[1] = -1
        self.seeds.random_(generator=generator)
        self.pos.random_(0, 1000, generator=generator)
        self.logits_cache.fill_(7.0)
        self.draft_tokens.fill_(-1)


def make_step(rows: int, seed: int = 0, vocab: int = VOCAB, slots: int = SLOTS) -> Step:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, device="cuda", dtype=dtype)

    step = Step(
        base=empty(rows, STEPS, vocab, dtype=torch.bfloat16),
        prev=empty(rows, dtype=torch.int64),
        w1=empty(vocab, RANK, dtype=torch.bfloat16),
        w2=empty(vocab, RANK, dtype=torch.bfloat16),
        idx_mapping=empty(rows, STEPS, dtype=torch.int32),
        temperature=empty(slots, dtype=torch.float32),
        seeds=empty(slots, dtype=torch.int64),
        pos=empty(rows, STEPS, dtype=torch.int64),
        logits_cache=empty(slots, STEPS, vocab, dtype=torch.bfloat16),
        draft_tokens=empty(rows, STEPS, dtype=torch.int64),
    )
    step.fill(seed)
    return step


def draft_loop(
    base: Tensor,
    prev: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor,
    draft_tokens: Tensor,
) -> Tensor:
    """[B, N, V] biases, so that a test can start from what the samplers were given."""
    biases = []
    for i in range(base.shape[1]):
        bias = F.linear(F.embedding(prev, w1), w2)
        biases.append(bias)
        block_max, block_argmax = dspark_ops.gumbel_block_argmax(
            base[:, i] + bias,
            idx_mapping[:, i],
            temperature,
            seeds,
            pos[:, i] - 1,
            logits_cache=logits_cache,
            cache_col=i,
            is_drafting=True,
        )
        best = block_max.argmax(-1, keepdim=True)
        prev = block_argmax.gather(-1, best).view(-1)
        draft_tokens[:, i] = prev
    return torch.stack(biases, dim=1)


def assert_equals_eager(step: Step, biases: Tensor) -> None:
    """From base and ``biases`` on: ids equal, cache bits equal, untouched entries still 7."""
    cache = torch.full_like(step.logits_cache, 7.0)
    for i in range(STEPS):
        block_max, block_argmax = dspark_ops.gumbel_block_argmax(
            step.base[:, i] + biases[:, i],
            step.idx_mapping[:, i],
            step.temperature,
            step.seeds,
            step.pos[:, i] - 1,
            logits_cache=cache,
            cache_col=i,
            is_drafting=True,
        )
        token = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)
        assert torch.equal(token, step.draft_tokens[:, i])
    assert torch.equal(cache.view(torch.int16), step.logits_cache.view(torch.int16))


@contextmanager
def counted_triton_compilations() -> Iterator[Counter]:
    """Counts compiled kernels by name while it is open."""
    runtime = pytest.importorskip("triton").knobs.runtime
    compiled: Counter = Counter()

    def hook(*args: Any, **kwargs: Any) -> None:
        compiled[str(kwargs.get("repr") or kwargs.get("fn") or args[:1])] += 1

    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = hook
    try:
        yield compiled
    finally:
        runtime.jit_post_compile_hook = before


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def compiled_loop(**how: Any) -> Callable[..., Tensor]:
    return torch.compile(draft_loop, backend="dspark", fullgraph=True, **how)


def test_every_batch_size_equals_eager_and_compiles_nothing_new() -> None:
    loop = compiled_loop(dynamic=True)
    graphs = []
    with counted_triton_compilations() as kernels:
        for rows in range(2, 65):
            step = make_step(rows, seed=rows)
            assert_equals_eager(step, loop(*step.arguments))
            graphs.append((counters["stats"]["unique_graphs"], sum(kernels.values())))
    assert kernels, "the hook has to fire on the first batch sizes"
    assert graphs[-1] == graphs[1]
    assert counters["dspark"]["sampler_fusion.fused"] == STEPS * graphs[-1][0]
    assert counters["dspark"]["sampler_fusion.skipped"] == 0


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_captured_replay_follows_inputs_overwritten_in_place(rows: int) -> None:
    loop = compiled_loop()
    step = make_step(rows)
    loop(*step.arguments)
    loop(*step.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        biases = loop(*step.arguments)
    for seed in range(1, 6):
        step.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        assert_equals_eager(step, biases)


def test_reduce_overhead_skips_no_cuda_graph() -> None:
    loop = compiled_loop(mode="reduce-overhead")
    step = make_step(4)
    for buffer in (step.logits_cache, step.draft_tokens):
        torch._dynamo.mark_static_address(buffer)
    for seed in range(6):
        step.fill(seed)
        torch.compiler.cudagraph_mark_step_begin()
        biases = loop(*step.arguments).clone()
        assert_equals_eager(step, biases)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_four_kernels_a_step() -> None:
    loop = compiled_loop()
    step = make_step(4)
    loop(*step.arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loop(*step.arguments)
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memset", "Memcpy"))
    ]
    assert sum("gumbel_sample" in name for name in names) == 2 * STEPS
    assert not any("gumbel_block" in name or "argmax" in name for name in names)
    # Beside the sampler's two a step has its GEMM (which may be split into two kernels) and the
    # copy of its bias into the stack that this test returns; the first one looks its anchor up.
    # cuBLAS clears the counters of a split GEMM by a fill, the memset that does not count.
    others = [name for name in names if "gumbel_sample" not in name and "FillFunctor" not in name]
    assert len(others) <= 3 * STEPS + 1, others


def test_memory_of_a_compiled_step_is_that_of_its_bias() -> None:
    rows, vocab, slots = 8, 131072, 1000
    step = make_step(rows, vocab=vocab)
    big_cache = torch.zeros(slots, 4, vocab, device="cuda", dtype=torch.bfloat16)  # 1 GB
    temperature = torch.ones(slots, device="cuda")
    seeds = torch.arange(slots, device="cuda")
    idx_mapping = torch.arange(rows, device="cuda")
    bias_w = torch.randn(vocab, RANK, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(rows, RANK, device="cuda", dtype=torch.bfloat16)

    def one_step(base: Tensor, hidden: Tensor, bias_w: Tensor, cache: Tensor) -> Tensor:
        block_max, block_argmax = dspark_ops.gumbel_block_argmax(
            base + F.linear(hidden, bias_w),
            idx_mapping,
            temperature,
            seeds,
            idx_mapping,
            logits_cache=cache,
            cache_col=1,
        )
        return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)

    compiled = torch.compile(one_step, backend="dspark", fullgraph=True)
    pointer = big_cache.data_ptr()
    arguments = (step.base[:, 0], hidden, bias_w, big_cache)
    with torch.no_grad():
        compiled(*arguments)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(*arguments)
        grown = torch.cuda.max_memory_allocated() - before
    assert counters["dspark"]["sampler_fusion.fused"] == 1
    assert big_cache.data_ptr() == pointer
    assert grown < rows * vocab * 2 + 10_000_000
    assert bool((big_cache[:rows, 1] != 0).any())
    assert not bool(big_cache[rows:].any())


def test_explain_runs_nothing() -> None:
    step = make_step(4)
    step.logits_cache.fill_(7.0)
    report = inductor_passes.explain(draft_loop, *step.arguments)
    assert [site.fused for site in report.sites] == [True] * STEPS
    assert bool((step.logits_cache == 7.0).all())
    assert bool((step.draft_tokens == -1).all())
