"""rejection_sample: how much of a draft the target accepts, and the token after it.

    x_i = draft_token_ids[start + i],  i = 1..g,  start = cu_num_logits[b]
    p_i = softmax(target_logits[start + i - 1]),  u_i = u(seeds[s], pos[start + i - 1], i - 1)
    q_i = softmax(draft_logits[s, i - 1, :V] / temperature[s]),  s = idx_mapping[b]
    "standard": accept x_i while u_i * q_i(x_i) < p_i(x_i);  residual max(p_i - q_i, 0)
    "block":    P_0 = 1,  P_i = min(P_{i-1} * p_i(x_i) / q_i(x_i), 1)
                R_i = sum(max(P_i * p_{i+1} - q_{i+1}, 0)),  h_i = R_i / (R_i + 1 - P_i),  h_g = P_g
                accept up to the last i with u_i <= h_i;  residual max(P_i * p_{i+1} - q_{i+1}, 0)
    token after i accepted = argmax_v(log residual(v) + gumbel(seeds[s], pos[start + i], v))

target_logits [L, V], draft_logits [S, C, >= V]; tokens i64 [B, num_steps + 1], counts i32 [B].
Contract: after g accepted, and at a placeholder, the token comes from the target: it is, bit for
bit, that of ``gumbel_sample(target_logits, apply_temperature=False)``. So it is where a residual is
zero everywhere, and where p or q is no distribution (NaN or +inf, only -inf), which ends the draft.
Without ``draft_logits`` q is one-hot. In a greedy row (``rows.py``) p is one-hot and the draft is
accepted while it is the target's argmax. A draft id >= V has p = q = 0. Inert rows and rows without
logits get -1 and counts of 0. Streams and their keys: ``noise.py``.

Bytes: "standard" reads the g target rows and draft columns once and one row and column again, or
the target's last row for the first time: (2 g + 2) / (2 g + 1) of the floor, 4/3 at g = 1, 1.07
at g = 7. "block" reads rows and columns in doubt (``rejection_sample_decide.py``) once more, below
2 passes in all. Without ``draft_logits`` both read g + 1 rows, the floor.

Source: Leviathan 2023 (arXiv 2211.17192); Sun 2024 (arXiv 2403.10444).
"""

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._launch import empty_ids, is_aligned, launch, launch_options, on_device
from dspark_ops._library import is_plain_gpu_call, register
from dspark_ops._serving import Call, Serving, request_arguments
from dspark_ops._triton import require_triton
from dspark_ops._vector_checks import MAX_INT32, check_vector
from dspark_ops.health import ACTIVE, count_requests, count_requests_ref
from dspark_ops.noise import acceptance_uniform_ref
from dspark_ops.noised import noised_logits_ref
from dspark_ops.rejection_sample_decide import _rejection_decide_kernel
from dspark_ops.rejection_sample_draw import (
    _rejection_draw_kernel,
    _rejection_draw_unaligned_kernel,
    _rejection_finish_kernel,
)
from dspark_ops.rejection_sample_request import NUM_PLANES
from dspark_ops.rejection_sample_residual import (
    _rejection_extend_kernel,
    _rejection_mass_kernel,
    _rejection_mass_unaligned_kernel,
)
from dspark_ops.rejection_sample_statistics import (
    _rejection_statistics_kernel,
    _rejection_statistics_unaligned_kernel,
)
from dspark_ops.rows import Rows, rows_ref

METHODS = ("standard", "block")
MAX_STEPS = 128

# 1 reference


class _Step(NamedTuple):
    """A draft step of each live row, probabilities in f64."""

    u: Tensor  # [B] acceptance draw
    log_ratio: Tensor  # [B] log of p(x) / q(x) of its draft token x
    p: Tensor  # [B, V]
    q: Tensor
    exists: Tensor  # [B] bool; else the draft has ended


