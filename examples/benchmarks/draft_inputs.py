"""Time what comes before the draft's forward: positions with padding, and its inputs.

    python examples/benchmarks/draft_inputs.py

Medians of CUDA-graph replays; variants that are compared alternate, replay by replay. Each result
is compared with the CPU implementation before it is timed. B rows of a batch, T tokens of a buffer.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import capture, kernels
from torch import Tensor

import dspark_ops

STEPS = 7
BUFFERS = ((256, 8192), (1024, 16384), (1024, 65536))  # rows, tokens
ROWS = (1, 64, 256)
CALLS = 20  # in one graph: the start of a replay is not the op's


def alternating_us(fns: dict[str, Callable[[], Any]], replays: int = 300) -> dict[str, float]:
    """Median microseconds of one call of each of ``fns``, captured ``CALLS`` times in a graph."""

    def repeat(fn: Callable[[], Any]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(CALLS):
                fn()

        return calls

    graphs = {name: capture(repeat(fn)) for name, fn in fns.items()}
    times: dict[str, list[float]] = {name: [] for name in fns}
    warm_until = time.perf_counter() + 0.2
    while time.perf_counter() < warm_until:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    for _ in range(replays):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(seen) for name, seen in times.items()}


def position_buffers(rows: int, tokens: int, span: int) -> dict[str, Tensor]:
    """A batch of ``rows`` requests with ``span`` tokens each."""
    slots = rows + 8
    return {
        "idx_mapping": torch.randperm(slots, device="cuda")[:rows].int(),
        "query_start_loc": torch.arange(rows + 1, device="cuda", dtype=torch.int32) * span,
        "num_computed_tokens": torch.randint(0, 9000, (slots,), device="cuda", dtype=torch.int32),
        "positions": torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        "seq_lens": torch.zeros(max(rows, 256), dtype=torch.int32, device="cuda"),
    }


def bench_positions(rows: int, tokens: int, span: int) -> tuple[dict[str, float], dict[str, int]]:
    """Microseconds and launches of the positions alone, with padding, and with two fills."""
    buffers = position_buffers(rows, tokens, span)
    is_padding = torch.zeros(tokens, dtype=torch.bool, device="cuda")
    num_tokens = rows * span

    def two_fills() -> None:
        is_padding[:num_tokens].fill_(False)
        is_padding[num_tokens:].fill_(True)
        dspark_ops.prepare_positions(**buffers)

    def fused() -> None:
        dspark_ops.prepare_positions(**buffers, is_padding=is_padding, num_tokens=num_tokens)

    fns = {
        "positions alone": lambda: dspark_ops.prepare_positions(**buffers),
        "with is_padding": fused,
        "with two fill_": two_fills,
    }
    left = {}
    for name in ("with two fill_", "with is_padding"):
        is_padding.fill_(True)
        is_padding[num_tokens:] = False
        fns[name]()
        left[name] = is_padding.clone()
    if not torch.equal(*left.values()):
        sys.exit("is_padding differs from the two fills")
    times = alternating_us(fns)
    return times, {name: len(kernels(fn)) for name, fn in fns.items()}


def dflash_buffers(rows: int, max_rows: int, max_tokens: int) -> dict[str, Any]:
    """A decode batch: each of ``rows`` requests verified ``STEPS + 1`` tokens, some rejected."""
    generator = torch.Generator("cuda").manual_seed(rows + max_tokens)

    def ints(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(0, high, shape, device="cuda", generator=generator, dtype=dtype)

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, device="cuda", dtype=dtype)

    span = STEPS + 1
    targets = rows * span
    first = ints(30000, rows, dtype=torch.int64)
    offsets = torch.arange(span, device="cuda")
    samples = max_rows * STEPS
    return {
        "target_positions": (first[:, None] + offsets).flatten(),
        "target_query_start_loc": torch.arange(rows + 1, device="cuda", dtype=torch.int32) * span,
        "idx_mapping": torch.randperm(max_rows, device="cuda", generator=generator)[:rows].int(),
        "last_sampled": ints(151936, max_rows, dtype=torch.int64),
        "next_prefill_tokens": ints(151936, max_rows),
        "num_sampled": ints(3, rows),
        "num_rejected": ints(span, rows),
        "temperature": torch.rand(max_rows, device="cuda", generator=generator),
        "seeds": ints(2**31, max_rows, dtype=torch.int64),
        "block_table": ints(60000, rows, 2048) + 1,
        "input_ids": zeros(max_tokens, dtype=torch.int32),
        "positions": zeros(max_tokens, dtype=torch.int64),
        "is_padding": zeros(max_tokens, dtype=torch.bool),
        "query_slot_mapping": zeros(max_tokens, dtype=torch.int64),
        "query_start_loc": zeros(max_rows + 1, dtype=torch.int32),
        "seq_lens": zeros(max_rows, dtype=torch.int32),
        "context_positions": zeros(max(max_tokens, targets), dtype=torch.int64),
        "context_slot_mapping": zeros(max(max_tokens, targets), dtype=torch.int64),
        "sample_indices": zeros(samples, dtype=torch.int64),
        "sample_pos": zeros(samples, dtype=torch.int64),
        "sample_idx_mapping": zeros(samples, dtype=torch.int64),
        "out_temperature": zeros(max_rows, dtype=torch.float32),
        "out_seeds": zeros(max_rows, dtype=torch.int64),
        "max_target_query_len": span,
        "mask_token_id": 151935,
        "block_size": 16,
        "num_query_per_req": STEPS,
        "num_steps": STEPS,
        "max_model_len": 32768,
        "sample_from_anchor": True,
    }


def bench_dflash_inputs(max_rows: int, max_tokens: int) -> dict[str, float]:
    """Microseconds by the number of rows, as names."""
    fns = {}
    for rows in ROWS:
        buffers = dflash_buffers(rows, max_rows, max_tokens)
        on_cpu = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in buffers.items()}
        dspark_ops.prepare_dflash_inputs(**on_cpu)
        dspark_ops.prepare_dflash_inputs(**buffers)
        for name, x in buffers.items():
            if isinstance(x, Tensor) and not torch.equal(x.cpu(), on_cpu[name]):
                sys.exit(f"{name} differs from the CPU implementation, B = {rows}")
        fns[f"B {rows}"] = lambda buffers=buffers: dspark_ops.prepare_dflash_inputs(**buffers)
    return alternating_us(fns)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU: torch.cuda.is_available() is False")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us, CUDA-graph replay")
    for rows, tokens, span in ((1, 8192, 8), (64, 8192, 8), (256, 8192, 8), (4, 65536, 2048)):
        times, launched = bench_positions(rows, tokens, span)
        alone = times["positions alone"]
        print(f"prepare_positions, B {rows}, {span} tokens each, T {tokens}")
        for name, us in times.items():
            print(f"    {name:16s} {us:6.2f} ({us / alone:4.2f} x), {launched[name]} launches")
    for max_rows, max_tokens in BUFFERS:
        times = bench_dflash_inputs(max_rows, max_tokens)
        text = ", ".join(f"{name} {us:.2f}" for name, us in times.items())
        print(f"prepare_dflash_inputs, buffers {max_rows}/{max_tokens}: {text}", flush=True)


if __name__ == "__main__":
    main()
