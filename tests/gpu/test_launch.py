"""What a call costs beside its result: memory, copies, compilations; which kernel is launched."""

import importlib
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_ops

from .cases import make_bias, make_cache, make_inputs, same_bits, unfused
from .compilations import compilations

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BF16, F32 = torch.bfloat16, torch.float32
VOCAB = 151936


def test_one_gigabyte_of_cache_is_written_in_place() -> None:
    """Peak memory grows by less than 10 MB, and the cache stays where it is."""
    rows = 64
    inputs = make_inputs(rows, VOCAB, BF16)
    bias = make_bias(rows, VOCAB, BF16)
    cache = torch.full((rows + 1, 54, VOCAB), 7.0, dtype=BF16, device="cuda")
    assert cache.numel() * cache.element_size() > 1e9
    tokens = torch.zeros(rows, 7, dtype=torch.int32, device="cuda")
    address = cache.data_ptr()

    def fused(col: int | Tensor) -> Any:
        return dspark_ops.gumbel_sample(
            *inputs.args,
            bias=bias,
            logits_cache=cache,
            cache_col=col,
            draft_tokens=tokens[:, 3],
        )

    def blocks(col: int | Tensor) -> Any:
        return dspark_ops.gumbel_block_argmax(*inputs.args, logits_cache=cache, cache_col=col)

    for call, col in product((fused, blocks), (3, torch.tensor(4, device="cuda"))):
        call(col)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(col)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 10e6
        assert cache.data_ptr() == address
    live = inputs.idx_mapping >= 0
    slots = inputs.idx_mapping[live].long()
    assert same_bits(cache[slots, 3], inputs.logits[live])
    assert (cache[:, 5:] == 7.0).all()