def rejection_sample_ref(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_steps: int,
    method: str = "standard",
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    num_logits, vocab = target_logits.shape
    tokens, num_sampled, num_rejected = _outputs(target_logits, idx_mapping, num_steps)
    for x, value in ((tokens, -1), (num_sampled, 0), (num_rejected, 0)):
        x.fill_(value)
    start = cu_num_logits[:-1].long().clamp(0, num_logits)
    end = cu_num_logits[1:].long().clamp(max=num_logits)
    num_drafts = (end - start).clamp(max=num_steps + 1) - 1
    rows = rows_ref(idx_mapping, temperature, seeds, torch.zeros_like(idx_mapping), 0, None)
    live = rows.live & (num_drafts >= 0)
    if not live.any():
        return tokens, num_sampled, num_rejected
    rows = Rows(*(x[live] for x in rows))
    start, num_drafts = start[live], num_drafts[live]
    ids = torch.arange(vocab, device=start.device)
    last = num_logits - 1

    def step(i: Tensor) -> _Step:
        """Step ``i`` [B], counted from 0: its token is ``x_{i+1}``."""
        row = (start + i).clamp(max=last)
        x = draft_token_ids[(row + 1).clamp(max=last)].long()
        is_x = x[:, None] == ids
        u = acceptance_uniform_ref(rows.seed, pos[row].long(), i)
        log_p = torch.log_softmax(target_logits[row].double(), -1)
        log_q = is_x.double().log()
        if draft_logits is not None and num_steps > 0:
            draft = draft_logits[rows.slot, i.clamp(max=num_steps - 1), :vocab]
            log_q = torch.log_softmax((draft.float() / rows.temperature[:, None]).double(), -1)
        # Greedy: both are one-hot, and any u in (0, 1) decides the same.
        best = target_logits[row].argmax(-1, keepdim=True) == ids
        u = torch.where(rows.sampled, u, 0.5).double()
        log_p = torch.where(rows.sampled[:, None], log_p, best.double().log())
        log_q = torch.where(rows.sampled[:, None], log_q, is_x.double().log())
        p, q = log_p.exp(), log_q.exp()
        exists = (i < num_drafts) & (x >= 0) & p.isfinite().all(-1) & q.isfinite().all(-1)
        # Below any float p and q still have a ratio; p = q = 0 and an id >= V count as p = 0.
        has_p = is_x & (log_p > -torch.inf)
        log_ratio = torch.where(has_p, log_p - log_q, -torch.inf).amax(-1)
        return _Step(u, log_ratio, p, q, exists)

    accepted = torch.zeros_like(start)
    log_prefix = torch.zeros_like(start, dtype=torch.float64)  # log P_i
    scale = log_prefix.exp()  # P of the accepted length
    now = step(accepted)
    going = now.exists
    for i in range(1, num_steps + 1):
        then = step(torch.full_like(start, i))
        if method == "standard":
            going = going & (now.u < now.log_ratio.exp())
            accepted = accepted + going.long()
        else:
            is_zero = log_prefix == -torch.inf
            log_prefix = (log_prefix + now.log_ratio).clamp(max=0)
            log_prefix = torch.where(is_zero, -torch.inf, log_prefix)
            prefix = log_prefix.exp()
            rest = (prefix[:, None] * then.p - then.q).clamp(min=0).sum(-1)
            rest = torch.where(then.exists, rest, prefix)  # h_g = P_g
            bar = torch.where(rest + 1 - prefix > 0, rest / (rest + 1 - prefix), 1.0)
            accepts = going & (now.u <= bar)
            accepted = torch.where(accepts, i, accepted)
            scale = torch.where(accepts, prefix, scale)
        going = going & then.exists
        now = then

    final = step(accepted)
    residual = torch.where(final.exists[:, None], scale[:, None] * final.p - final.q, 0.0)
    residual = residual.clamp(min=0)
    target = target_logits[start + accepted].float()
    logits = torch.where(residual.any(-1, keepdim=True), residual.log().float(), target)
    rows = rows._replace(pos=pos[start + accepted].long())
    token = noised_logits_ref(logits, rows, False, use_fp64).argmax(-1)

    column = torch.arange(num_steps + 1, device=start.device)
    drafted = draft_token_ids[(start[:, None] + 1 + column).clamp(max=last)].long()
    after = torch.where(column == accepted[:, None], token[:, None], -1)
    tokens[live] = torch.where(column < accepted[:, None], drafted, after)
    num_sampled[live] = (accepted + 1).int()
    num_rejected[live] = (num_drafts - accepted).int()
    return tokens, num_sampled, num_rejected


# 2 kernels: rejection_sample_statistics.py, _decide.py, _residual.py, _draw.py

# 3 launcher

# Part of a row's bits: a chunk of another size sums in another order.
CHUNK_V = 4096
TILE_V = 1024
BLOCK_K = 256  # chunks that the finish takes at once
NUM_WARPS = 4
FINISH_WARPS = 1
MIN_BLOCK_N = 16  # one variant for up to 16 steps
STEP_TILE = 1024  # elements of a tile over steps and chunks


def _check(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_steps: int,
    method: str = "standard",
    use_fp64: bool = False,
) -> None:
    device = target_logits.device
    _checks.check_dtype("target_logits", target_logits, _checks.LOGITS_DTYPES)
    if target_logits.dim() != 2:
        raise ValueError(f"target_logits must have shape [L, V]; got {tuple(target_logits.shape)}")
    num_logits, vocab = target_logits.shape
    if vocab < 1 or vocab > _checks.MAX_VOCAB:
        raise ValueError(
            f"target_logits must have 1 <= V <= 2^30 columns; got {tuple(target_logits.shape)}"
        )
    _checks.check_last_stride("target_logits", target_logits)
    if num_steps < 0 or num_steps > MAX_STEPS:
        raise ValueError(
            f"num_steps must be the most draft tokens of a row, 0 to {MAX_STEPS}; got {num_steps}"
        )
    if method not in METHODS:
        raise ValueError(f"method must be 'standard' or 'block'; got {method!r}")
    at = ("target_logits", device)
    check_vector("idx_mapping", idx_mapping, _checks.INDEX_DTYPES, "[B]", None, *at)
    num_rows = idx_mapping.shape[0]
    starts = ("cu_num_logits", cu_num_logits, (torch.int32,), "[B + 1]", num_rows + 1)
    check_vector(*starts, *at)
    check_vector("draft_token_ids", draft_token_ids, _checks.ID_DTYPES, "[L]", num_logits, *at)
    check_vector("pos", pos, _checks.INDEX_DTYPES, "[L]", num_logits, *at)
    _checks.check_request_state(temperature, seeds, device)
    if draft_logits is not None:
        num_slots = temperature.shape[0]
        _checks.check_dtype("draft_logits", draft_logits, _checks.LOGITS_DTYPES)
        if (
            draft_logits.dim() != 3
            or draft_logits.shape[0] != num_slots
            or draft_logits.shape[1] < num_steps
            or draft_logits.shape[2] < vocab
        ):
            raise ValueError(
                f"draft_logits must have shape [S, C >= num_steps, >= V] = [{num_slots}, "
                f">= {num_steps}, >= {vocab}]; got {tuple(draft_logits.shape)}"
            )
        _checks.check_device("draft_logits", draft_logits, device)
        _checks.check_last_stride("draft_logits", draft_logits)


def _outputs(
    target_logits: Tensor, idx_mapping: Tensor, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = idx_mapping.shape[0]
    return (
        target_logits.new_empty((num_rows, num_steps + 1), dtype=torch.int64),
        target_logits.new_empty(num_rows, dtype=torch.int32),
        target_logits.new_empty(num_rows, dtype=torch.int32),
    )


# By what decides the compiled code: sizes and strides do so only by being aligned, as long as they
# fit an int32.
_variants: dict[tuple[Any, ...], dict[str, Any]] = {}


def _rejection_sample_launch(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_steps: int,
    method: str = "standard",
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    require_triton("rejection_sample")
    requests = (cu_num_logits, pos, idx_mapping, temperature, seeds)
    _check(target_logits, draft_logits, draft_token_ids, *requests, num_steps, method, use_fp64)
    tokens, num_sampled, num_rejected = _outputs(target_logits, idx_mapping, num_steps)
    num_rows = idx_mapping.shape[0]
    if num_rows == 0:
        return tokens, num_sampled, num_rejected

    num_logits, vocab = target_logits.shape
    num_slots = temperature.shape[0]
    num_chunks = (vocab + CHUNK_V - 1) // CHUNK_V
    num_tiles = (vocab + TILE_V - 1) // TILE_V
    num_partials, num_words = num_rows * num_steps * num_chunks, num_rows * num_tiles
    has_draft, is_block = draft_logits is not None, method == "block"
    sums_residuals = has_draft and is_block and num_steps > 1
    block_n = MIN_BLOCK_N
    while block_n < num_steps:
        block_n *= 2
    block_k = max(1, STEP_TILE // block_n)
    draft = target_logits if draft_logits is None else draft_logits
    strides = (
        target_logits.stride(0),
        draft.stride(0) if has_draft else 0,
        draft.stride(1) if has_draft else 0,
    )
    stride_ids, stride_pos = draft_token_ids.stride(0), pos.stride(0)
    stride_cu, stride_idx = cu_num_logits.stride(0), idx_mapping.stride(0)

    with on_device(target_logits):
        if ACTIVE:
            batch = (draft_token_ids, cu_num_logits, idx_mapping, temperature, seeds)
            count_requests(target_logits, draft_logits, *batch, num_steps)
        # Statistics are read for the last time before the first of the drawn words is written.
        words = empty_ids(max(2 * num_partials, 4 * num_words), seeds)
        steps = target_logits.new_empty(NUM_PLANES * num_rows * num_steps, dtype=torch.float32)
        length = torch.empty_like(num_sampled)
        options = launch_options(target_logits)
        pdl = options.pop("LAUNCH_PDL")
        aligned = is_aligned(vocab, *strides, target_logits.data_ptr(), draft.data_ptr())
        key = (
            target_logits.get_device(),
            *(x.dtype for x in (target_logits, draft, draft_token_ids, pos, idx_mapping)),
            *(block_n, has_draft, is_block, use_fp64, aligned),
        )
        kept: dict[str, Any] = {}
        sizes = (num_logits, num_slots, 2 * num_partials, 4 * num_words)
        largest = max(*sizes, *strides, stride_ids, stride_pos, stride_cu, stride_idx)
        if largest <= MAX_INT32:
            kept = _variants.setdefault(key, {})

        def run(kernel: Any, num_programs: int, num_warps: int, *args: Any) -> None:
            name = kernel.__name__
            launched = {"num_warps": num_warps, **options}
            grid = (num_programs, 1, 1)
            variant = launch(kept.get(name), kernel, launched, grid, *args)
            if variant is not None:
                kept[name] = variant

        state = (cu_num_logits, idx_mapping, temperature, seeds)
        if num_steps > 0:
            run(
                _rejection_statistics_kernel if aligned else _rejection_statistics_unaligned_kernel,
                num_partials,
                NUM_WARPS,
                *(words, target_logits, draft, draft_token_ids, *state),
                *(vocab, num_slots, num_logits, num_steps, num_chunks, num_partials),
                *(*strides, stride_ids, stride_cu, stride_idx),
                *(has_draft, pdl, block_n, CHUNK_V),
            )
        decision = (tokens, num_sampled, num_rejected)
        run(
            _rejection_decide_kernel,
            num_rows,
            NUM_WARPS,
            *(*decision, length, steps, words, target_logits, draft, draft_token_ids),
            *(cu_num_logits, pos, idx_mapping, temperature, seeds),
            *(vocab, num_rows, num_slots, num_logits, num_steps, num_chunks, num_partials),
            *(*strides, stride_ids, stride_cu, stride_pos, stride_idx),
            *(has_draft, is_block, pdl, block_n, block_k),
        )
        if sums_residuals:
            mass = target_logits.new_empty(num_partials, dtype=torch.float32)
            run(
                _rejection_mass_kernel if aligned else _rejection_mass_unaligned_kernel,
                num_partials,
                NUM_WARPS,
                *(mass, steps, target_logits, draft, *state),
                *(vocab, num_rows, num_slots, num_logits, num_steps, num_chunks),
                *(*strides, stride_cu, stride_idx),
                *(pdl, CHUNK_V),
            )
            run(
                _rejection_extend_kernel,
                num_rows,
                NUM_WARPS,
                *(*decision, steps, mass, draft_token_ids, *state),
                *(num_rows, num_slots, num_logits, num_steps, num_chunks),
                *(stride_ids, stride_cu, stride_idx),
                *(pdl, block_n, block_k),
            )
        run(
            _rejection_draw_kernel if aligned else _rejection_draw_unaligned_kernel,
            num_words,
            NUM_WARPS,
            *(words, num_sampled, length, steps, target_logits, draft, draft_token_ids),
            *(cu_num_logits, pos, idx_mapping, temperature, seeds),
            *(vocab, num_rows, num_slots, num_logits, num_steps, num_tiles, num_words),
            *(*strides, stride_ids, stride_cu, stride_pos, stride_idx),
            *(use_fp64, has_draft, is_block and has_draft, pdl, TILE_V),
        )
        run(
            _rejection_finish_kernel,
            num_rows,
            FINISH_WARPS,
            *(tokens, num_sampled, length, words, num_steps, num_tiles, num_words),
            *(use_fp64, pdl, BLOCK_K),
        )
    return tokens, num_sampled, num_rejected


# 4 op


def rejection_sample(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    num_steps: int,
    method: str = "standard",
    use_fp64: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept draft tokens so that what is kept, and the token after it, follow the target's law.

    Args:
        target_logits: [L, V] bf16, f16 or f32, **logits, divided by temperature** and filtered as
            the target is sampled; rows may be strided, columns contiguous. Row
            ``cu_num_logits[b] + i`` follows draft token i, counted from 1, of row b.
        draft_logits: [S, C >= num_steps, >= V] bf16, f16 or f32, the ``logits_cache`` of the
            sampler that drew the draft: before temperature, column i - 1 for draft token i. Columns
            from V on are not read. None: the draft was greedy, or guessed; q is one-hot.
        draft_token_ids: i32 or i64 [L], any stride; draft token i of row b is at
            ``cu_num_logits[b] + i``, so that the entry of a row's first logit row is not read.
            Negative: a placeholder, which ends the draft. >= V: rejected.
        cu_num_logits: i32 [B + 1], any stride; row b has logit rows ``cu_num_logits[b]`` to
            ``cu_num_logits[b + 1]``, one more than draft tokens. Clamped to [0, L]; logit rows
            beyond the first ``num_steps + 1`` of a row count for nothing.
        pos: int [L], any stride; position that keys the draws of each logit row.
        idx_mapping: int [B], any stride; request slot of each row. Negative or >= S: inert row.
        temperature: f32 [S]. Below fp32(1e-5), negative, NaN or infinite: greedy. Divides
            ``draft_logits`` alone.
        seeds: i64 [S].
        num_steps: the most draft tokens of a row, 0 to 128.
        method: "standard" (token by token) or "block", which accepts at least as many on average.
        use_fp64: noise of the drawn token in f64.

    Returns:
        tokens i64 [B, num_steps + 1]: the accepted draft tokens, one more from the target or the
            residual, in [0, V), and -1 after it.
        num_sampled i32 [B]: how many that is, 0 for a row that is inert or without logits.
        num_rejected i32 [B]: the row's logit rows less ``num_sampled``, placeholders included.

    Raises:
        TypeError, ValueError: metadata that does not fit.
    """
    for name, x in (
        ("target_logits", target_logits),
        ("draft_token_ids", draft_token_ids),
        ("cu_num_logits", cu_num_logits),
        ("pos", pos),
        ("idx_mapping", idx_mapping),
        ("temperature", temperature),
        ("seeds", seeds),
    ):
        if not isinstance(x, Tensor):
            _checks.check_is_tensor(name, x)
    if draft_logits is not None:
        _checks.check_is_tensor("draft_logits", draft_logits)
    if type(num_steps) is not int:
        num_steps = _checks.as_int("num_steps", num_steps)
    if type(use_fp64) is not bool:
        _checks.check_is_bool("use_fp64", use_fp64)
    if not isinstance(method, str):
        raise TypeError(f"method must be a str, got {type(method).__name__}: {method!r}")
    requests = (cu_num_logits, pos, idx_mapping, temperature, seeds)
    arguments = (target_logits, draft_logits, draft_token_ids, *requests)
    flags = (num_steps, method, use_fp64)
    if is_plain_gpu_call(target_logits):
        return _rejection_sample_launch(*arguments, *flags)
    return torch.ops.dspark.rejection_sample.default(*arguments, *flags)


# 5 CPU


def _cpu(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(**arguments)
    if ACTIVE:
        count_requests_ref(**arguments)
    return rejection_sample_ref(**arguments)


# 6 fake


def _fake(
    target_logits: Tensor, idx_mapping: Tensor, num_steps: int, **arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(target_logits, idx_mapping=idx_mapping, num_steps=num_steps, **arguments)
    return _outputs(target_logits, idx_mapping, num_steps)


register(
    "rejection_sample(Tensor target_logits, Tensor? draft_logits, Tensor draft_token_ids"
    ", Tensor cu_num_logits, Tensor pos, Tensor idx_mapping, Tensor temperature, Tensor seeds"
    ', SymInt num_steps, str method="standard", bool use_fp64=False) -> (Tensor, Tensor, Tensor)',
    cpu=_cpu,
    cuda=_rejection_sample_launch,
    fake=_fake,
)


# 7 samples and serving calls


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): both methods, one-hot, ragged, strided, B = 0, odd V."""
    generator = torch.Generator(device).manual_seed(4)
    samples: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def add(
        drafts: list[int],
        vocab: int,
        num_steps: int,
        dtype: torch.dtype,
        stride: int = 1,
        **kwargs: Any,
    ) -> None:
        """Row b has ``drafts[b]`` draft tokens, -1 of a row without logits; the last is inert."""

        def spread(x: Tensor) -> Tensor:
            return x.repeat_interleave(stride, 0)[::stride]

        num_logits = sum(g + 1 for g in drafts)
        starts = torch.tensor([0, *(g + 1 for g in drafts)], device=device).cumsum(0)
        shape = (num_logits, vocab)
        target = torch.randn(shape, device=device, generator=generator).to(dtype)
        ids = torch.randint(-1, vocab + 1, (num_logits,), device=device, generator=generator)
        pos = torch.arange(num_logits, device=device) * 5
        idx_mapping = torch.arange(len(drafts), device=device)
        idx_mapping[-1:] = -1
        temperature = torch.tensor([1.0, 0.0, 0.7, 1.6], device=device)
        seeds = torch.arange(4, device=device) * 0x9E3779B97F4A7C1 - 5
        draft = None
        if kwargs.pop("has_draft", True):
            cached = (4, num_steps + 1, vocab + 3)
            draft = torch.randn(cached, device=device, generator=generator).to(dtype)[:, 1:, 1:]
        vectors = (ids, starts.int(), pos.int(), idx_mapping.int())
        arguments = (spread(target), draft, *(spread(x) for x in vectors), temperature, seeds)
        samples.append(("rejection_sample", arguments, {"num_steps": num_steps, **kwargs}))

    add([2, 3, 0, 3, 1], 1025, 3, torch.bfloat16)
    add([2, -1, 3, 1], 50, 3, torch.float32, 3, method="block", use_fp64=True)
    add([1, 2, 1], 7, 2, torch.float16, 2, method="block", has_draft=False)
    add([1, 1], 1, 1, torch.float32, use_fp64=True)
    add([0, 0], 9, 0, torch.float32)
    add([], 1024, 2, torch.float32)
    return samples


def serving_calls(serving: Serving) -> Iterator[Call]:
    for (args, kwargs), method in product(request_arguments(serving), METHODS):
        yield functools.partial(rejection_sample, *args, method=method, **kwargs)
