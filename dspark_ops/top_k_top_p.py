"""top_k_top_p_: keep a row's k largest logits, then of those the nucleus of mass p; mask the rest.

    order    logit descending, then id ascending (-0.0 equals 0.0)
    top-k    the first min(k, number above -inf) of that order
    top-p    of the survivors, the shortest prefix whose mass reaches p of theirs, never less than
             one token; mass(x) = exp(x - max)

logits f32 [B, V], k i32 [B], p f32 [B]. k <= 0 or k >= V: k is off. p >= 1 or NaN: p is off; p < 0
counts as 0. Both off: the row is bit-unchanged. -inf stays -inf; a row of only -inf is left as it
is. With a filter on, a row with NaN keeps its first NaN alone; with p on, a row with +inf keeps its
lowest +inf alone (of those that k left).

Why no row can lose all its tokens: masses are integers (``mass.py``), the first token of the order
has the largest, and the mass to reach is the integer ``max(1, ceil(p * total))``. Sums of integers
are exact in any order, so a prefix reaches it on one device, batch size, alignment and path exactly
if it does on all; a float sum, at p below its resolution, would round to "already reached" before
the first token. p * total is one product in f64.

The kept set is that of exact arithmetic, except where the mass of a prefix is within 1e-7 of p
(beyond V = 2^19, where masses have fewer bits, within V units of mass: 2.4e-7 at 2^20). V is at
most 2^22.
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import is_aligned, launch, launch_options, on_device
from dspark_ops._library import is_plain_gpu_call, register
from dspark_ops._serving import Call, NotWarmed, Serving
from dspark_ops._triton import require_triton
from dspark_ops._vector_checks import MAX_INT32
from dspark_ops.mass import LARGEST, mass_shift, masses_ref
from dspark_ops.top_k_top_p_begin import _top_k_top_p_begin_kernel
from dspark_ops.top_k_top_p_collect import (
    _top_k_top_p_collect_kernel,
    _top_k_top_p_collect_unaligned_kernel,
)
from dspark_ops.top_k_top_p_mask import (
    _top_k_top_p_mask_kernel,
    _top_k_top_p_mask_unaligned_kernel,
)
from dspark_ops.top_k_top_p_sample import _top_k_top_p_sample_kernel
from dspark_ops.top_k_top_p_select import _top_k_top_p_select_kernel
from dspark_ops.top_k_top_p_state import NUM_WORDS
from dspark_ops.top_k_top_p_sums import (
    _top_k_top_p_sums_kernel,
    _top_k_top_p_sums_unaligned_kernel,
)

# 1 reference


def top_k_top_p_ref(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> Tensor:
    vocab = logits.shape[1]
    k_on = torch.zeros_like(logits[:, :1], dtype=torch.bool) if k is None else _k_is_on(k, vocab)
    p_on = torch.zeros_like(k_on) if p is None else ~(p >= 1).view(-1, 1) & ~p.isnan().view(-1, 1)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    keep = ordered > -torch.inf
    if k is not None:
        rank = torch.arange(vocab, device=logits.device)
        keep &= (rank < k.view(-1, 1)) | ~k_on
    if p is not None:
        top = ordered[:, :1]
        mass = masses_ref(ordered, top, mass_shift(vocab)) * keep
        total = mass.sum(-1, keepdim=True)
        share = p.view(-1, 1).where(p_on, 0).clamp(min=0).double()
        # Back to an integer: beside a float, sums from 2^53 on would be rounded.
        goal = (share * total).ceil().to(torch.int64).clamp(min=1)
        goal = goal.where(top < torch.inf, 1)
        before = mass.cumsum(-1) - mass
        keep &= (before < goal) | ~p_on
    # A NaN sorts above all numbers.
    has_nan = ordered[:, :1].isnan()
    keep = torch.where(has_nan, torch.zeros_like(keep).index_fill_(1, ids.new_zeros(1), True), keep)
    kept = torch.zeros_like(keep).scatter_(1, ids, keep)
    kept |= (logits == -torch.inf) | ~(k_on | p_on)
    return logits.where(kept, mask_value)


def _k_is_on(k: Tensor, vocab: int) -> Tensor:
    return ((k > 0) & (k < vocab)).view(-1, 1)


# 3 launcher

MAX_VOCAB = 2**22  # beyond it masses drop more bits than the doubt about fp32 sums allows


def _check(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    _checks.check_dtype("logits", logits, (torch.float32,))
    _checks.check_logits(logits)
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(
            "logits must have V <= 2^22 columns, which integer masses can tell apart; "
            f"got {tuple(logits.shape)}"
        )
    for name, x, dtype in (("k", k, torch.int32), ("p", p, torch.float32)):
        if x is None:
            continue
        _checks.check_dtype(name, x, (dtype,))
        if x.dim() != 1 or x.shape[0] != logits.shape[0]:
            raise ValueError(
                f"{name} must have shape [B] = [{logits.shape[0]}], a row of logits each; "
                f"got {tuple(x.shape)}"
            )
        _checks.check_device(name, x, logits.device)


def _check_in_place(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    _check(logits, k, p)
    if logits.stride(0) < logits.shape[1] and logits.shape[0] > 1:
        raise ValueError(
            "logits is written in place and must have an address for each entry; got strides "
            f"{tuple(logits.stride())} for shape {tuple(logits.shape)}; pass .contiguous()"
        )


# A search of a row: where to look from a sample, sums above pivots, the bracket they leave, sums
# again where it is long, exact sums and candidates, the threshold. Three reads of the row and a
# write, where a read and a write are the floor; scratch memory is 16 bytes a candidate.
#
# H200, V 151936, normal rows, p = 0.9, one run, us at B = 65 / 256 without the copy: 122.1 / 333.6
# with 8 warps for the sample and 2 iterations of collect in flight; 119.2 / 331.5 as below. A
# sample of 4096: 108.0 / 328.1, but 199 and 441 instead of 172 and 423 where the rows are bf16.
# Slower by 1 to 9 % at 65: 500, 900 or 1700 programs, chunks of 4 or 5 tiles, 4 iterations of
# collect in flight, 8 warps or tiles of 1024 for the sums, 16 warps to select.

# What a program of a pass over the rows takes: enough programs to fill the GPU, few enough that
# their sums are a short read for the next kernel.
CHUNK_V = 2048
MAX_TILES = 8  # COLLECT has a bit of 32 for each of its tiles
NUM_PROGRAMS = 800
# Of the sample: its logits, those of a run in memory, and the bins of its histogram.
SAMPLE = 8192
RUN = 128
NUM_BINS = 256
NUM_PIVOTS = 8
NUM_GROUPS = 32  # of each program
MAX_CANDIDATES = 16384  # of a row
# Chunks and groups that are read at a time.
BLOCK_C = 64
BLOCK_G = 1024
# Tile, warps and iterations whose loads are in flight at a time of each kernel.
SUMS = (512, 4, 4)
COLLECT = (512, 4, 1)
SELECT = (2048, 8)
MASK = (2048, 8)
SAMPLE_WARPS = 16
BEGIN_WARPS = 4

# By what decides the compiled code: sizes and strides do so only by being aligned, as long as they
# fit an int32.
_variants: dict[tuple[Any, ...], dict[Any, Any]] = {}


def _scratch(like: Tensor, dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, ...]:
    """Uninitialised vectors that all begin at a multiple of 16 bytes."""
    padded = [(size + 3) // 4 * 4 for size in sizes]
    return like.new_empty(sum(padded), dtype=dtype).split(padded)


def _launch(out: Tensor, logits: Tensor, k: Tensor | None, p: Tensor | None, mask: float) -> None:
    num_rows, vocab = logits.shape
    if num_rows == 0 or (k is None and p is None):
        if out is not logits:
            out.copy_(logits)
        return
    has_k, has_p = k is not None, p is not None
    num_tiles = (vocab + CHUNK_V - 1) // CHUNK_V
    chunk_tiles = min(MAX_TILES, max(1, num_rows * num_tiles // NUM_PROGRAMS))
    num_chunks = (num_tiles + chunk_tiles - 1) // chunk_tiles
    num_groups = num_chunks * NUM_GROUPS
    num_programs = num_rows * num_chunks
    num_candidates = num_rows * MAX_CANDIDATES
    shift = mass_shift(vocab)
    stride_out, stride_logits = out.stride(0), logits.stride(0)

    with on_device(logits):
        sums, totals, maxima = _scratch(
            logits, torch.float32, [num_programs * NUM_PIVOTS, num_programs, num_programs]
        )
        state, pivots, ranks, new_pivots, first_nan, num_finite, groups, counts, keys, ids = (
            _scratch(
                logits,
                torch.int32,
                [num_rows * NUM_WORDS, *(3 * [num_rows * NUM_PIVOTS])]
                + [num_programs, num_programs, num_rows * num_groups * has_k, num_programs]
                + [num_candidates, num_candidates],
            )
        )
        masses, masses_above, candidate_masses = _scratch(
            logits, torch.int64, [num_programs, num_programs, num_candidates * has_p]
        )
        given_k, given_p = state if k is None else k, maxima if p is None else p
        stride_k, stride_p = given_k.stride(0), given_p.stride(0)
        options = launch_options(logits)
        pdl = options.pop("LAUNCH_PDL")
        addresses = (logits.data_ptr(), out.data_ptr())
        aligned = is_aligned(vocab, stride_out, stride_logits, *addresses)
        key = (logits.get_device(), has_k, has_p, out is logits, aligned)
        kept: dict[Any, Any] = {}
        if max(stride_out, stride_logits, stride_k, stride_p, num_candidates) <= MAX_INT32:
            kept = _variants.setdefault(key, {})

        def run(kernel: Any, name: Any, programs: int, num_warps: int, *args: Any) -> None:
            launched = {"num_warps": num_warps, **options}
            variant = launch(kept.get(name), kernel, launched, (programs, 1, 1), *args)
            if variant is not None:
                kept[name] = variant

        def run_sums(name: Any, given_pivots: Tensor, is_first: bool, has_cut: bool) -> None:
            run(
                _top_k_top_p_sums_kernel if aligned else _top_k_top_p_sums_unaligned_kernel,
                name,
                num_programs,
                SUMS[1],
                *(sums, totals, maxima, first_nan, num_finite, groups, state, given_pivots),
                *(logits, vocab, num_chunks, chunk_tiles, stride_logits),
                *(is_first, has_cut, has_k, pdl, NUM_WORDS, CHUNK_V),
                *(NUM_PIVOTS, NUM_GROUPS, SUMS[0], SUMS[2]),
            )

        given = (given_k, given_p, vocab)
        strides = (stride_logits, stride_k, stride_p)
        for second in (False, True) if has_k and has_p else (False,):
            run(
                _top_k_top_p_sample_kernel,
                ("sample", second),
                num_rows,
                SAMPLE_WARPS,
                *(state, pivots, ranks, logits, *given, num_groups, *strides),
                *(second, has_k, has_p, pdl, NUM_WORDS, NUM_PIVOTS, NUM_BINS, SAMPLE, RUN),
            )
            run_sums(("sums", second), pivots, not second, second)
            run(
                _top_k_top_p_begin_kernel,
                ("begin", second),
                num_rows,
                BEGIN_WARPS,
                *(
                    state,
                    new_pivots,
                    pivots,
                    ranks,
                    sums,
                    totals,
                    maxima,
                    first_nan,
                    num_finite,
                    groups,
                ),
                *(*given, num_chunks, num_groups, stride_k, stride_p),
                *(second, has_k, has_p, pdl, NUM_WORDS, NUM_PIVOTS, BLOCK_C, BLOCK_G),
            )
            run_sums(("sums again", second), new_pivots, False, second)
            exact = (masses, masses_above, counts, keys, ids, candidate_masses)
            run(
                _top_k_top_p_collect_kernel if aligned else _top_k_top_p_collect_unaligned_kernel,
                ("collect", second),
                num_programs,
                COLLECT[1],
                *(state, *exact, new_pivots, sums, totals, logits, *given, shift),
                *(num_chunks, chunk_tiles, *strides),
                *(second, has_k, has_p, pdl),
                *(NUM_WORDS, CHUNK_V, MAX_CANDIDATES, NUM_PIVOTS, BLOCK_C),
                *(COLLECT[0], COLLECT[2]),
            )
            run(
                _top_k_top_p_select_kernel,
                ("select", second),
                num_rows,
                SELECT[1],
                *(state, *exact, logits, *given, shift, num_chunks, *strides),
                *(second, has_k, has_p, pdl, NUM_WORDS, MAX_CANDIDATES, BLOCK_C, SELECT[0]),
            )
        run(
            _top_k_top_p_mask_kernel if aligned else _top_k_top_p_mask_unaligned_kernel,
            "mask",
            num_programs,
            MASK[1],
            *(out, logits, state, vocab, mask, num_chunks, chunk_tiles),
            *(stride_out, stride_logits, out is logits, pdl, NUM_WORDS, CHUNK_V, MASK[0]),
        )


def _top_k_top_p_launch_(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> None:
    require_triton("top_k_top_p_")
    _check_in_place(logits, k, p)
    _launch(logits, logits, k, p, mask_value)


def _top_k_top_p_launch(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> Tensor:
    require_triton("top_k_top_p")
    _check(logits, k, p)
    out = logits.new_empty(logits.shape)
    _launch(out, logits, k, p, mask_value)
    return out


# 4 op


def top_k_top_p_(
    logits: Tensor,
    k: Tensor | None = None,
    p: Tensor | None = None,
    *,
    mask_value: float = -torch.inf,
) -> Tensor:
    """Mask, in place, what top-k and then top-p remove; no row loses all its tokens.

    Args:
        logits: f32 [B, V <= 2^22], masked in place; rows may be strided, columns contiguous.
        k: i32 [B], any stride: tokens to keep. <= 0 or >= V: all. None: all in every row.
        p: f32 [B], any stride: mass to keep of what k left. >= 1 or NaN: all; <= 0: one token.
            None: all in every row.
        mask_value: what masked logits become; -inf stays -inf.

    Returns:
        ``logits``.

    Raises:
        TypeError, ValueError: metadata that does not fit.
    """
    _checks.check_is_tensor("logits", logits)
    for name, x in (("k", k), ("p", p)):
        if x is not None:
            _checks.check_is_tensor(name, x)
    if isinstance(mask_value, bool) or not isinstance(mask_value, float | int):
        raise TypeError(
            f"mask_value must be a float, got {type(mask_value).__name__}: {mask_value!r}"
        )
    if LARGEST < abs(mask_value) < torch.inf:
        raise ValueError(f"mask_value must be an f32 number or infinite; got {mask_value!r}")
    if is_plain_gpu_call(logits):
        _top_k_top_p_launch_(logits, k, p, float(mask_value))
    else:
        torch.ops.dspark.top_k_top_p_.default(logits, k, p, float(mask_value))
    return logits


def _out_of_place(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    masked: Tensor = torch.ops.dspark.top_k_top_p.default(logits, k, p, -torch.inf)
    return masked


# 5 CPU


def _cpu_(logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float) -> None:
    _check_in_place(logits, k, p)
    logits.copy_(top_k_top_p_ref(logits, k, p, mask_value))


def _cpu(logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float) -> Tensor:
    _check(logits, k, p)
    return top_k_top_p_ref(logits, k, p, mask_value)


# 6 fake


def _fake_(logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float) -> None:
    _check_in_place(logits, k, p)


def _fake(logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float) -> Tensor:
    _check(logits, k, p)
    return logits.new_empty(logits.shape)


_ARGS = "Tensor? k, Tensor? p, float mask_value"
register(
    f"top_k_top_p_(Tensor(a!) logits, {_ARGS}) -> ()",
    cpu=_cpu_,
    cuda=_top_k_top_p_launch_,
    fake=_fake_,
)
# What a pass writes where the unfused masking returned a new tensor: the row is not copied first.
register(
    f"top_k_top_p(Tensor logits, {_ARGS}) -> Tensor",
    cpu=_cpu,
    cuda=_top_k_top_p_launch,
    fake=_fake,
)


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): both ops; k, p, both, neither; strided; B = 0; odd V."""
    generator = torch.Generator(device).manual_seed(5)
    samples: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def add(
        num_rows: int, vocab: int, k: Any, p: Any, pad: int = 0, mask_value: float = -torch.inf
    ) -> None:
        for name in ("top_k_top_p_", "top_k_top_p"):
            rows = torch.randn(num_rows, vocab + pad, device=device, generator=generator) * 3
            ks = None if k is None else torch.tensor(k, device=device, dtype=torch.int32)
            ps = None if p is None else torch.tensor(p, device=device, dtype=torch.float32)
            samples.append((name, (rows[:, pad:], ks, ps, mask_value), {}))

    add(3, 1500, [5, 0, 2000], None)
    add(3, 1025, None, [0.9, 1.0, 0.0], pad=3)
    add(4, 1024, [50, 3, -1, 1], [0.5, 1.5, 1e-9, 0.9], mask_value=-1e4)
    add(2, 1, [1, 0], [0.5, 0.5])
    add(2, 7, None, None)
    add(0, 1024, [], [])
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    if max(serving.vocab_sizes) > MAX_VOCAB:
        raise NotWarmed("V is above 2^22")
    given = (
        (None, serving.zeros(2, dtype=torch.int32)),
        (None, serving.zeros(2, dtype=torch.float32)),
    )
    ops = (top_k_top_p_, _out_of_place)
    for vocab, k, p, op in product(serving.vocab_sizes, *given, ops):
        for aligned in serving.rows_of(vocab):
            rows = serving.rows(2, vocab, dtype=torch.float32, aligned=aligned)
            yield functools.partial(op, rows, k, p)
