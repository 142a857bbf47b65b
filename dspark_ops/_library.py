"""Registration of the ``dspark`` ops: one ``Library.define`` and ``impl`` each.

``define`` + ``impl`` cost about 4 us a call where ``custom_op`` costs 17 to 36. The ops are
opaque, so that a pass can recognise them, and tagged ``needs_fixed_stride_order``: kernels take
row strides, so Inductor may pad a row but must not transpose it.
"""

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

    The variants of an op share their implementations, which get every argument by its name.
    Sampling has no gradient: the Autograd key falls through, so outputs never require one.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=_TAGS)
    names = [a.name for a in getattr(torch.ops.dspark, name).default._schema.arguments]

    def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # The dispatcher leaves out trailing arguments that equal their defaults.
            return function(**dict(zip(names, args, strict=False)), **kwargs)

        return call

    LIBRARY.impl(name, by_name(cpu), "CPU")
    LIBRARY.impl(name, by_name(cuda), "CUDA")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"dspark::{name}", by_name(fake), lib=LIBRARY)


def is_plain_gpu_call(x: Tensor) -> bool:
    """Whether nothing would look at an op called on ``x``: no compiler, mode, transform or
    subclass.

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
