"""warmup: compile every kernel variant that a server can meet, before it serves.

Triton compiles a kernel at its first launch with arguments of new kinds, which takes a request
seconds. Ops list calls that cover all kinds (``serving_calls``). These are made twice: first each
launch only has its variant compiled, many at a time where Triton can; then they run, which loads
the variants onto the GPU and fills what the launchers keep.
"""

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from dspark_ops import _checks
from dspark_ops._launch import launching_instead
from dspark_ops._serving import Call, NotWarmed, Serving
from dspark_ops._triton import require_triton, triton
from dspark_ops._vector_checks import MAX_INT32
from dspark_ops.rejection_sample import MAX_STEPS

# Modules of the package with ``serving_calls``.
OPS = (
    "gumbel_block_argmax",
    "gumbel_combine",
    "gumbel_sample",
    "health",
    "prepare_dflash_inputs",
    "prepare_positions",
    "rejection_sample",
    "top_k_top_p",
)


class Warmup(NamedTuple):
    """What ``warmup`` did. ``str`` of it is a table."""

    serving: Serving
    variants: dict[str, dict[str, int]]  # of each kernel of each op
    not_warmed: dict[str, str]  # ops without, and what to do
    seconds: float

    @property
    def num_variants(self) -> int:
        return sum(sum(kernels.values()) for kernels in self.variants.values())

    def __str__(self) -> str:
        lines = [f"{'op':<23}{'variants':<10}kernels"]
        for op, kernels in self.variants.items():
            names = ", ".join(f"{name.strip('_')} {n}" for name, n in kernels.items())
            lines.append(f"{op:<23}{sum(kernels.values()):<10}{names}")
        for op, reason in self.not_warmed.items():
            lines.append(f"{op:<23}{'none':<10}not warmed: {reason}")
        lines.append(f"{'in all':<23}{self.num_variants:<10}{self.seconds:.1f} s")
        return "\n".join(lines)


