"""health: what the samplers met on the device and took without a word, counted by them.

    with dspark_ops.health("cuda") as h:
        ...                                      # eager, compiled or captured calls
    h.read()["gumbel_sample"].nan_rows

While a context is open on a device, each launch of gumbel_block_argmax, gumbel_sample (every
variant) and rejection_sample there has one small kernel before it, which reads what the op will
read and adds to a tensor of counters. No result changes. Without a context an op asks one
dictionary whether it is empty; nothing is launched or allocated and no other kernel is compiled.

The kernel is decided at launch, so compiled code counts too. A capture inside the context takes it
into the graph, whose replays then count, also after the context is left; a graph that was captured
outside never counts. One program walks a row, since this is for finding out, not for always.
"""

import functools
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark_ops._launch import is_aligned, launch, unaligned
from dspark_ops._serving import Call, Serving, request_arguments, sampler_arguments
from dspark_ops._triton import tl, triton
from dspark_ops.rejection_sample_request import first_of, load_draft_ids, load_request
from dspark_ops.rounding import round_to
from dspark_ops.rows import GREEDY_BELOW

OPS = ("gumbel_block_argmax", "gumbel_sample", "rejection_sample")


class Counts(NamedTuple):
    """Counters of one op. A row is a row of the sampler, or a request of ``rejection_sample``.

    Of inert rows, and of those beyond the slots, nothing more is counted than that. The eight last
    sort rows of logits, each into one: of a sampler every live row, as it is sampled, so after
    ``bias`` was added and rounded; of ``rejection_sample`` the target rows of the live requests up
    to the draft's end (its first placeholder), and of sampled ones the draft rows before that.
    """

    rows: int  # all of them
    inert_rows: int  # a negative slot: padding
    slots_out_of_range: int  # a slot >= S: taken for inert
    temperatures_not_finite: int  # NaN or infinite: taken for greedy
    columns_out_of_range: int  # outside [0, C): no cache write
    spans_out_of_range: int  # cu_num_logits fall, leave [0, L], or span over num_steps + 1: clipped
    draft_ids_out_of_range: int  # a draft token >= V, before the draft's end: rejected
    no_finite_rows: int  # only -inf: id 0
    usual_rows: int  # something finite, neither +inf nor NaN
    inf_rows: int  # +inf, no NaN
    nan_rows: int  # NaN: wins the argmax, ends a draft
    draft_no_finite_rows: int = 0
    draft_usual_rows: int = 0
    draft_inf_rows: int = 0
    draft_nan_rows: int = 0


# Where they are in the tensor of counters; a kind of row (0 to 3) is added to the last two.
ROWS = tl.constexpr(0)
INERT_ROWS = tl.constexpr(1)
SLOTS = tl.constexpr(2)
TEMPERATURES = tl.constexpr(3)
COLUMNS = tl.constexpr(4)
SPANS = tl.constexpr(5)
DRAFT_IDS = tl.constexpr(6)
KINDS = tl.constexpr(7)
DRAFT_KINDS = tl.constexpr(11)
NUM_COUNTERS = 16  # a power of two, for one vector of atomic additions
TL_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)


# 1 reference


def _kinds_ref(x: Tensor) -> Tensor:
    """Kind of each row [..., V]: 0 only -inf, 1 something finite, 2 +inf, 3 NaN; the highest."""
    kind = (x > float("-inf")).long() + (x == float("inf")).long()
    return torch.where(x.isnan(), 3, kind).amax(-1)


def sampler_counts_ref(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    **_others: Any,
) -> Counts:
    """Counts of a sampler's call."""
    slot = idx_mapping.long()
    beyond = slot >= temperature.shape[0]
    live = (slot >= 0) & ~beyond
    columns = 0
    cols: Any
    if logits_cache is not None:
        cols = cache_col if cache_cols is None else cache_cols.long()
        columns = int((live & ((cols < 0) | (cols >= logits_cache.shape[1]))).sum())
    x = logits if bias is None else logits + bias
    return Counts(
        slot.shape[0],
        int((slot < 0).sum()),
        int(beyond.sum()),
        int((~temperature[slot[live]].isfinite()).sum()),
        columns,
        0,
        0,
        *_kinds_ref(x[live]).bincount(minlength=4).tolist(),
    )


