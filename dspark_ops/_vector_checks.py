"""Checks of the one-dimensional tensors of a batch: what is per row, per slot or per token.

As in ``_checks.py``, each error names the argument, its value and what to do, in the same words
from the launcher, the CPU implementation and the fake implementation.
"""

import torch
from torch import Tensor

from dspark_ops import _checks

MAX_INT32 = 2**31 - 1


def check_vector(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    letters: str,
    size: int | torch.SymInt | None,
    where: str,
    device: torch.device,
) -> None:
    """``x`` is [``size``], any if None, on ``device``, which is that of the argument ``where``."""
    if x.dtype not in dtypes:
        _checks.check_dtype(name, x, dtypes)
    if x.dim() != 1 or (size is not None and x.shape[0] != size):
        wanted = letters if size is None else f"{letters} = [{size}]"
        raise ValueError(f"{name} must have shape {wanted}; got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where {where} is; got {x.device}")


def check_entries_differ(name: str, x: Tensor) -> None:
    """The entries of a tensor that is written in parallel lie at addresses of their own."""
    if not x.is_contiguous() and x.stride(0) == 0 and x.shape[0] > 1:
        raise ValueError(
            f"{name} must have an address for each entry; got strides {tuple(x.stride())} for "
            f"shape {tuple(x.shape)}; pass a buffer that is not expanded"
        )