def warmup(
    vocab_size: int | tuple[int, ...],
    num_steps: int,
    *,
    device: torch.device | str | int = "cuda",
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.bfloat16,
    target_dtype: torch.dtype | tuple[torch.dtype, ...] = torch.float32,
    index_dtype: torch.dtype | tuple[torch.dtype, ...] = torch.int32,
    pos_dtype: torch.dtype | tuple[torch.dtype, ...] = torch.int64,
    id_dtype: torch.dtype | tuple[torch.dtype, ...] = torch.int64,
    cache_col_dtype: torch.dtype | tuple[torch.dtype, ...] = torch.int64,
    use_fp64: bool = False,
    markov_rank: int | None = None,
    block_size: int | None = None,
    sample_from_anchor: bool = False,
    cp_size: int = 1,
    cp_interleave: int = 1,
    ops: tuple[str, ...] = OPS,
    show_progress: bool | None = None,
) -> Warmup:
    """Compile what the ops may launch while serving, and load it onto the GPU.

    Afterwards no call of theirs compiles in this process, whatever its batch size, strides,
    addresses, optional arguments and values, as long as dtypes and the numbers below are those
    given here and no stride is 2^31 or more. Call it once in each process that serves, before CUDA
    graphs are captured; what was compiled before comes from Triton's cache on disk. Takes a few
    MB of GPU memory while it runs; an open ``health`` context counts its calls.

    Args:
        vocab_size: V; a tuple if there are several, as where the draft has a smaller one.
        num_steps: N, the most draft steps of a round, 1 to 128.
        device: the GPU: "cuda" (the current one), "cuda:1", an index, or a ``torch.device``.
        dtype: of the draft's logits, its bias and its embedding; the cache has that of their sum.
            Here and below: a tuple if there are several, each of which is combined with all others.
        target_dtype: of the target's logits, given to ``rejection_sample``, or to a sampler without
            bias and cache.
        index_dtype: of ``idx_mapping``.
        pos_dtype: of the samplers' and of ``rejection_sample``'s ``pos``.
        id_dtype: of ``draft_tokens``, ``draft_token_ids`` and ``next_prefill_tokens``.
        cache_col_dtype: of ``cache_col`` where it is a tensor; () if it is always an int.
        use_fp64: with ``use_fp64=True`` too.
        markov_rank: R of ``W1`` [V, R], for code compiled with ``backend="dspark"``, where the
            sampler looks the next embedding up; None if there is none.
        block_size, sample_from_anchor, cp_size, cp_interleave: of ``prepare_dflash_inputs``, which
            compiles them in; without ``block_size`` it is not warmed.
        ops: names of those to warm, by default all; "health" is what its context counts with.
        show_progress: a bar on stderr; None: if that is a terminal.

    Returns:
        The number of variants of each kernel, the ops that were not warmed and why, and the time;
        printed, a table.

    Raises:
        TypeError, ValueError: an argument that does not fit.
        RuntimeError: no GPU, where nothing is ever compiled: leave the call out; no Triton, or its
            interpreter; called under capture.
    """
    if not isinstance(ops, tuple):
        raise TypeError(f"ops must be a tuple of names, got {type(ops).__name__}: {ops!r}")
    for op in ops:
        if op not in OPS:
            raise ValueError(f"ops must be of {', '.join(OPS)}; got {op!r}")
    serving = Serving(
        vocab_sizes=_numbers("vocab_size", vocab_size, _checks.MAX_VOCAB),
        num_steps=_number("num_steps", num_steps, MAX_STEPS),
        dtypes=_dtypes("dtype", dtype, _checks.LOGITS_DTYPES),
        target_dtypes=_dtypes("target_dtype", target_dtype, _checks.LOGITS_DTYPES),
        index_dtypes=_dtypes("index_dtype", index_dtype, _checks.INDEX_DTYPES),
        pos_dtypes=_dtypes("pos_dtype", pos_dtype, _checks.INDEX_DTYPES),
        id_dtypes=_dtypes("id_dtype", id_dtype, _checks.ID_DTYPES),
        col_dtypes=_dtypes("cache_col_dtype", cache_col_dtype, _checks.INDEX_DTYPES, True),
        use_fp64=(False, True) if use_fp64 else (False,),
        markov_rank=None if markov_rank is None else _number("markov_rank", markov_rank),
        block_size=None if block_size is None else _number("block_size", block_size),
        sample_from_anchor=bool(sample_from_anchor),
        cp_size=_number("cp_size", cp_size),
        cp_interleave=_number("cp_interleave", cp_interleave),
        device=_gpu(device),
    )
    started = time.perf_counter()
    bar = _Bar(sys.stderr.isatty() if show_progress is None else show_progress)
    with torch.cuda.device(serving.device):
        variants, not_warmed, num_calls = _compile(serving, ops, bar)
        bar.start("loading", num_calls)
        for _, call in _calls(serving, ops, not_warmed):
            call()
            bar.step()
        torch.cuda.synchronize()
    result = Warmup(serving, variants, not_warmed, time.perf_counter() - started)
    bar.end(f"{result.num_variants} kernel variants in {result.seconds:.1f} s")
    return result


def _number(name: str, value: Any, most: int = MAX_INT32) -> int:
    number = int(_checks.as_int(name, value))
    if not 1 <= number <= most:
        raise ValueError(f"{name} must be in [1, {most}]; got {number}")
    return number


def _numbers(name: str, values: Any, most: int) -> tuple[int, ...]:
    if not isinstance(values, tuple):
        return (_number(name, values, most),)
    if not values:
        raise ValueError(f"{name} must be one or more; got ()")
    return tuple(_number(name, value, most) for value in values)


def _dtypes(
    name: str, dtypes: Any, allowed: tuple[torch.dtype, ...], may_be_none: bool = False
) -> tuple[torch.dtype, ...]:
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
    if not dtypes and not may_be_none:
        raise ValueError(f"{name} must be of {names}; got ()")
    for dtype in dtypes:
        if dtype not in allowed:
            raise TypeError(f"{name} must be of {names}; got {dtype!r}")
    return tuple(dict.fromkeys(dtypes))


