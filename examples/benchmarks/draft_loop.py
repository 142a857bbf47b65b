"""The Markov loop of a draft step: eager, compiled by stock Inductor, and by ``backend="dspark"``.

    python examples/benchmarks/draft_loop.py            # one NVIDIA GPU; about two minutes

Prints, for each batch size and vocabulary, the time of a loop of 7 steps in CUDA-graph replay
(bf16, Markov rank 256), everything in one run, and the byte floor: W2, base logits and cache once a
step at the copy bandwidth measured in the same run. A figure is printed only for a right result.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import copy_bytes_per_us, host_us, kernels, replay_us
from torch import Tensor

import dspark_ops
import inductor_passes

RANK = 256
STEPS = 7
SHAPES = (
    *((151936, rows) for rows in (1, 8, 32, 128)),
    *((vocab, rows) for vocab in (129280, 248320) for rows in (1, 32)),
)


@dataclass
class Inputs:
    """One draft step after the backbone; B rows, N steps, V vocabulary, R rank."""

    base: Tensor  # bf16 [B, N, V]
    anchor: Tensor  # i64 [B]
    w1: Tensor  # bf16 [V, R]
    w2: Tensor  # bf16 [V, R]
    idx_mapping: Tensor  # i32 [B, N]
    temperature: Tensor  # f32 [B]
    seeds: Tensor  # i64 [B]
    pos: Tensor  # i64 [B, N]
    logits_cache: Tensor  # bf16 [B, N, V]
    draft_tokens: Tensor  # i64 [B, N]

    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def make_inputs(rows: int, vocab: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(rows * 7919 + vocab)

    def normal(*shape: int, scale: float) -> Tensor:
        x = torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float32)
        return (x * scale).bfloat16()

    steps = torch.arange(STEPS, device="cuda")
    row = torch.arange(rows, device="cuda")
    temperature = torch.ones(rows, device="cuda")
    temperature[2::3] = 0.8
    return Inputs(
        base=normal(rows, STEPS, vocab, scale=2.0),
        anchor=torch.randint(vocab, (rows,), device="cuda", generator=generator),
        w1=normal(vocab, RANK, scale=0.3),
        w2=normal(vocab, RANK, scale=0.1),
        idx_mapping=row.int()[:, None].repeat(1, STEPS),
        temperature=temperature,
        seeds=row * 77 + 5,
        pos=row[:, None] * 100 + steps + 1,
        logits_cache=torch.zeros(rows, STEPS, vocab, device="cuda", dtype=torch.bfloat16),
        draft_tokens=torch.zeros(rows, STEPS, device="cuda", dtype=torch.int64),
    )


def draft_loop(
    base: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor,
    draft_tokens: Tensor,
) -> None:
    """The unfused step as a user writes it."""
    prev = anchor
    for i in range(base.shape[1]):
        bias = F.linear(F.embedding(prev, w1), w2)
        logits = base[:, i] + bias
        block_max, block_argmax = dspark_ops.gumbel_block_argmax(
            logits,
            idx_mapping[:, i],
            temperature,
            seeds,
            pos[:, i] - 1,
            logits_cache=logits_cache,
            cache_col=i,
            is_drafting=True,
        )
        best = block_max.argmax(-1, keepdim=True)
        token = block_argmax.gather(-1, best).view(-1)
        draft_tokens[:, i] = token
        prev = token


def plain_loop(
    base: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor,
    draft_tokens: Tensor,
) -> None:
    """The loop without the project's ops: ``torch.rand`` noise, one argmax over the vocabulary."""
    prev = anchor
    for i in range(base.shape[1]):
        logits = base[:, i] + F.linear(F.embedding(prev, w1), w2)
        logits_cache[:, i] = logits
        u = torch.rand(logits.shape, device=logits.device).clamp(min=1e-10, max=1 - 1e-7)
        prev = (logits.float() / temperature[:, None] - torch.log(-torch.log(u))).argmax(-1)
        draft_tokens[:, i] = prev


def compile_loop(loop: Callable[..., None], **how: Any) -> Callable[..., None]:
    # A graph for each shape: what a server that captures batch sizes runs.
    torch._dynamo.reset()
    return torch.compile(loop, fullgraph=True, dynamic=False, **how)