def request_counts_ref(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    num_steps: int,
    **_others: Any,
) -> Counts:
    """Counts of a call of rejection_sample."""
    num_logits, vocab = target_logits.shape
    num_slots = temperature.shape[0]
    counts = [0] * len(Counts._fields)
    starts, ids = cu_num_logits.tolist(), draft_token_ids.tolist()
    for row, slot in enumerate(idx_mapping.tolist()):
        counts[0] += 1
        counts[1] += slot < 0
        counts[2] += slot >= num_slots
        if not 0 <= slot < num_slots:
            continue
        first, last = starts[row], starts[row + 1]
        counts[3] += not temperature[slot].isfinite()
        counts[5] += first < 0 or last < first or last > num_logits or last > first + num_steps + 1
        first = min(max(first, 0), num_logits)
        last = min(last, num_logits, first + num_steps + 1)
        if last <= first:
            continue
        drafts = ids[first + 1 : last]
        end = next((i for i, x in enumerate(drafts) if x < 0), len(drafts))
        counts[6] += sum(x >= vocab for x in drafts[:end])
        for kind in _kinds_ref(target_logits[first : first + end + 1]).tolist():
            counts[7 + kind] += 1
        if (
            draft_logits is not None
            and end
            and GREEDY_BELOW <= float(temperature[slot]) < float("inf")
        ):
            for kind in _kinds_ref(draft_logits[slot, :end, :vocab]).tolist():
                counts[11 + kind] += 1
    return Counts(*counts)


# 2 kernels


@triton.jit
def count(counter, number):
    """A vector of the counters' additions that has ``number`` at ``counter``."""
    return tl.where(tl.arange(0, TL_NUM_COUNTERS) == counter, number, 0).to(tl.int64)


@triton.jit
def row_kind(
    x_row, bias_row, V, SUM_DTYPE: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_V: tl.constexpr
):
    """The highest kind among a row's logits: 0 -inf, 1 finite, 2 +inf, 3 NaN."""
    kinds = tl.zeros((TILE_V,), tl.int32)
    for first in range(0, V, TILE_V):
        offs_v = first + tl.arange(0, TILE_V)
        mask_v = offs_v < V
        x = tl.load(x_row + offs_v, mask=mask_v, other=float("-inf"))
        if HAS_BIAS:
            bias = tl.load(bias_row + offs_v, mask=mask_v, other=0.0)
            x = round_to(x.to(tl.float32) + bias.to(tl.float32), SUM_DTYPE)
        x = x.to(tl.float32)
        kind = (x > float("-inf")).to(tl.int32) + (x == float("inf")).to(tl.int32)
        kinds = tl.maximum(kinds, tl.where(x != x, 3, kind))
    return tl.max(kinds, axis=0)


