"""How kernels are launched: on the tensors' device, and overlapped with the kernel before.

With programmatic dependent launch (Hopper and newer) a kernel's start overlaps the end of the one
before it; the kernel waits for its inputs itself (``gdc_wait``). H200, loop of 7 steps in graph
replay: 216.8 to 204.4 us at B = 1, 263.1 to 253.1 at B = 8 (tile 1024, 4 warps).
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _has_dependent_launch(device_index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device_index) >= (9, 0)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Keywords for a launch on the device of ``x``: LAUNCH_PDL and the option that goes with it."""
    if x.is_cuda and _has_dependent_launch(x.get_device()):
        return {"LAUNCH_PDL": True, "launch_pdl": True}
    return {"LAUNCH_PDL": False}


_HERE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make that the device of ``x``."""
    index = x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(index)


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], options: dict[str, Any] | None
) -> Any:
    """Launch with ``args`` in the order of the kernel's parameters; return what to launch next.

    With ``options`` the kernel is a jitted function, which looks its variant up by the arguments,
    27 us for 30 of them, and returns it; a compiled variant, without options, is launched as is.
    Triton's interpreter returns None: there is nothing to keep.
    """
    if options is None:
        kernel[grid](*args)
        return kernel
    return kernel[grid](*args, **options)
