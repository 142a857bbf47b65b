"""Some 30 small launches of every op, variant and dtype, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    (also: --tool racecheck, --tool initcheck)

Without the caching allocator each tensor is an allocation of its own, so that a read or a write
past its end is seen. Outputs are not poisoned under initcheck, which would count the poison as a
write: pass ``--poison`` with the other tools. Results are compared with the CPU reference; the exit
status is 1 if one differs.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import dspark_ops
from dspark_ops import noise
from tests.ops import rejection_cases, rejection_model, top_k_top_p_cases
from tests.ops.prepare_batches import dflash_batch, positions_batch, put_any_values

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NOISE32 = 4e-7  # as tests/ops/tolerances.py has it

failures: list[str] = []


def inputs(rows: int, vocab: int, dtype: torch.dtype, strided: bool) -> tuple[Tensor, ...]:
    """On the CPU: logits, idx_mapping, temperature, seeds, pos; rows of every kind."""
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = (torch.randn(rows, 2, vocab, generator=generator) * 3).to(dtype)
    logits[1::4, :, vocab // 2] = float("nan")
    logits[2::4] = float("-inf")
    idx_mapping = torch.arange(rows, dtype=torch.int32)[:, None].repeat(1, 2) - 1
    pos = torch.arange(rows)[:, None].repeat(1, 2) * 3
    temperature = torch.tensor([1.0, 0.0, 0.7, -1.0, 1.6])[: max(rows, 1)].contiguous()
    seeds = torch.arange(len(temperature)) * 0x9E3779B97F4A7C1
    if strided:
        return logits[:, 1], idx_mapping[:, 1], temperature, seeds, pos[:, 1]
    row = (logits[:, 1].contiguous(), idx_mapping[:, 1].contiguous())
    return *row, temperature, seeds, pos[:, 1].contiguous()


def to_gpu(x: Any) -> Any:
    """A copy with the same strides; the buffer ends where the last element does."""
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 0:
        return x.cuda()
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((size,), (1,), x.storage_offset())
    return flat.cuda().as_strided(x.shape, x.stride())


def near_tie(args: tuple[Tensor, ...], kwargs: dict[str, Any], a: Tensor, b: Tensor) -> bool:
    """Whether ids that differ have noised values within the tolerance, by the fp64 logits."""
    logits = args[0].double() if kwargs.get("bias") is None else (args[0] + kwargs["bias"]).double()
    for row in (a != b).nonzero().flatten().tolist():
        slot = int(args[1][row])
        temperature = float(args[2][slot]) if 0 <= slot < len(args[2]) else 0.0
        if temperature < 1e-5:
            return False
        col = kwargs.get("cache_col") or 0
        col = int(col[row]) if isinstance(col, Tensor) and col.dim() else int(col)
        seed = args[3][slot] ^ (torch.tensor(col) << 32)
        offset = kwargs.get("pos_offset", 0) + (2**30 if kwargs.get("is_drafting") else 0)
        ids = torch.tensor([int(a[row]), int(b[row])])
        drawn = noise.gumbel_ref(seed, args[4][row] + offset, ids, kwargs.get("use_fp64", False))
        scaled = logits[row, ids]
        if kwargs.get("apply_temperature", True):
            scaled = scaled / temperature
        value = scaled + drawn
        scale = max(1.0, float(scaled.abs().max()), float(drawn.abs().max()))
        if not float((value[0] - value[1]).abs()) < NOISE32 * scale:
            return False
    return True


def compare(name: str, args: tuple[Tensor, ...], **kwargs: Any) -> None:
    """Call on the CPU and on the GPU; outputs and mutated arguments have to agree."""
    on_gpu = tuple(to_gpu(x) for x in args)
    gpu_kwargs = {k: to_gpu(v) for k, v in kwargs.items()}
    wanted = getattr(dspark_ops, name)(*args, **kwargs)
    actual = getattr(dspark_ops, name)(*on_gpu, **gpu_kwargs)
    torch.cuda.synchronize()
    ok = True
    if name == "gumbel_block_argmax":
        maxima = torch.nan_to_num(actual[0].cpu(), 1e30, 2e30, -2e30)
        limit = 1e-5 * (1 + maxima.abs().clamp(max=100))
        ok &= bool(((maxima - torch.nan_to_num(wanted[0], 1e30, 2e30, -2e30)).abs() <= limit).all())
        ids, wanted_ids = actual[1].cpu(), wanted[1]
        for block in range(ids.shape[1]):
            ok &= near_tie(args, kwargs, ids[:, block], wanted_ids[:, block])
    elif name == "gumbel_combine":
        ok &= torch.equal(actual.cpu(), wanted)
    else:
        ok &= near_tie(args, kwargs, actual.cpu(), wanted)
        if kwargs.get("draft_tokens") is not None:
            ok &= torch.equal(gpu_kwargs["draft_tokens"].long(), actual)
    if kwargs.get("logits_cache") is not None:
        cache, wanted_cache = gpu_kwargs["logits_cache"].cpu(), kwargs["logits_cache"]
        ok &= torch.equal(cache.nan_to_num(99.0), wanted_cache.nan_to_num(99.0))
    label = f"{name} {tuple(args[0].shape)} {args[0].dtype} {sorted(kwargs)}"
    print("ok    " if ok else "WRONG ", label, flush=True)
    if not ok:
        failures.append(label)


def cache_of(args: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    return torch.full((len(args[2]), 2, args[0].shape[1]), 7.0, dtype=dtype)


def samplers() -> None:
    """Every vocabulary edge in one dtype, then every dtype and option at V = 1025."""
    for vocab in (1, 7, 511, 512, 513, 1023, 1024, 1025, 2048, 2049):
        args = inputs(3, vocab, BF16, strided=vocab % 2 == 1)
        compare("gumbel_sample", args, bias=torch.ones(3, vocab, dtype=BF16))
        compare("gumbel_block_argmax", args)
    for dtype, bias_dtype in ((BF16, BF16), (F16, F16), (F32, F32), (BF16, F32), (F16, BF16)):
        summed = torch.promote_types(dtype, bias_dtype)
        args = inputs(5, 1025, dtype, strided=True)
        compare(
            "gumbel_sample",
            args,
            bias=torch.linspace(-1, 1, 1025).to(bias_dtype),
            logits_cache=cache_of(args, summed),
            cache_col=torch.tensor([0, 1, 2, 0, 1]),
            draft_tokens=torch.full((5, 3), -9, dtype=torch.int32)[:, 1],
            is_drafting=True,
        )
        compare("gumbel_block_argmax", args, logits_cache=cache_of(args, dtype), cache_col=1)
    for use_fp64 in (False, True):
        args = inputs(4, 1537, F32, strided=False)
        flags = {"use_fp64": use_fp64, "apply_temperature": False, "pos_offset": -1}
        compare("gumbel_sample", args, **flags)
        compare("gumbel_block_argmax", args, **flags)
        compare(
            "gumbel_sample",
            args,
            logits_cache=cache_of(args, F32),
            cache_col=torch.tensor(1),
            use_fp64=use_fp64,
        )
    args = inputs(0, 1025, F32, strided=False)
    compare("gumbel_sample", args)
    compare("gumbel_block_argmax", args)


def long_chunks() -> None:
    """Programs that walk several tiles, which at this size only a patch brings about."""
    module = sys.modules["dspark_ops.gumbel_sample"]
    kept = module._tiles_per_chunk
    for tiles in (2, 3, 5):
        module._tiles_per_chunk = lambda num_rows, vocab, tiles=tiles: tiles
        module._plans.clear()
        for use_fp64 in (False, True):
            args = inputs(4, 2049, BF16, strided=True)
            args[0][0] = 0.0
            compare(
                "gumbel_sample",
                args,
                bias=torch.zeros(1, 2049, dtype=BF16),
                logits_cache=cache_of(args, BF16),
                cache_col=0,
                use_fp64=use_fp64,
            )
    module._tiles_per_chunk = kept
    module._plans.clear()


def combine() -> None:
    for blocks, dtype in (
        (1, F32),
        (149, F32),
        (257, F32),
        (149, torch.float64),
        (257, torch.float64),
    ):
        generator = torch.Generator().manual_seed(blocks)
        block_max = torch.randn(3, blocks, generator=generator).to(dtype)
        block_max[1, blocks // 2] = float("nan")
        compare("gumbel_combine", (block_max, torch.arange(3 * blocks).view(3, blocks)))


def embedding() -> None:
    """The ops that also gather the next embedding have no public function."""
    args = inputs(3, 513, BF16, strided=True)
    weight = torch.randn(513, 300, generator=torch.Generator().manual_seed(1)).to(BF16)
    on_gpu = [to_gpu(x) for x in args]
    token, row = torch.ops.dspark.gumbel_sample_embed(*on_gpu, to_gpu(weight))
    torch.cuda.synchronize()
    ok = torch.equal(row.cpu(), weight[token.cpu()])
    ok &= near_tie(args, {}, token.cpu(), dspark_ops.gumbel_sample(*args))
    print("ok    " if ok else "WRONG ", "gumbel_sample_embed", flush=True)
    if not ok:
        failures.append("gumbel_sample_embed")


def prepare() -> None:
    """Random batches that equal the model; then values of any size, which have no result."""
    for name, make in (
        ("prepare_positions", positions_batch),
        ("prepare_dflash_inputs", dflash_batch),
    ):
        op = getattr(dspark_ops, name)
        for seed in range(20):
            batch = make(seed)
            views = batch.views(torch.from_numpy(batch.memory()))
            on_gpu = {k: to_gpu(x) for k, x in views.items()}
            op(**on_gpu, **batch.scalars)
            torch.cuda.synchronize()
            wanted = batch.views(torch.from_numpy(batch.expected()))
            ok = all(torch.equal(x.cpu(), wanted[k]) for k, x in on_gpu.items())
            label = f"{name} {seed}"
            print("ok    " if ok else "WRONG ", label, flush=True)
            if not ok:
                failures.append(label)
    for seed in range(20):
        batch = dflash_batch(seed)
        put_any_values(batch, seed)
        views = batch.views(torch.from_numpy(batch.memory()))
        on_gpu = {k: to_gpu(x) for k, x in views.items()}
        dspark_ops.prepare_dflash_inputs(**on_gpu, **batch.scalars)
        torch.cuda.synchronize()


def verification() -> None:
    """Both methods, one-hot and not, in each dtype; then starts, ids and slots of any size."""
    for number, (vocab, dtype) in enumerate(
        ((1, F32), (7, BF16), (1023, F16), (1025, BF16), (4097, BF16), (9001, F32))
    ):
        for method in rejection_cases.METHODS:
            for has_draft, use_fp64, any_values in (
                (True, False, False),
                (True, True, True),
                (False, False, True),
                (False, True, False),
            ):
                drafts = [3, 0, 5, -1, 1, 5]
                flags = {"dtype": dtype, "apart": 0.2, "has_draft": has_draft, "seed": number}
                batch = rejection_cases.make_batch("cpu", drafts, vocab, **flags)
                if any_values:
                    batch.cu_num_logits[2], batch.cu_num_logits[6] = -7, 2**31 - 1
                    batch.draft_token_ids[5:9] = torch.tensor([-1, vocab, 2**40, -(2**40)])
                    batch.idx_mapping[0], batch.idx_mapping[4] = 2**30, -(2**30)
                call = {"num_steps": 5, "method": method, "use_fp64": use_fp64}
                on_gpu = tuple(to_gpu(x) for x in batch.args)
                outputs = dspark_ops.rejection_sample(*on_gpu, **call)
                torch.cuda.synchronize()
                label = f"rejection_sample {vocab} {dtype} {has_draft} {call}"
                try:
                    rejection_model.assert_verified(
                        outputs, rejection_model.read(*batch.args, **call)
                    )
                    print("ok    ", label, flush=True)
                except AssertionError as error:
                    print("WRONG ", label, error, flush=True)
                    failures.append(label)


def filters() -> None:
    """Rows of every kind, one and both filters, in place inside a larger buffer and not."""
    for number, (vocab, pad) in enumerate(
        ((1, 0), (7, 2), (1023, 1), (1024, 0), (1025, 0), (4097, 3), (20000, 0), (151936, 1))
    ):
        rows = top_k_top_p_cases.rows_of_all_kinds(1, vocab + pad, number)[:, pad:]
        k, p = top_k_top_p_cases.make_filters(len(rows), vocab, number)
        for ks, ps, mask_value in ((k, p, -1e4), (k, None, float("-inf")), (None, p, 9.5)):
            wanted = torch.ops.dspark.top_k_top_p(rows, ks, ps, mask_value)
            args = tuple(to_gpu(x) for x in (rows, ks, ps))
            copied = torch.ops.dspark.top_k_top_p(*args, mask_value)
            in_place = dspark_ops.top_k_top_p_(*args, mask_value=mask_value)
            torch.cuda.synchronize()
            same = top_k_top_p_cases.same_bits
            ok = same(copied, wanted) and same(in_place, wanted)
            label = f"top_k_top_p_ {tuple(rows.shape)} {ks is not None} {ps is not None}"
            print("ok    " if ok else "WRONG ", label, flush=True)
            if not ok:
                failures.append(label)


def main() -> int:
    if "--poison" in sys.argv[1:]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    samplers()
    long_chunks()
    combine()
    embedding()
    prepare()
    verification()
    filters()
    print(f"{len(failures)} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
