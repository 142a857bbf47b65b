"""Metadata checks that ops share. Each error names the argument, its value and what to do.

They run in the kernel's launcher, in the CPU implementation and in the fake implementation, so that
eager and compiled calls refuse the same calls in the same words, before anything is written.
"""

import operator
from typing import Any

import torch
from torch import Tensor

LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_COL = 2**31 - 1
MAX_VOCAB = 2**30  # offsets of a tile past the end stay in int32
ID_DTYPES = (torch.int32, torch.int64)  # narrower ones would wrap an id
INDEX_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_is_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}: {value!r}")


def _got(name: str, value: Any, kind: str) -> str:
    got = f"got {type(value).__name__}"
    if not hasattr(value, "dtype"):
        return f"{got}: {value!r}"
    if torch.compiler.is_compiling():  # a graph takes it as data
        return f"{got} of no known value; pass {kind}({name}) into the compiled code"
    return f"{got}: {value!r}; pass {kind}({name})"


def check_is_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool | torch.SymBool):
        raise TypeError(f"{name} must be True or False, {_got(name, value, 'bool')}")


def as_int(name: str, value: Any) -> Any:
    """What has an ``__index__`` as an int; a SymInt stays one.

    Refused are a bool, a Tensor, which would wait for its device, and, while code is compiled, a
    NumPy number, which is a tensor there.
    """
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value
    is_data = torch.compiler.is_compiling() and hasattr(value, "dtype")
    if not is_data and not isinstance(value, bool | Tensor):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int, {_got(name, value, 'int')}")


def check_dtype(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must have dtype {allowed}; got {x.dtype}")


def check_last_stride(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
        raise ValueError(
            f"{name} must be contiguous in its last dimension; got strides {tuple(x.stride())} for "
            f"shape {tuple(x.shape)}; call .contiguous() on it"
        )


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where logits are; got {x.device}")


def check_row_ints(name: str, x: Tensor, num_rows: int, device: torch.device) -> None:
    """``x`` is int [B], any stride."""
    check_dtype(name, x, INDEX_DTYPES)
    if x.dim() != 1 or x.shape[0] != num_rows:
        raise ValueError(
            f"{name} must have shape [B] = [{num_rows}], a row of logits each; got {tuple(x.shape)}"
        )
    check_device(name, x, device)


def check_logits(logits: Tensor, name: str = "logits") -> None:
    check_dtype(name, logits, LOGITS_DTYPES)
    if logits.dim() != 2:
        raise ValueError(f"{name} must have shape [B, V]; got {tuple(logits.shape)}")
    vocab = logits.shape[1]
    if vocab < 1 or vocab > MAX_VOCAB:
        raise ValueError(f"{name} must have 1 <= V <= 2^30 columns; got {tuple(logits.shape)}")
    check_last_stride(name, logits)


def check_request_state(temperature: Tensor, seeds: Tensor, device: torch.device) -> None:
    """``temperature`` is f32 [S] and ``seeds`` i64 [S], both contiguous."""
    for name, x, dtype in (
        ("temperature", temperature, torch.float32),
        ("seeds", seeds, torch.int64),
    ):
        check_dtype(name, x, (dtype,))
        if x.dim() != 1:
            raise ValueError(f"{name} must have shape [S]; got {tuple(x.shape)}")
        check_device(name, x, device)
        check_last_stride(name, x)
    if seeds.shape[0] != temperature.shape[0]:
        raise ValueError(
            f"seeds must have the shape [S] of temperature, {tuple(temperature.shape)}; "
            f"got {tuple(seeds.shape)}"
        )


def check_cache(
    logits_cache: Tensor, num_slots: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    """``logits_cache`` is [S, C, >= V] of the dtype that is sampled from."""
    if logits_cache.dtype != dtype:
        raise ValueError(
            f"logits_cache must have the dtype of the logits that are sampled, {dtype}: what is "
            f"cached must be what was sampled, bit for bit; got {logits_cache.dtype}"
        )
    if (
        logits_cache.dim() != 3
        or logits_cache.shape[0] != num_slots
        or logits_cache.shape[2] < vocab
    ):
        raise ValueError(
            f"logits_cache must have shape [S, C, >= V] = [{num_slots}, C, >= {vocab}]; "
            f"got {tuple(logits_cache.shape)}"
        )
    check_device("logits_cache", logits_cache, device)
    check_last_stride("logits_cache", logits_cache)


def check_cache_col(
    cache_col: int, cols: Tensor | None, num_rows: int, device: torch.device
) -> None:
    """The column is an int, or ``cols`` if that is an int tensor, 0-d or [B]."""
    if cols is None:
        if not 0 <= cache_col <= MAX_COL:
            raise ValueError(f"cache_col must be in [0, 2^31); got {cache_col}")
    elif cols.dim() == 0:
        check_dtype("cache_col", cols, INDEX_DTYPES)
        check_device("cache_col", cols, device)
    else:
        check_row_ints("cache_col", cols, num_rows, device)