def _gpu(device: Any) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a device, got {type(device).__name__}: {device!r}")
    if isinstance(device, int) and not 0 <= device < 128:  # torch wraps others
        raise ValueError(f"device must be a CUDA device; got {device}")
    try:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a CUDA device; got {device!r}") from error
    if device.type != "cuda":
        raise ValueError(
            f"device must be a CUDA device: elsewhere nothing is compiled; got {str(device)!r}"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "warmup compiles kernels for a GPU, and torch sees none. On a CPU the ops compile "
            "nothing: call warmup only where torch.cuda.is_available()"
        )
    if not 0 <= (device.index or 0) < torch.cuda.device_count():
        raise RuntimeError(f"no GPU {str(device)!r}: torch sees {torch.cuda.device_count()}")
    require_triton("warmup")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: Triton interprets, and compiles nothing")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warmup launches kernels and must be called before a graph's capture")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _calls(
    serving: Serving, ops: tuple[str, ...], not_warmed: dict[str, str]
) -> Iterator[tuple[str, Call]]:
    for op in ops:
        # By its name: the package has a function of the same one.
        module = importlib.import_module(f"dspark_ops.{op}")
        try:
            for call in module.serving_calls(serving):
                yield op, call
        except NotWarmed as reason:
            not_warmed[op] = str(reason)


def _compile(
    serving: Serving, ops: tuple[str, ...], bar: "_Bar"
) -> tuple[dict[str, dict[str, int]], dict[str, str], int]:
    """Variants of each kernel of each op, ops without calls, and the number of calls."""
    compiled: dict[str, dict[str, dict[int, Any]]] = {}
    kernels: dict[str, dict[int, Any]] = {}
    not_warmed: dict[str, str] = {}
    num_calls = 0

    launched: set[Any] = set()

    def compile_only(kernel: Any, options: Any, grid: Any, args: Any, named: Any) -> None:
        launched.add(kernel)
        # One object, perhaps a future, for each variant; kept, so that its id stays its own.
        variant = kernel.warmup(*args, grid=grid, **named, **options)
        kernels.setdefault(kernel.__name__, {})[id(variant)] = variant

    bar.start("compiling", 0)
    with _in_parallel(bar, launched), launching_instead(compile_only):
        for op, call in _calls(serving, ops, not_warmed):
            kernels = compiled.setdefault(op, {})
            call()
            num_calls += 1
    variants = {
        op: {name: len(found) for name, found in kernels.items()}
        for op, kernels in compiled.items()
    }
    return variants, not_warmed, num_calls


# 91 variants for sm_90 on two cores, Triton 3.7.1: 24.3 s with one thread, 15.1 with two. A part of
# it is Python, for which more threads than these would wait.
MAX_THREADS = 16


@contextlib.contextmanager
def _in_parallel(bar: "_Bar", launched: set[Any]) -> Iterator[None]:
    """Inside, variants are compiled by threads, and all are ready at the end; one by one where
    Triton has no such mode. What fails leaves nothing in the kernels ``launched``."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield
        return

    class Pool(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            bar.total += 1
            future = super().submit(fn, *args, **kwargs)
            future.add_done_callback(lambda _: bar.step())
            return future

    try:
        with Pool(min(os.cpu_count() or 1, MAX_THREADS)) as pool, mode(pool):
            yield
    except BaseException:
        # Triton keeps the mode on, and futures that failed in the place of compiled kernels.
        active = getattr(sys.modules[mode.__module__], "active_mode", None)
        if active is not None:
            active.set(None)
        for kernel in launched:
            getattr(kernel, "device_caches", {}).clear()
        raise


class _Bar:
    WIDTH = 30

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.total = self.done = 0
        self.what = ""
        self._lock = threading.Lock()

    def start(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0

    def step(self) -> None:
        with self._lock:
            self.done += 1
            total = max(self.total, self.done)
            filled = self.WIDTH * self.done // total
            bar = "#" * filled + "-" * (self.WIDTH - filled)
            self._write(f"{self.what:<9} [{bar}] {self.done}/{total}", "")

    def end(self, text: str) -> None:
        self._write(text, "\n")

    def _write(self, text: str, end: str) -> None:
        if self.shown:
            print(f"\rwarmup: {text:<60}", end=end, file=sys.stderr, flush=True)
