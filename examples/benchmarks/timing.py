"""Times of GPU work: medians of graph replays, kernels by the profiler, host time by the clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def capture(fn: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of ``fn``, warmed up on a side stream first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


def replay_us(fn: Callable[[], Any], replays: int = 200) -> float:
    """Median time of one graph replay of ``fn``, in microseconds."""
    graph = capture(fn)
    # The clocks fall while the host compiles: replay until they are up again.
    start = time.perf_counter()
    while time.perf_counter() - start < 0.2:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def kernels(fn: Callable[[], Any]) -> list[str]:
    """Names of the kernels of one call of ``fn``, memsets and copies aside.

    Launches stay slower after a profiler has run in the process: time first.
    """
    fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memset", "Memcpy"))
    ]


def host_us(
    fns: dict[str, Callable[[], Any]], calls: int = 300, rounds: int = 40
) -> dict[str, float]:
    """Best mean host time of ``calls`` calls in a row of each of ``fns``, in us.

    The GPU is idle before each round. The rounds of all ``fns`` alternate: a host has slow spells
    of seconds, in which everything takes up to twice as long.
    """
    best = dict.fromkeys(fns, float("inf"))
    for _ in range(rounds):
        for name, fn in fns.items():
            fn()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            best[name] = min(best[name], (time.perf_counter() - start) / calls * 1e6)
    return best


def copy_bytes_per_us(num_bytes: int = 1 << 32) -> float:
    """Bytes read and written by a device-to-device copy, per microsecond."""
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device="cuda").normal_()
    target: Tensor = torch.empty_like(source)
    times = []
    # Not in a graph: there the copy engine does it, at two thirds of the speed.
    for _ in range(50):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return 2 * num_bytes / statistics.median(times)