def outputs(loop: Callable[..., None], inputs: Inputs) -> tuple[Tensor, Tensor]:
    inputs.logits_cache.fill_(float("nan"))
    inputs.draft_tokens.fill_(-1)
    loop(*inputs.arguments())
    return inputs.draft_tokens.clone(), inputs.logits_cache.clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def bench_shape(vocab: int, rows: int, bandwidth: float) -> dict[str, Any]:
    """Times of all variants in microseconds, kernels a step, and what stock rounding changes."""
    inputs = make_inputs(rows, vocab)
    arguments = inputs.arguments()
    tokens, cache = outputs(draft_loop, inputs)
    floor = STEPS * (vocab * RANK * 2 + 2 * rows * vocab * 2) / bandwidth
    row: dict[str, Any] = {"V": vocab, "B": rows, "floor": floor}
    row["eager"] = replay_us(lambda: draft_loop(*arguments))

    stock = compile_loop(draft_loop)
    _, stock_cache = outputs(stock, inputs)
    # After a token that differs, the rest of the row differs for that reason: count the first step.
    changed = (stock_cache[:, 0] != cache[:, 0]).float().mean().item()
    row["stock logits changed"] = changed
    row["stock"] = replay_us(lambda: stock(*arguments))

    plain = compile_loop(plain_loop)
    row["plain"] = replay_us(lambda: plain(*arguments))

    fused = compile_loop(draft_loop, backend="dspark")
    fused_tokens, fused_cache = outputs(fused, inputs)
    if not (torch.equal(fused_tokens, tokens) and same_bits(fused_cache, cache)):
        sys.exit(
            f"V={vocab} B={rows}: ids or cache of the fused loop differ from eager's: no figure"
        )
    row["dspark"] = replay_us(lambda: fused(*arguments))
    return row


def count_kernels(vocab: int, rows: int) -> dict[str, list[str]]:
    """Names of the kernels of one loop, for each variant."""
    arguments = make_inputs(rows, vocab).arguments()
    loops = {
        "eager": draft_loop,
        "stock": compile_loop(draft_loop),
        "dspark": compile_loop(draft_loop, backend="dspark"),
    }
    # Two loops of one function do not share compiled code: each wrapper has its own backend.
    return {name: kernels(lambda: loop(*arguments)) for name, loop in loops.items()}  # noqa: B023


def bench_parts() -> dict[str, float]:
    """Single ops at one row (and fp64 at 32), 20 of them in a graph, microseconds each."""
    times: dict[str, float] = {}
    for vocab, rows in ((151936, 1), (248320, 1), (151936, 32), (248320, 32)):
        inputs = make_inputs(rows, vocab)
        bias = torch.randn(rows, vocab, device="cuda").bfloat16()

        def sample(use_fp64: bool, inputs: Inputs = inputs, bias: Tensor = bias) -> None:
            for i in range(20):
                column = i % STEPS
                dspark_ops.gumbel_sample(
                    inputs.base[:, column],
                    inputs.idx_mapping[:, column],
                    inputs.temperature,
                    inputs.seeds,
                    inputs.pos[:, column],
                    bias=bias,
                    logits_cache=inputs.logits_cache,
                    cache_col=column,
                    is_drafting=True,
                    use_fp64=use_fp64,
                )

        maxima = dspark_ops.gumbel_block_argmax(
            inputs.base[:, 0],
            inputs.idx_mapping[:, 0],
            inputs.temperature,
            inputs.seeds,
            inputs.pos[:, 0],
        )
        times[f"gumbel_sample V {vocab} B {rows}"] = replay_us(lambda: sample(False)) / 20
        times[f"gumbel_sample fp64 V {vocab} B {rows}"] = replay_us(lambda: sample(True)) / 20

        def combine(maxima: tuple[Tensor, Tensor] = maxima) -> None:
            for _ in range(20):
                dspark_ops.gumbel_combine(*maxima)

        times[f"gumbel_combine V {vocab} B {rows}"] = replay_us(combine) / 20
    return times


