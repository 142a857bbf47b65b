"""How kernels are launched: on the tensors' device, and overlapped with the kernel before.

With programmatic dependent launch (Hopper and newer) a kernel's start overlaps the end of the one
before it; the kernel waits for its inputs itself (``gdc_wait``). H200, loop of 7 steps in graph
replay: 216.8 to 204.4 us at B = 1, 263.1 to 253.1 at B = 8 (tile 1024, 4 warps).
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dspark_ops._triton import tl, triton


@functools.cache
def _has_dependent_launch(device_index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (9, 0)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Keywords for a launch on the device of ``x``: LAUNCH_PDL and the option that goes with it."""
    if x.is_cuda and _has_dependent_launch(x.get_device()):
        return {"LAUNCH_PDL": True, "launch_pdl": True}
    return {"LAUNCH_PDL": False}


# What Inductor's generated code allocates with: 1.0 us where ``new_empty`` takes 2.0.
_empty_strided = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def empty_ids(num: int, like: Tensor) -> Tensor:
    """Uninitialised i64 [num] on the device of ``like``, which must be the current one."""
    # Deterministic mode promises that memory is filled.
    if _empty_strided is None or not like.is_cuda or torch.are_deterministic_algorithms_enabled():
        return like.new_empty(num, dtype=torch.int64)
    empty: Tensor = _empty_strided((num,), (1,), torch.int64)
    return empty


_HERE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make that the device of ``x``."""
    index = x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(index)


def is_aligned(*values: int) -> bool:
    """Whether rows can be read in vectors: addresses, strides and V, all divisible by 16."""
    bits = 0
    for value in values:
        bits |= value
    return bits % 16 == 0


def unaligned(kernel: Any) -> Any:
    """``kernel`` compiled without a look at any address, stride or size.

    Triton compiles a variant for each combination of arguments that are divisible by 16 and of
    arguments that are not: 10,000 random batches met 1477 of the kernels of all ops but
    top_k_top_p_. A launcher takes ``kernel`` itself only where all rows are aligned, and this one
    elsewhere: of those there are 91 then.
    """
    function = getattr(kernel, "fn", None)
    if function is None:  # Triton is not installed
        return kernel
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


# What a thread does with its launches instead (kernel, options, grid, positional and named
# arguments), by the thread's id: ``warmup`` compiles while other threads serve.
_INSTEAD: dict[int, Callable[..., None]] = {}


@contextlib.contextmanager
def launching_instead(do: Callable[..., None]) -> Iterator[None]:
    """This thread's launches call ``do`` and launch nothing."""
    thread = threading.get_ident()
    _INSTEAD[thread] = do
    try:
        yield
    finally:
        del _INSTEAD[thread]


def launch(
    variant: Any,
    kernel: Any,
    options: dict[str, Any],
    grid: tuple[int, int, int],
    *args: Any,
    **named: Any,
) -> Any:
    """Launch with ``args`` in the order of the kernel's parameters; return the compiled variant.

    ``variant`` is what an earlier launch of the same kind returned, or None: then the jitted
    ``kernel`` looks it up by the arguments, 27 us for 30 of them, and some may be ``named``.
    Triton's interpreter returns None: there is nothing to keep.
    """
    if _INSTEAD and threading.get_ident() in _INSTEAD:
        _INSTEAD[threading.get_ident()](kernel, options, grid, args, named)
        return None
    if variant is None:
        variant = kernel[grid](*args, **named, **options)
        # While another thread compiles in parallel Triton answers with a future, which launches
        # nothing.
        return variant.result() if hasattr(type(variant), "result") else variant
    variant[grid](*args)
    return variant
