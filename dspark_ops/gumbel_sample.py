"""gumbel_sample: add, round, cache, noise, maximum, draft column and next embedding, in two launches.

    sum[b, v] = round(logits[b, v] + bias[b, v])                      # as torch.add rounds it
    token[b]  = argmax_v(sum[b, v] / temperature[s] + gumbel(...)),   s = idx_mapping[b]
    logits_cache[s, cache_col, :V] = sum[b];  draft_tokens[b] = token[b];  embedding[b] = weight[token[b]]

Equal, bit for bit, to ``torch.add`` + ``gumbel_block_argmax`` + argmax + gather on the same device; see
there for the contract. ``draft_tokens`` gets the id of every row, inert ones too. Bytes that must move:
logits, bias and cache once each.

A program walks a chunk of a row's vocabulary tile by tile and keeps the best. Logarithms are the cost of
a large batch, and only an element that can still win needs them: a tile is skipped when no logit of it
plus ``gumbel_bound`` exceeds the best so far. Rounding is monotonic and the bound is never below the
noise, so a skipped value is at most the best; equal, it loses the tie to the lower id. The result is
exactly that of computing every value.
"""

from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._library import register
from dspark_ops._triton import require_triton, tl, triton
from dspark_ops.gumbel_block_argmax import (
    CACHE_ARGS,
    FLAG_ARGS,
    SAMPLER_ARGS,
    check_sampler,
    columns_ref,
    key_offset,
    noised_logits_ref,
    noised_values,
    sampler_arguments,
    write_cache_ref,
)
from dspark_ops.gumbel_block_argmax import sample_inputs as block_sample_inputs
from dspark_ops.gumbel_combine import combine_row
from dspark_ops.noise import (
    GUMBEL_HIGH_STREAM,
    GUMBEL_STREAM,
    gumbel_bound,
    hash_finish,
    hash_prefix,
)
from dspark_ops.ordered import argmax_first, ordered_key
from dspark_ops.rounding import round_to
from dspark_ops.rows import load_row, rows_ref

# 1 reference