@triton.jit
def add_counts(counters_ptr, counts):
    offs = tl.arange(0, TL_NUM_COUNTERS)
    tl.atomic_add(counters_ptr + offs, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def count_slot(slot, num_slots, temperature):
    is_finite = tl.abs(temperature) < float("inf")  # 0 where not live
    counts = count(ROWS, 1) + count(TEMPERATURES, (~is_finite).to(tl.int32))
    counts += count(INERT_ROWS, (slot < 0).to(tl.int32))
    return counts + count(SLOTS, (slot >= num_slots).to(tl.int32))


@triton.jit(
    do_not_specialize=["num_slots", "num_cols", "col", "stride_idx_b", "stride_col_b"],
    do_not_specialize_on_alignment=["counters_ptr", "idx_mapping_ptr", "temperature_ptr"]
    + ["col_ptr"],
)
def _count_rows_kernel(
    counters_ptr,
    logits_ptr,
    bias_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    col_ptr,
    V,
    num_slots,
    num_cols,
    col,
    stride_logits_b,
    stride_bias_b,
    stride_idx_b,
    stride_col_b,
    SUM_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_COL_PTR: tl.constexpr,
    TILE_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + row * stride_idx_b).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
    counts = count_slot(slot, num_slots, temperature)
    if live:
        if HAS_CACHE:
            if HAS_COL_PTR:
                column = tl.load(col_ptr + row * stride_col_b).to(tl.int64)
            else:
                column = tl.full((), 0, tl.int64) + col
            counts += count(COLUMNS, ((column < 0) | (column >= num_cols)).to(tl.int32))
        logits_row = logits_ptr + row * stride_logits_b
        bias_row = bias_ptr + row * stride_bias_b
        kind = row_kind(logits_row, bias_row, V, SUM_DTYPE, HAS_BIAS, TILE_V)
        counts += count(kind + KINDS, 1)
    add_counts(counters_ptr, counts)


_count_rows_unaligned_kernel = unaligned(_count_rows_kernel)


@triton.jit(
    do_not_specialize=["num_slots", "num_logits", "num_steps", "stride_ids_l", "stride_cu_b"]
    + ["stride_idx_b"],
    do_not_specialize_on_alignment=["counters_ptr", "ids_ptr", "cu_num_logits_ptr"]
    + ["idx_mapping_ptr", "temperature_ptr", "seeds_ptr"],
)
def _count_requests_kernel(
    counters_ptr,
    target_ptr,
    draft_ptr,
    ids_ptr,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    V,
    num_slots,
    num_logits,
    num_steps,
    stride_target_l,
    stride_draft_s,
    stride_draft_c,
    stride_ids_l,
    stride_cu_b,
    stride_idx_b,
    HAS_DRAFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # a logit row of a request
    row = program // (num_steps + 1)
    step = program % (num_steps + 1)
    slot, live, sampled, temperature, _, start, num_drafts = load_request(
        row,
        cu_num_logits_ptr,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        num_slots,
        num_logits,
        num_steps,
        stride_cu_b,
        stride_idx_b,
    )
    offs_n = tl.arange(0, BLOCK_N)
    ids = load_draft_ids(ids_ptr, start, offs_n, (offs_n < num_drafts) & live, stride_ids_l)
    draft_end = first_of(ids < 0, offs_n, BLOCK_N)  # masked ones are negative
    counts = count(ROWS, 0)
    if step == 0:
        counts += count_slot(slot, num_slots, temperature)
        beyond = tl.where((offs_n < draft_end) & (ids >= V), 1, 0)
        counts += count(DRAFT_IDS, tl.sum(beyond, axis=0))
        first = tl.load(cu_num_logits_ptr + row * stride_cu_b).to(tl.int64)
        last = tl.load(cu_num_logits_ptr + (row + 1) * stride_cu_b).to(tl.int64)
        is_outside = (first < 0) | (last < first) | (last > num_logits)
        is_outside |= last > first + num_steps + 1
        is_outside &= (slot >= 0) & (slot < num_slots)
        counts += count(SPANS, is_outside.to(tl.int32))
    if live & (step <= draft_end):
        target_row = target_ptr + (start + step) * stride_target_l
        kind = row_kind(target_row, target_row, V, tl.float32, False, TILE_V)
        counts += count(kind + KINDS, 1)
        if HAS_DRAFT:
            if sampled & (step < draft_end):
                draft_row = draft_ptr + slot * stride_draft_s + step * stride_draft_c
                kind = row_kind(draft_row, draft_row, V, tl.float32, False, TILE_V)
                counts += count(kind + DRAFT_KINDS, 1)
    add_counts(counters_ptr, counts)


_count_requests_unaligned_kernel = unaligned(_count_requests_kernel)


# 3 launchers: the device is current, the metadata has been checked, B > 0

TILE_V = 4096
NUM_WARPS = 8


def _launch_rows(
    counters: Tensor,
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
) -> None:
    dtype = logits.dtype if bias is None else torch.promote_types(logits.dtype, bias.dtype)
    one_bias = bias is None or bias.dim() == 1 or bias.shape[0] == 1
    stride_bias_b = 0 if one_bias else bias.stride(0)  # type: ignore[union-attr]
    one_col = cache_cols is None or cache_cols.dim() == 0
    added = logits if bias is None else bias
    strides = (logits.stride(0), stride_bias_b)
    aligned = is_aligned(logits.shape[1], *strides, logits.data_ptr(), added.data_ptr())
    launch(
        None,
        _count_rows_kernel if aligned else _count_rows_unaligned_kernel,
        {"num_warps": NUM_WARPS},
        (logits.shape[0], 1, 1),
        counters_ptr=counters,
        logits_ptr=logits,
        bias_ptr=added,
        idx_mapping_ptr=idx_mapping,
        temperature_ptr=temperature,
        col_ptr=idx_mapping if cache_cols is None else cache_cols,
        V=logits.shape[1],
        num_slots=temperature.shape[0],
        num_cols=0 if logits_cache is None else logits_cache.shape[1],
        col=cache_col,
        stride_logits_b=logits.stride(0),
        stride_bias_b=stride_bias_b,
        stride_idx_b=idx_mapping.stride(0),
        stride_col_b=0 if one_col else cache_cols.stride(0),  # type: ignore[union-attr]
        SUM_DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        HAS_BIAS=bias is not None,
        HAS_CACHE=logits_cache is not None,
        HAS_COL_PTR=cache_cols is not None,
        TILE_V=TILE_V,
    )


def _launch_requests(
    counters: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_steps: int,
) -> None:
    has_draft = draft_logits is not None
    draft = target_logits if draft_logits is None else draft_logits
    strides = (
        target_logits.stride(0),
        draft.stride(0) if has_draft else 0,
        draft.stride(1) if has_draft else 0,
    )
    pointers = (target_logits.data_ptr(), draft.data_ptr())
    aligned = is_aligned(target_logits.shape[1], *strides, *pointers)
    launch(
        None,
        _count_requests_kernel if aligned else _count_requests_unaligned_kernel,
        {"num_warps": NUM_WARPS},
        (idx_mapping.shape[0] * (num_steps + 1), 1, 1),
        counters_ptr=counters,
        target_ptr=target_logits,
        draft_ptr=draft,
        ids_ptr=draft_token_ids,
        cu_num_logits_ptr=cu_num_logits,
        idx_mapping_ptr=idx_mapping,
        temperature_ptr=temperature,
        seeds_ptr=seeds,
        V=target_logits.shape[1],
        num_slots=temperature.shape[0],
        num_logits=target_logits.shape[0],
        num_steps=num_steps,
        stride_target_l=strides[0],
        stride_draft_s=strides[1],
        stride_draft_c=strides[2],
        stride_ids_l=draft_token_ids.stride(0),
        stride_cu_b=cu_num_logits.stride(0),
        stride_idx_b=idx_mapping.stride(0),
        HAS_DRAFT=has_draft,
        BLOCK_N=16 if num_steps <= 16 else triton.next_power_of_2(num_steps),
        TILE_V=TILE_V,
    )


# 4 context


class Health:
    """Counters of the samplers' calls on one device, in a tensor there; a context manager.

    Every thread's and every stream's calls on the device are counted. It may be entered again after
    it was left, and goes on counting.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A tensor of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            size = (len(OPS), NUM_COUNTERS)
            self._counters = torch.zeros(size, dtype=torch.int64, device=device)
        self._key = self._counters.get_device()  # -1 on a CPU
        self._synchronize()  # calls on another stream may count next

    def __repr__(self) -> str:
        return f"dspark_ops.health({str(self.device)!r})"

    def __enter__(self) -> "Health":
        _refuse_compilation()
        with _lock:
            if self._key in ACTIVE:
                raise RuntimeError(
                    f"a health context is open on {self.device} already, and a device has one at a "
                    "time: read that one, or leave it first"
                )
            ACTIVE[self._key] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del ACTIVE[self._key]

    def read(self) -> dict[str, Counts]:
        """Counts by op, of all since the start or the last ``reset``. Waits for the device."""
        _refuse_capture("read()")
        self._synchronize()
        with _lock:
            rows = self._counters.tolist()
        return {op: Counts(*row[: len(Counts._fields)]) for op, row in zip(OPS, rows, strict=True)}

    def reset(self) -> None:
        """Set every counter to 0. Waits for the device."""
        _refuse_capture("reset()")
        self._synchronize()
        with _lock:
            self._counters.zero_()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _at(self, op: str) -> Tensor:
        """The counters of ``op`` for a kernel on the current device."""
        if self._key >= 0 and torch.cuda.is_current_stream_capturing():
            _captured.add(self._counters)
        return self._counters[OPS.index(op)]

    def _add(self, op: str, counts: Counts) -> None:
        with _lock:
            self._counters[OPS.index(op), : len(counts)] += torch.tensor(counts, device="cpu")


ACTIVE: dict[int, Health] = {}  # open contexts by get_device() of the tensors; the ops ask it
_captured: set[Tensor] = set()  # a graph's replays write them, whatever became of their context
_lock = threading.Lock()


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} waits for the device and must be outside of a CUDA graph's capture; entering "
            "and leaving a context that exists may be inside"
        )


def _refuse_compilation() -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "health must be entered outside of compiled code: open it around the call"
        )


def health(device: torch.device | str | int) -> Health:
    """Count, while the context is open, what the samplers met on ``device``.

    Args:
        device: "cpu", "cuda" (the current one), "cuda:1", an index, or a ``torch.device``.

    Returns:
        A context manager. ``read()`` gives ``Counts`` by op name, at any time, also after the
        context was left or a graph that was captured in it replayed; ``reset()`` sets them to 0.
        Both, and this call, wait for the device; counting itself never does.

    Raises:
        TypeError, ValueError: no device, or neither a CPU nor a CUDA device.
        RuntimeError: no such GPU; called under capture; entered while another context is open on
            the device. In code that is compiled it breaks the graph: open it around the call.
    """
    _refuse_compilation()
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a device, got {type(device).__name__}: {device!r}")
    if isinstance(device, int):
        device = f"cuda:{device}"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a CPU or CUDA device; got {device!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or CUDA device; got {str(device)!r}")
    if device.type == "cpu":
        return Health(torch.device("cpu"))
    if (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(f"no GPU {str(device)!r}: torch sees {torch.cuda.device_count()}")
    _refuse_capture("health(...)")
    index = torch.cuda.current_device() if device.index is None else device.index
    return Health(torch.device("cuda", index))


# 5 hooks: what ops call where ACTIVE is not empty, before they do anything


def count_rows(op: str, logits: Tensor, *arguments: Any) -> None:
    """From a sampler's launcher, its device being current."""
    opened = ACTIVE.get(logits.get_device())
    if opened is not None:
        _launch_rows(opened._at(op), logits, *arguments)


def count_rows_ref(op: str, **arguments: Any) -> None:
    """From a sampler's CPU implementation."""
    opened = ACTIVE.get(-1)
    if opened is not None:
        opened._add(op, sampler_counts_ref(**arguments))


def count_requests(target_logits: Tensor, *arguments: Any) -> None:
    """From the launcher of rejection_sample, its device being current."""
    opened = ACTIVE.get(target_logits.get_device())
    if opened is not None:
        _launch_requests(opened._at("rejection_sample"), target_logits, *arguments)


def count_requests_ref(**arguments: Any) -> None:
    """From the CPU implementation of rejection_sample."""
    opened = ACTIVE.get(-1)
    if opened is not None:
        opened._add("rejection_sample", request_counts_ref(**arguments))


# 6 serving calls: of the counting kernels alone


def serving_calls(serving: Serving) -> Iterator[Call]:
    counters = serving.zeros(NUM_COUNTERS, dtype=torch.int64)
    for args, kwargs in sampler_arguments(serving, with_bias=True):
        yield functools.partial(_serving_rows, counters, *args, **kwargs)
    for args, kwargs in request_arguments(serving):
        target, draft, ids, starts, _, idx_mapping, temperature, seeds = args
        batch = (target, draft, ids, starts, idx_mapping, temperature, seeds)
        yield functools.partial(_launch_requests, counters, *batch, kwargs["num_steps"])


def _serving_rows(
    counters: Tensor,
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    _seeds: Tensor,
    _pos: Tensor,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int | Tensor = 0,
    **_flags: bool,
) -> None:
    column = (0, cache_col) if isinstance(cache_col, Tensor) else (cache_col, None)
    _launch_rows(counters, logits, idx_mapping, temperature, bias, logits_cache, *column)
