"""What every sampler's call has: its arguments in a schema, their checks, the key's offset."""

from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops.noise import DRAFT_POSITION_OFFSET
from dspark_ops.rows import Rows, rows_ref

# No keyword-only arguments: the dispatcher takes 3.6 us for 14 positional ones, 6.4 us by keyword.
SAMPLER_ARGS = "Tensor logits, Tensor idx_mapping, Tensor temperature, Tensor seeds, Tensor pos"
CACHE_ARGS = ", Tensor(a!) logits_cache, SymInt cache_col, Tensor? cache_cols"
FLAG_ARGS = (
    ", SymInt pos_offset=0, bool is_drafting=False, bool apply_temperature=True"
    ", bool use_fp64=False"
)


def key_offset(pos_offset: int, is_drafting: bool) -> int:
    """What is added to ``pos`` for the noise key, as the int32 with the same low word."""
    offset = pos_offset + DRAFT_POSITION_OFFSET if is_drafting else pos_offset
    if -0x80000000 <= offset <= 0x7FFFFFFF:
        return offset
    return (offset + 0x80000000 & 0xFFFFFFFF) - 0x80000000


def rows_and_cache_ref(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None,
    cache_col: int,
    cache_cols: Tensor | None,
    key_offset: int,
) -> Rows:
    """The rows' state, and ``logits`` in the cache at each live row whose column exists."""
    if logits_cache is None:
        return rows_ref(idx_mapping, temperature, seeds, pos, key_offset, None)
    if cache_cols is None:
        cols = torch.full_like(idx_mapping, cache_col, dtype=torch.int64)
    else:
        cols = cache_cols.long().expand(idx_mapping.shape)
    rows = rows_ref(idx_mapping, temperature, seeds, pos, key_offset, cols)
    written = rows.live & (cols >= 0) & (cols < logits_cache.shape[1])
    window = logits_cache[..., : logits.shape[1]]
    window[rows.slot[written], cols[written]] = logits[written]
    return rows


def check_sampler(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    logits_cache: Tensor | None,
    cache_col: int,
    cache_cols: Tensor | None,
    sampled_dtype: torch.dtype,
    num_columns: int | torch.SymInt | None = None,
) -> None:
    """Metadata of the arguments that every sampler has.

    What is cached is of ``sampled_dtype`` and has ``num_columns`` columns, by default V.
    """
    device = logits.device
    num_rows, vocab = logits.shape
    _checks.check_row_ints("idx_mapping", idx_mapping, num_rows, device)
    _checks.check_row_ints("pos", pos, num_rows, device)
    _checks.check_request_state(temperature, seeds, device)
    if logits_cache is not None:
        columns: Any = vocab if num_columns is None else num_columns
        _checks.check_cache(logits_cache, temperature.shape[0], columns, sampled_dtype, device)
        _checks.check_cache_col(cache_col, cache_cols, num_rows, device)


def row_arguments(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An op's first arguments; refuses what the dispatcher would refuse in words of its own."""
    if not (
        isinstance(logits, Tensor)
        and isinstance(idx_mapping, Tensor)
        and isinstance(temperature, Tensor)
        and isinstance(seeds, Tensor)
        and isinstance(pos, Tensor)
    ):
        _checks.check_is_tensor("logits", logits)
        _checks.check_is_tensor("idx_mapping", idx_mapping)
        _checks.check_is_tensor("temperature", temperature)
        _checks.check_is_tensor("seeds", seeds)
        _checks.check_is_tensor("pos", pos)
    return logits, idx_mapping, temperature, seeds, pos


def cache_arguments(
    logits_cache: Tensor | None, cache_col: int | Tensor | None
) -> tuple[()] | tuple[Tensor, int, Tensor | None]:
    """(logits_cache, cache_col, cache_cols) of an op, () if there is no cache."""
    if logits_cache is None and cache_col is None:
        return ()
    if logits_cache is None:
        raise ValueError(
            f"logits_cache must be given with cache_col; got None and cache_col={cache_col!r}"
        )
    if cache_col is None:
        raise ValueError("cache_col must be given with logits_cache: the column to write; got None")
    _checks.check_is_tensor("logits_cache", logits_cache)
    if isinstance(cache_col, Tensor):
        return logits_cache, 0, cache_col
    if type(cache_col) is not int:
        return logits_cache, _checks.as_int("cache_col", cache_col), None
    return logits_cache, cache_col, None


def checked_offset(pos_offset: Any, is_drafting: Any, apply_temperature: Any, use_fp64: Any) -> Any:
    """``pos_offset`` as an int. Called where the types are not just int and bool."""
    _checks.check_is_bool("is_drafting", is_drafting)
    _checks.check_is_bool("apply_temperature", apply_temperature)
    _checks.check_is_bool("use_fp64", use_fp64)
    return _checks.as_int("pos_offset", pos_offset)