def gumbel_sample_ref(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> Tensor:
    if bias is not None:
        logits = logits + bias
    cols = None if logits_cache is None else columns_ref(cache_col, cache_cols, idx_mapping)
    offset = key_offset(pos_offset, is_drafting)
    rows = rows_ref(idx_mapping, temperature, seeds, pos, offset, cols)
    if logits_cache is not None:
        write_cache_ref(logits_cache, logits, rows, cols)
    token = noised_logits_ref(logits, rows, apply_temperature, use_fp64).argmax(-1)
    if draft_tokens is not None:
        draft_tokens.copy_(token)
    return token


# 2 kernel


@triton.jit(
    do_not_specialize=[
        "V",
        "num_slots",
        "num_cols",
        "num_chunks",
        "tiles_per_chunk",
        "num_partials",
    ]
    + ["col", "offset", "stride_idx_b", "stride_pos_b", "stride_col_b"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "temperature_ptr", "seeds_ptr"]
    + ["pos_ptr", "col_ptr", "partial_ptr"],
)
def _gumbel_sample_kernel(
    partial_ptr,
    logits_ptr,
    bias_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    pos_ptr,
    cache_ptr,
    col_ptr,
    V,
    num_slots,
    num_cols,
    num_chunks,
    tiles_per_chunk,
    num_partials,
    col,
    offset,
    stride_logits_b,
    stride_bias_b,
    stride_idx_b,
    stride_pos_b,
    stride_col_b,
    stride_cache_s,
    stride_cache_c,
    SUM_DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    HAS_COL_PTR: tl.constexpr,
    APPLY_TEMPERATURE: tl.constexpr,
    USE_FP64: tl.constexpr,
    TILE_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)  # one axis: the others end at 65535
    row = program // num_chunks
    first_tile = (program % num_chunks).to(tl.int32) * tiles_per_chunk
    slot, live, sampled, temperature, seed, pos, column = load_row(
        row,
        idx_mapping_ptr,
        temperature_ptr,
        seeds_ptr,
        pos_ptr,
        col_ptr,
        num_slots,
        col,
        offset,
        stride_idx_b,
        stride_pos_b,
        stride_col_b,
        HAS_COL_PTR,
    )
    written = live
    cache_row = cache_ptr
    if HAS_CACHE:
        written = live & (column >= 0) & (column < num_cols)
        cache_row = cache_ptr + slot * stride_cache_s + column * stride_cache_c
        seed ^= column << 32
    logits_row = logits_ptr + row * stride_logits_b
    bias_row = bias_ptr + row * stride_bias_b
    # The bound needs one hash: the noise's own in fp32, the complement of the high word in fp64.
    bound_prefix = hash_prefix(seed, pos, GUMBEL_HIGH_STREAM if USE_FP64 else GUMBEL_STREAM)

    none = -0x8000000000000000 if USE_FP64 else -0x80000000
    best_key = tl.full((), none, tl.int64 if USE_FP64 else tl.int32)
    best = tl.full((), float("-inf"), tl.float64 if USE_FP64 else tl.float32)
    best_id = tl.full((), 0, tl.int32)
    for tile in range(first_tile, first_tile + tiles_per_chunk):
        offs_v = tile * TILE_V + tl.arange(0, TILE_V)
        mask_v = offs_v < V
        x = tl.load(logits_row + offs_v, mask=mask_v, other=float("-inf"))
        if HAS_BIAS:
            bias = tl.load(bias_row + offs_v, mask=mask_v, other=0.0)
            x = round_to(x.to(tl.float32) + bias.to(tl.float32), SUM_DTYPE)
        if HAS_CACHE:
            tl.store(cache_row + offs_v, x, mask=mask_v & written)
        x = x.to(tl.float32)

        bound = x
        if sampled:
            r = hash_finish(bound_prefix, offs_v)
            if USE_FP64:
                r = ~r
            if APPLY_TEMPERATURE:
                bound = tl.where(temperature == 1.0, x, x / temperature)
            bound += gumbel_bound(r)
        # A NaN may win. Its best is NaN, below which nothing compares, so it then stays.
        highest = tl.max(tl.where(bound == bound, bound, float("inf")), axis=0)
        if USE_FP64:
            # The sum above rounded to f32, its exact value may be half an ulp higher.
            highest = highest.to(tl.float64)
            highest += tl.abs(highest) * 1.1920928955078125e-07
        if (highest > best) | (tile == first_tile):
            value = noised_values(
                x, offs_v, sampled, temperature, seed, pos, APPLY_TEMPERATURE, USE_FP64
            )
            key, key_id = argmax_first(ordered_key(value), offs_v, mask_v, none)
            if key > best_key:
                best_key = key
                best_id = key_id
                # One lane is not zero, so the sum is that lane, NaN and infinities included.
                best = tl.sum(tl.where(offs_v == key_id, value, 0.0), axis=0)
    tl.store(partial_ptr + program, best_key.to(tl.int64))
    tl.store(partial_ptr + num_partials + program, best_id.to(tl.int64))


@triton.jit(
    do_not_specialize=["num_chunks", "num_partials", "stride_draft_b"],
    do_not_specialize_on_alignment=["token_ptr", "draft_ptr", "partial_ptr"],
)
def _gumbel_sample_finish_kernel(
    token_ptr,
    draft_ptr,
    embedding_ptr,
    partial_ptr,
    weight_ptr,
    num_chunks,
    num_partials,
    R,
    stride_draft_b,
    stride_weight_v,
    HAS_DRAFT: tl.constexpr,
    HAS_EMBED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    keys = partial_ptr + row * num_chunks
    token = combine_row(keys, keys + num_partials, num_chunks, BLOCK_K)
    tl.store(token_ptr + row, token)
    if HAS_DRAFT:
        tl.store(draft_ptr + row * stride_draft_b, token.to(draft_ptr.dtype.element_ty))
    if HAS_EMBED:
        for start in range(0, R, BLOCK_R):
            offs_r = start + tl.arange(0, BLOCK_R)
            mask_r = offs_r < R
            weight = tl.load(weight_ptr + token * stride_weight_v + offs_r, mask=mask_r, other=0.0)
            tl.store(embedding_ptr + row * R + offs_r, weight, mask=mask_r)


# 3 launcher

TILE_V = 1024
BLOCK_K = 256
BLOCK_R = 256
_TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def chunks(num_rows: int, vocab: int) -> tuple[int, int]:
    """(chunks a row, tiles a chunk)."""
    tiles = (vocab + TILE_V - 1) // TILE_V
    tiles_per_chunk = max(1, tiles * num_rows // 2048)
    return (tiles + tiles_per_chunk - 1) // tiles_per_chunk, tiles_per_chunk


def _check(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    bias: Tensor | None,
    logits_cache: Tensor | None,
    cache_col: int,
    cache_cols: Tensor | None,
    draft_tokens: Tensor | None,
    embed_weight: Tensor | None,
) -> torch.dtype:
    """Raise for metadata that does not fit; return the dtype of the sum."""
    check_sampler(logits, idx_mapping, temperature, seeds, pos)
    num_rows, vocab = logits.shape
    device = logits.device
    dtype = logits.dtype
    if bias is not None:
        if bias.dtype not in _checks.LOGITS_DTYPES:
            _checks.check_dtype("bias", bias, _checks.LOGITS_DTYPES)
        if bias.dtype != dtype:
            dtype = torch.promote_types(dtype, bias.dtype)
        if (
            bias.dim() not in (1, 2)
            or bias.shape[-1] != vocab
            or (bias.dim() == 2 and bias.shape[0] != num_rows and bias.shape[0] != 1)
        ):
            raise ValueError(
                f"bias must have shape [B, V], [1, V] or [V] with [B, V] = [{num_rows}, {vocab}]; "
                f"got {tuple(bias.shape)}"
            )
        if bias.device != device:
            _checks.check_device("bias", bias, device)
        if bias.stride(-1) != 1 and vocab > 1:
            _checks.check_last_stride("bias", bias)
    if logits_cache is not None:
        _checks.check_cache(logits_cache, temperature.shape[0], vocab, dtype, device)
        _checks.check_cache_col(cache_col, cache_cols, num_rows, device)
    if draft_tokens is not None:
        _checks.check_row_ints("draft_tokens", draft_tokens, num_rows, device)
    if embed_weight is not None:
        if embed_weight.dim() != 2 or embed_weight.shape[0] < vocab:
            raise ValueError(
                f"embed_weight must have shape [>= V, R] with V = {vocab}; "
                f"got {tuple(embed_weight.shape)}"
            )
        _checks.check_device("embed_weight", embed_weight, device)
        _checks.check_last_stride("embed_weight", embed_weight)
    return dtype


def _gumbel_sample_launch(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    embed_weight: Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
) -> Any:
    require_triton("gumbel_sample")
    dtype = _check(
        logits,
        idx_mapping,
        temperature,
        seeds,
        pos,
        bias,
        logits_cache,
        cache_col,
        cache_cols,
        draft_tokens,
        embed_weight,
    )
    num_rows, vocab = logits.shape
    token = idx_mapping.new_empty(num_rows, dtype=torch.int64)
    embedding = None
    if embed_weight is not None:
        embedding = embed_weight.new_empty(num_rows, embed_weight.shape[1])
    if num_rows > 0:
        num_chunks, tiles_per_chunk = chunks(num_rows, vocab)
        num_partials = num_rows * num_chunks
        partial = token.new_empty(2, num_partials)  # ordered keys, ids
        has_bias = bias is not None
        has_cache = logits_cache is not None
        has_col_ptr = cache_cols is not None
        _gumbel_sample_kernel[(num_partials,)](
            partial_ptr=partial,
            logits_ptr=logits,
            bias_ptr=bias if has_bias else logits,
            idx_mapping_ptr=idx_mapping,
            temperature_ptr=temperature,
            seeds_ptr=seeds,
            pos_ptr=pos,
            cache_ptr=logits_cache if has_cache else logits,
            col_ptr=cache_cols if has_col_ptr else pos,
            V=vocab,
            num_slots=temperature.shape[0],
            num_cols=logits_cache.shape[1] if has_cache else 0,
            num_chunks=num_chunks,
            tiles_per_chunk=tiles_per_chunk,
            num_partials=num_partials,
            col=cache_col,
            offset=key_offset(pos_offset, is_drafting),
            stride_logits_b=logits.stride(0),
            stride_bias_b=bias.stride(0) if has_bias and bias.dim() == 2 and len(bias) > 1 else 0,
            stride_idx_b=idx_mapping.stride(0),
            stride_pos_b=pos.stride(0),
            stride_col_b=cache_cols.stride(0) if has_col_ptr and cache_cols.dim() else 0,
            stride_cache_s=logits_cache.stride(0) if has_cache else 0,
            stride_cache_c=logits_cache.stride(1) if has_cache else 0,
            SUM_DTYPE=_TL_DTYPE[dtype],
            HAS_BIAS=has_bias,
            HAS_CACHE=has_cache,
            HAS_COL_PTR=has_col_ptr,
            APPLY_TEMPERATURE=apply_temperature,
            USE_FP64=use_fp64,
            TILE_V=TILE_V,
            num_warps=4,
        )
        has_draft = draft_tokens is not None
        has_embed = embed_weight is not None
        _gumbel_sample_finish_kernel[(num_rows,)](
            token_ptr=token,
            draft_ptr=draft_tokens if has_draft else token,
            embedding_ptr=embedding if has_embed else token,
            partial_ptr=partial,
            weight_ptr=embed_weight if has_embed else token,
            num_chunks=num_chunks,
            num_partials=num_partials,
            R=embed_weight.shape[1] if has_embed else 0,
            stride_draft_b=draft_tokens.stride(0) if has_draft else 0,
            stride_weight_v=embed_weight.stride(0) if has_embed else 0,
            HAS_DRAFT=has_draft,
            HAS_EMBED=has_embed,
            BLOCK_K=BLOCK_K,
            BLOCK_R=BLOCK_R,
            num_warps=2,
        )
    return token if embedding is None else (token, embedding)


# 4 op

DRAFT_ARGS = "Tensor(b!) draft_tokens, "
EMBED_ARGS = "Tensor embed_weight, "


def gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int | Tensor | None = None,
    pos_offset: int = 0,
    is_drafting: bool = False,
    apply_temperature: bool = True,
    use_fp64: bool = False,
    draft_tokens: Tensor | None = None,
) -> Tensor:
    """Sample a token a row from ``softmax((logits + bias) / temperature)`` by the Gumbel-max trick.

    Args:
        logits: [B, V] bf16, f16 or f32; rows may be strided, columns contiguous.
        idx_mapping, temperature, seeds, pos: as in ``gumbel_block_argmax``.
        bias: [B, V], [1, V] or [V] bf16, f16 or f32, added and rounded as ``torch.add`` does.
        logits_cache: [S, C, >= V] of the dtype of the sum, which is written to it before temperature.
            Must not overlap ``logits`` or ``bias``.
        cache_col, pos_offset, is_drafting, apply_temperature, use_fp64: as there.
        draft_tokens: int [B], any stride, written in place with the id of every row.

    Returns:
        i64 [B], ids in [0, V).

    Raises:
        TypeError, ValueError: metadata that does not fit; nothing has been written then.
    """
    arguments, kwargs = sampler_arguments(
        logits, idx_mapping, temperature, seeds, pos, logits_cache, cache_col, pos_offset
    )
    name = "gumbel_sample"
    if bias is not None:
        _checks.check_is_tensor("bias", bias)
        kwargs["bias"] = bias
    if logits_cache is not None:
        name += "_cache"
    if draft_tokens is not None:
        _checks.check_is_tensor("draft_tokens", draft_tokens)
        name += "_draft"
        kwargs["draft_tokens"] = draft_tokens
    kwargs.update(is_drafting=is_drafting, apply_temperature=apply_temperature, use_fp64=use_fp64)
    return getattr(torch.ops.dspark, name).default(*arguments, **kwargs)


# 5 CPU


def _cpu(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    embed_weight: Tensor | None = None,
    **flags: Any,
) -> Any:
    arguments = (logits, idx_mapping, temperature, seeds, pos)
    cache = (logits_cache, cache_col, cache_cols)
    _check(*arguments, bias, *cache, draft_tokens, embed_weight)
    token = gumbel_sample_ref(
        *arguments,
        bias=bias,
        logits_cache=logits_cache,
        cache_col=cache_col,
        cache_cols=cache_cols,
        draft_tokens=draft_tokens,
        **flags,
    )
    return token if embed_weight is None else (token, embed_weight[token])


# 6 fake


def _fake(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    pos: Tensor,
    *,
    bias: Tensor | None = None,
    logits_cache: Tensor | None = None,
    cache_col: int = 0,
    cache_cols: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    embed_weight: Tensor | None = None,
    **flags: Any,
) -> Any:
    arguments = (logits, idx_mapping, temperature, seeds, pos)
    cache = (logits_cache, cache_col, cache_cols)
    _check(*arguments, bias, *cache, draft_tokens, embed_weight)
    token = logits.new_empty(logits.shape[0], dtype=torch.int64)
    if embed_weight is None:
        return token
    return token, embed_weight.new_empty(logits.shape[0], embed_weight.shape[1])


# An optional mutated argument crashes the compiler, so each combination is an op of its own.
for _embed in ("", "_embed"):
    for _cache in ("", "_cache"):
        for _draft in ("", "_draft"):
            register(
                f"gumbel_sample{_embed}{_cache}{_draft}(Tensor logits, {SAMPLER_ARGS}"
                f"Tensor? bias=None, {CACHE_ARGS if _cache else ''}{DRAFT_ARGS if _draft else ''}"
                f"{EMBED_ARGS if _embed else ''}{FLAG_ARGS})"
                f" -> {'(Tensor, Tensor)' if _embed else 'Tensor'}",
                cpu=_cpu,
                cuda=_gumbel_sample_launch,
                fake=_fake,
            )


# 7 samples


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): those of ``gumbel_block_argmax`` with every new argument."""
    generator = torch.Generator(device).manual_seed(3)
    samples: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []
    for case, (_, arguments, kwargs) in enumerate(block_sample_inputs(device)):
        num_rows, vocab = arguments[0].shape
        dtype = arguments[0].dtype
        shape = ((num_rows, vocab), (vocab,), (1, vocab))[case % 3]
        for embed in ("", "_embed"):
            for draft in ("", "_draft"):
                options = dict(kwargs)
                options["bias"] = torch.randn(shape, device=device, generator=generator).to(dtype)
                if draft:
                    tokens = torch.full((num_rows, 3), -1, device=device, dtype=torch.int32)
                    options["draft_tokens"] = tokens[:, 1]
                if embed:
                    weight = torch.randn(vocab + 1, 6, device=device, generator=generator)
                    options["embed_weight"] = weight[:, :5]
                cache = "_cache" if "logits_cache" in kwargs else ""
                samples.append((f"gumbel_sample{embed}{cache}{draft}", arguments, options))
        samples.append((f"gumbel_sample{cache}", arguments, dict(kwargs)))
    return samples
