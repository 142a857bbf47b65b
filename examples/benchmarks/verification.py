"""Time `rejection_sample` against the floor of its bytes.

    python examples/benchmarks/verification.py

Medians of CUDA-graph replays. The floor is every target row and draft column once, at the copy
bandwidth of the same run. Drafts come from logits near the target's, so that some are rejected at
each position. B requests, N drafted tokens each, V vocabulary.
"""

import sys
from typing import Any

import torch
from timing import copy_bytes_per_us, kernels, replay_us
from torch import Tensor

import dspark_ops

# V, N, B
SHAPES = (
    *((151936, 7, rows) for rows in (1, 8, 32, 128, 256)),
    *((vocab, 7, 32) for vocab in (32000, 129280, 248320)),
    *((151936, steps, 32) for steps in (1, 3, 15)),
)


def make_batch(vocab: int, steps: int, rows: int) -> dict[str, Any]:
    """f32 target logits, bf16 cache: what a server has. Every fourth request is greedy."""
    generator = torch.Generator("cuda").manual_seed(vocab + steps * rows)
    logits = torch.empty(rows, steps + 1, vocab, device="cuda")
    logits.normal_(0, 3, generator=generator)
    noise = torch.randn(rows, steps, vocab, device="cuda", generator=generator)
    cache = (logits[:, :steps] + noise).bfloat16()
    row = torch.arange(rows, device="cuda")
    temperature = torch.ones(rows, device="cuda")
    temperature[3::4] = 0.0
    pos = row[:, None] * 11 + torch.arange(steps + 1, device="cuda")
    drafted = [row]
    for i in range(steps):
        drafted.append(
            dspark_ops.gumbel_sample(
                *(cache[:, i], row, temperature, row, pos[:, i].contiguous()),
                is_drafting=True,
            )
        )
    return {
        "target_logits": logits.flatten(0, 1),
        "draft_logits": cache,
        "draft_token_ids": torch.stack(drafted, dim=1).flatten(),
        "cu_num_logits": torch.arange(rows + 1, device="cuda", dtype=torch.int32) * (steps + 1),
        "pos": pos.flatten(),
        "idx_mapping": row,
        "temperature": temperature,
        "seeds": row,
        "num_steps": steps,
    }


def bytes_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU: torch.cuda.is_available() is False")
    bandwidth = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy bandwidth {bandwidth / 1e6:.2f} TB/s; us, CUDA-graph replay, median of 50")
    print("     V   N    B       MB    floor   standard    x     block    x   kept of N")
    count = {}
    for vocab, steps, rows in SHAPES:
        batch = make_batch(vocab, steps, rows)
        num_bytes = bytes_of(batch["target_logits"], batch["draft_logits"])
        floor = num_bytes / bandwidth
        line = f"{vocab:6d} {steps:3d} {rows:4d} {num_bytes / 1e6:8.1f} {floor:8.1f}"
        kept = ""
        for method in ("standard", "block"):

            def verify(method: str = method) -> tuple[Tensor, Tensor, Tensor]:
                return dspark_ops.rejection_sample(**batch, method=method)  # noqa: B023

            _, num_sampled, _ = verify()
            kept += f" {num_sampled.float().mean().item() - 1:.2f}"
            us = replay_us(verify, replays=50)
            line += f" {us:10.1f} {us / floor:4.2f}"
            count[method] = verify
        print(line + kept, flush=True)
    for method, verify in count.items():
        print(f"kernels, {method}: {len(kernels(verify))}")


if __name__ == "__main__":
    main()
