"""Registration of the ``dspark`` ops: one ``Library.define`` and ``impl`` each.

``define`` + ``impl`` cost about 4 us a call where ``custom_op`` costs 17 to 36. The ops are
opaque, so that a pass can recognise them, and tagged ``needs_fixed_stride_order``: kernels take
row strides, so Inductor may pad a row but must not transpose it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A Library that is collected takes its ops with it, so it lives as long as the module.
LIBRARY = torch.library.Library("dspark", "FRAGMENT")
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)


def register(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Define ``dspark::<schema>`` with its CPU, GPU and fake implementations.

    The variants of an op share their implementations. ``cpu`` and ``fake`` get their arguments by
    name; ``cuda``, where host time counts, by position, its parameters being in the schema's order.
    Sampling has no gradient: the Autograd key falls through, so outputs never require one.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=_TAGS)
    names = [a.name for a in getattr(torch.ops.dspark, name).default._schema.arguments]
    LIBRARY.impl(name, torch.no_grad()(_by_name(cpu, names)), "CPU")
    LIBRARY.impl(name, _by_position(cuda, names), "CUDA")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"dspark::{name}", _by_name(fake, names), lib=LIBRARY)


# The dispatcher leaves out trailing arguments that equal their defaults.


def _by_name(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**dict(zip(names, args, strict=False)), **kwargs)

    return call


def _by_position(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters.values())
    absent = [(i, p.default) for i, p in enumerate(parameters) if p.name not in names]
    if [p.name for p in parameters if p.name in names] != names:
        raise AssertionError(f"{function.__name__} does not take {names} in this order")

    def call(*args: Any, **kwargs: Any) -> Any:
        filled = list(args)
        for position, default in absent:
            filled.insert(position, default)
        return function(*filled, **kwargs)

    return call if absent else function


def is_plain_gpu_call(x: Tensor) -> bool:
    """Whether no compiler, mode, transform or subclass would look at an op called on ``x``.

    Such a call may go straight to the launcher: the dispatcher's way to a Python kernel and back
    costs 10 us for 14 arguments.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.is_cuda
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
    )