def test_no_compilation_over_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After B = 2 and 3 nothing is compiled up to 64; the hook is seen to fire before and after."""
    module = importlib.import_module("dspark_ops.gumbel_sample")
    for name in ("gumbel_sample_kernel", "gumbel_block_argmax", "gumbel_combine"):
        kernels = vars(importlib.import_module(f"dspark_ops.{name}"))
        for kernel in [k for n, k in kernels.items() if n.endswith("_kernel")]:
            kernel.device_caches.clear()  # other tests may have met the same variants
    monkeypatch.setattr(module, "_plans", {})

    def call(rows: int) -> None:
        inputs = make_inputs(rows, VOCAB, BF16)
        # Contiguous metadata as well as columns: their strides must not compile anything.
        inputs.idx_mapping = inputs.idx_mapping.contiguous()
        cache = make_cache(65, VOCAB, BF16)
        tokens = torch.zeros(rows, 7, dtype=torch.int32, device="cuda")
        inputs.temperature = torch.ones(65, device="cuda")
        inputs.seeds = torch.arange(65, device="cuda")
        dspark_ops.gumbel_sample(
            *inputs.args,
            bias=make_bias(rows, VOCAB, BF16),
            logits_cache=cache,
            cache_col=rows % 3,
            draft_tokens=tokens[:, 2],
            pos_offset=rows - 3,
            is_drafting=True,
        )
        blocks = dspark_ops.gumbel_block_argmax(
            *inputs.args, logits_cache=cache, cache_col=rows % 3, pos_offset=rows - 3
        )
        dspark_ops.gumbel_combine(*blocks)

    with compilations() as seen:
        call(2)
        call(3)
    compiled = " ".join(seen)
    assert "_gumbel_sample_kernel[" in compiled
    assert "_gumbel_sample_finish_kernel[" in compiled
    assert "_gumbel_block_argmax_kernel[" in compiled
    assert "_gumbel_combine_kernel[" in compiled
    with compilations() as seen:
        for rows in range(2, 65):
            call(rows)
    assert seen == []
    monkeypatch.setattr(module, "NUM_WARPS", 2)
    monkeypatch.setattr(module, "_plans", {})
    with compilations() as seen:
        call(2)
    assert len(seen) == 1


def misaligned(x: Tensor, skip: int) -> Tensor:
    """A copy of ``x`` that starts ``skip`` elements into a buffer, in its last dimension."""
    buffer = x.new_zeros(*x.shape[:-1], x.shape[-1] + skip)
    buffer[..., skip:] = x
    return buffer[..., skip:]


def test_b6_02_sliced_metadata_compiles_nothing() -> None:
    """idx[1:], pos[3:], seeds[1:], temperature[1:] and a column of tokens at an odd address."""
    inputs = make_inputs(6, 5008, BF16, seed=3)
    inputs.idx_mapping, inputs.pos = inputs.idx_mapping.contiguous(), inputs.pos.contiguous()
    bias = make_bias(6, 5008, BF16)
    cols = torch.tensor([0, 1, 0, 1, 0, 1], device="cuda")

    def call(args: tuple[Tensor, ...], cols: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        cache = make_cache(7, 5008, BF16)
        kwargs = {"logits_cache": cache, "cache_col": cols}
        token = dspark_ops.gumbel_sample(*args, bias=bias, draft_tokens=tokens, **kwargs)
        blocks = dspark_ops.gumbel_block_argmax(*args, **kwargs)
        return token, tokens.clone(), cache, *blocks, dspark_ops.gumbel_combine(*blocks)

    tokens = torch.full((9,), -9, dtype=torch.int32, device="cuda")
    aligned = call(inputs.args, cols, tokens[:6])
    logits, idx, temperature, seeds, pos = inputs.args
    metadata = ((idx, 1), (temperature, 1), (seeds, 1), (pos, 3))
    shifted = (logits, *(misaligned(x, skip) for x, skip in metadata))
    with compilations() as seen:
        sliced = call(shifted, misaligned(cols, 1), tokens[1:7])
    assert seen == []
    assert all(same_bits(x, y) for x, y in zip(aligned, sliced, strict=True))


def test_b6_02_misaligned_combine_compiles_nothing() -> None:
    block_max = torch.randn(4, 149, device="cuda")
    ids = torch.arange(4 * 149, device="cuda").view(4, 149)
    wanted = dspark_ops.gumbel_combine(block_max, ids)
    with compilations() as seen:
        assert torch.equal(
            dspark_ops.gumbel_combine(misaligned(block_max, 1), misaligned(ids, 1)), wanted
        )
    assert seen == []


@pytest.mark.parametrize("vocab", [1024, 5008])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_b6_02_misaligned_logits_bias_and_cache(vocab: int, dtype: torch.dtype) -> None:
    """Rows at odd addresses, by turns with aligned ones of equal metadata: right each time.

    A launcher that keeps compiled variants must not read a misaligned row in vectors.
    """
    rows = 5
    inputs = make_inputs(rows, vocab, dtype, seed=4)
    bias = make_bias(rows, vocab, dtype)

    def padded(x: Tensor, skip: int) -> Tensor:
        """Rows of stride vocab + 16 whose first element lies ``skip`` elements in."""
        buffer = x.new_zeros(*x.shape[:-1], vocab + 16)
        view = buffer[..., skip : skip + vocab]
        view.copy_(x)
        return view

    wanted_cache = make_cache(rows + 1, vocab, dtype)[..., :vocab]
    wanted = unfused(inputs, bias, logits_cache=wanted_cache, cache_col=1)
    base = inputs.logits
    for skips in [*product((0, 1), repeat=3), (0, 0, 0), (8, 8, 8), (3, 0, 8), (0, 0, 0)]:
        inputs.logits = padded(base, skips[0])
        cache = padded(torch.full_like(wanted_cache, 7.0), skips[2])
        token = dspark_ops.gumbel_sample(
            *inputs.args, bias=padded(bias, skips[1]), logits_cache=cache, cache_col=1
        )
        assert torch.equal(token, wanted), skips
        assert same_bits(cache, wanted_cache), skips
        cache = padded(torch.full_like(wanted_cache, 7.0), skips[2])
        summed = inputs.logits + padded(bias, skips[1])
        blocks = dspark_ops.gumbel_block_argmax(
            padded(summed, skips[0]), *inputs.args[1:], logits_cache=cache, cache_col=1
        )
        assert torch.equal(dspark_ops.gumbel_combine(*blocks), wanted), skips
        assert same_bits(cache, wanted_cache), skips


def test_logits_without_their_first_column() -> None:
    """logits[:, 1:]: the slice itself, rows at alternating alignment."""
    inputs = make_inputs(6, 1025, BF16, seed=5)
    sliced = inputs.logits[:, 1:]
    inputs.logits = sliced.clone()
    wanted = unfused(inputs)
    inputs.logits = sliced
    assert torch.equal(dspark_ops.gumbel_sample(*inputs.args), wanted)
    assert torch.equal(unfused(inputs), wanted)


def test_flags_by_turns_on_equal_metadata() -> None:
    """Every combination of flags, twice over: no variant is taken for another."""
    inputs = make_inputs(7, 2000, BF16, seed=6)
    bias = make_bias(7, 2000, BF16)
    flags = list(product((False, True), (False, True), (False, True), (0, 5), (0, 1, 9)))
    for _ in range(2):
        for drafting, apply_temperature, use_fp64, offset, col in flags:
            caches = [make_cache(8, 2000, BF16) for _ in range(2)]
            kwargs = {
                "is_drafting": drafting,
                "apply_temperature": apply_temperature,
                "use_fp64": use_fp64,
                "pos_offset": offset,
                "cache_col": col,
            }
            token = dspark_ops.gumbel_sample(
                *inputs.args, bias=bias, logits_cache=caches[0], **kwargs
            )
            assert torch.equal(token, unfused(inputs, bias, logits_cache=caches[1], **kwargs))
            assert same_bits(caches[0], caches[1])


def test_optional_arguments_by_turns() -> None:
    """With and without bias, cache, token column: no plan is taken for another."""
    inputs = make_inputs(7, 2000, BF16, seed=7)
    for _ in range(2):
        for has_bias, has_cache, dtype in product(
            (False, True), (False, True), (None, torch.int32, torch.int64)
        ):
            bias = make_bias(7, 2000, BF16) if has_bias else None
            kwargs: list[dict[str, Any]] = [{}, {}]
            if has_cache:
                kwargs = [
                    {"logits_cache": make_cache(8, 2000, BF16), "cache_col": 1} for _ in kwargs
                ]
            wanted = unfused(inputs, bias, **kwargs[0])
            tokens = None if dtype is None else torch.zeros(7, 2, dtype=dtype, device="cuda")
            column = None if tokens is None else tokens[:, 1]
            token = dspark_ops.gumbel_sample(
                *inputs.args, bias=bias, draft_tokens=column, **kwargs[1]
            )
            assert torch.equal(token, wanted)
            assert column is None or torch.equal(column.long(), wanted)
            if has_cache:
                assert same_bits(kwargs[0]["logits_cache"], kwargs[1]["logits_cache"])


def test_op_and_public_function_agree() -> None:
    """The function skips the dispatcher for plain tensors; through it the result is the same."""
    inputs = make_inputs(5, 3000, BF16, seed=8)
    bias = make_bias(5, 3000, BF16)
    direct = dspark_ops.gumbel_sample(*inputs.args, bias=bias)
    assert torch.equal(torch.ops.dspark.gumbel_sample(*inputs.args, bias), direct)
    weight = make_bias(3000, 300, BF16, seed=2)
    token, embedding = torch.ops.dspark.gumbel_sample_embed(*inputs.args, weight, bias)
    assert torch.equal(token, direct)
    assert torch.equal(embedding, weight[direct])


def test_launches_on_the_current_stream() -> None:
    """Inputs that become ready late on a side stream are waited for there."""
    inputs = make_inputs(4, VOCAB, BF16, seed=9)
    wanted = dspark_ops.gumbel_sample(*inputs.args)
    late = inputs.logits.clone()
    inputs.logits.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        inputs.logits.copy_(late)
        token = dspark_ops.gumbel_sample(*inputs.args)
    stream.synchronize()
    assert torch.equal(token, wanted)


def test_inputs_on_another_device_than_the_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(4, 3000, BF16, seed=10)
    wanted = dspark_ops.gumbel_sample(*inputs.args)
    there = tuple(x.to("cuda:1") for x in inputs.args)
    token = dspark_ops.gumbel_sample(*there)
    assert token.device == torch.device("cuda:1")
    assert torch.equal(token.cpu(), wanted.cpu())


def test_bad_metadata_on_a_gpu_writes_nothing() -> None:
    inputs = make_inputs(4, 100, BF16)
    cache = make_cache(5, 100, BF16)
    tokens = torch.full((4,), -9, device="cuda")
    good: dict[str, Any] = {"logits_cache": cache, "cache_col": 0, "draft_tokens": tokens}
    cpu = "must be on cuda:0.*; got cpu"
    for name, value, text in (
        ("logits_cache", cache.half(), "logits_cache must have the dtype"),
        ("cache_col", -1, "cache_col must be in .*; got -1"),
        ("cache_col", torch.tensor(0), f"cache_col {cpu}"),
        ("draft_tokens", tokens[:3], "draft_tokens must have shape"),
        ("draft_tokens", tokens.cpu(), f"draft_tokens {cpu}"),
        ("bias", torch.ones(4, 100), f"bias {cpu}"),
        ("bias", torch.ones(3, 100, device="cuda"), "bias must have shape"),
    ):
        for _ in range(2):  # a refused call leaves no plan that a second one could find
            with pytest.raises((TypeError, ValueError), match=text):
                dspark_ops.gumbel_sample(*inputs.args, **{**good, name: value})
    for position, name in ((1, "idx_mapping"), (2, "temperature"), (3, "seeds"), (4, "pos")):
        args = list(inputs.args)
        args[position] = args[position].cpu()
        with pytest.raises(ValueError, match=f"{name} {cpu}"):
            dspark_ops.gumbel_sample(*args, **good)
    assert (cache == 7.0).all()
    assert (tokens == -9).all()