def bench_host() -> dict[str, float]:
    """Host microseconds of one eager call, of its two bare launches, and of a compiled step."""
    module = importlib.import_module("dspark_ops.gumbel_sample")
    inputs = make_inputs(1, 151936)
    bias = torch.randn(1, 151936, device="cuda").bfloat16()
    column = [x[:, 0] for x in (inputs.base, inputs.idx_mapping, inputs.pos, inputs.draft_tokens)]
    base, idx_mapping, pos, draft_tokens = column

    def call() -> None:
        dspark_ops.gumbel_sample(
            base,
            idx_mapping,
            inputs.temperature,
            inputs.seeds,
            pos,
            bias=bias,
            logits_cache=inputs.logits_cache,
            cache_col=0,
            is_drafting=True,
            draft_tokens=draft_tokens,
        )

    def step(base: Tensor, bias: Tensor, cache: Tensor, *rest: Tensor) -> Tensor:
        block_max, block_argmax = dspark_ops.gumbel_block_argmax(
            base + bias, *rest, logits_cache=cache, cache_col=0, is_drafting=True
        )
        return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)

    op_arguments = (
        base, idx_mapping, inputs.temperature, inputs.seeds, pos, inputs.logits_cache, 0, None,
        draft_tokens, bias, 0, True,
    )  # fmt: skip
    inner = (base, bias, inputs.logits_cache, idx_mapping, inputs.temperature, inputs.seeds, pos)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="dspark", fullgraph=True)
    # The same inputs, one small kernel: what torch itself takes for a call of compiled code.
    trivial = torch.compile(lambda x, *rest: x[:, 0] + rest[0][:, 0], fullgraph=True)

    launches: list[tuple[Any, ...]] = []
    launch = module.launch

    def recording(*launched: Any) -> Any:
        launches.append(launched)
        return launch(*launched)

    call()
    module.launch = recording
    call()
    module.launch = launch

    def bare() -> None:
        for launched in launches:
            launch(*launched)

    fns = {
        "eager gumbel_sample": call,
        "the op as compiled code calls it": lambda: (
            torch.ops.dspark.gumbel_sample_cache_draft.default(*op_arguments)
        ),
        "its two bare launches": bare,
        "compiled step": lambda: compiled(*inner),
        "compiled trivial kernel, same inputs": lambda: trivial(*inner),
    }
    with torch.no_grad():
        return {f"host us: {name}": best for name, best in host_us(fns).items()}


def bench_compile() -> dict[str, float]:
    """Seconds of one compile of the loop and milliseconds of it inside the passes."""
    passes = inductor_passes.DsparkPasses
    original = passes.__call__
    spent = 0.0

    def timed(self: Any, graph: torch.fx.Graph) -> None:
        nonlocal spent
        start = time.perf_counter()
        original(self, graph)
        spent += time.perf_counter() - start

    inputs = make_inputs(2, 4096)
    torch._dynamo.reset()
    passes.__call__ = timed  # type: ignore[method-assign]
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            start = time.perf_counter()
            torch.compile(draft_loop, backend="dspark", fullgraph=True)(*inputs.arguments())
            total = time.perf_counter() - start
    finally:
        passes.__call__ = original  # type: ignore[method-assign]
    return {"compile s": total, "passes ms": spent * 1e3, "share %": spent / total * 100}


def main() -> None:
    parser = argparse.ArgumentParser(description="time the Markov loop of a draft step")
    parser.add_argument("--json", type=Path, help="write all figures there as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU: torch.cuda.is_available() is False")
    torch.set_grad_enabled(False)
    bandwidth = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy bandwidth {bandwidth / 1e6:.2f} TB/s")
    host = bench_host()
    parts = bench_parts()
    print("us a loop of 7 steps, CUDA-graph replay, median of 200")
    print("     V    B   floor  plain, stock  eager unfused  stock unfused   dspark  stock changes")
    rows = []
    for vocab, batch in SHAPES:
        row = bench_shape(vocab, batch, bandwidth)
        rows.append(row)
        print(
            f"{vocab:6d} {batch:4d} {row['floor']:7.0f} {row['plain']:13.0f} {row['eager']:14.0f} "
            f"{row['stock']:14.0f} {row['dspark']:8.1f} {row['stock logits changed']:13.2%}",
            flush=True,
        )
    compiling = bench_compile()
    launched = count_kernels(151936, 8)
    for name, names in launched.items():
        print(f"kernels a step, B 8, {name}: {len(names) / STEPS:.1f}")
    for part in (parts, host, compiling):
        for name, value in part.items():
            print(f"{name:52s} {value:8.2f}")
    result = {"rows": rows, "parts": parts, "host": host, "compile": compiling, "kernels": launched}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
