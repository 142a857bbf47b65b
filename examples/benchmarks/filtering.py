"""Time `top_k_top_p_` against sort-based PyTorch and the floor of its bytes.

    python examples/benchmarks/filtering.py

Medians of CUDA-graph replays of a copy of the logits and the masking, less that of the copy. The
floor is every logit read and written once, at the copy bandwidth of the same run. Nothing is
printed of a result that differs from the reference. B rows, f32.

Rows: "normal", where p = 0.9 keeps a third of the vocabulary; "peaked", 40 likely tokens over a
tail; "bf16", a wide normal row as a bf16 model gives it, with thousands of ties.
"""

import sys
from typing import Any

import torch
from timing import copy_bytes_per_us, kernels, replay_us
from torch import Tensor

import dspark_ops
from dspark_ops.top_k_top_p import top_k_top_p_ref

VOCAB = 151936
ROWS = (1, 16, 65, 256)
FILTERS = {
    "p 0.9": (None, 0.9),
    "p 1e-9": (None, 1e-9),
    "k 50": (50, None),
    "k 50, p 0.9": (50, 0.9),
    "k 20000, p 0.9": (20000, 0.9),
}


def make_rows(kind: str, rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, VOCAB, device="cuda", generator=generator)
    if kind == "peaked":
        x = x * 2
        x[:, :40] += torch.linspace(14, 4, 40, device="cuda")
    if kind == "bf16":
        x = (x * 3).bfloat16().float()
    return x


def sorted_masking(x: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """As it is written without a kernel: sort, threshold, softmax, cumulate, scatter back."""
    ordered, ids = x.sort(dim=-1)
    if k is not None:
        kth = ordered.gather(1, (VOCAB - k.long())[:, None])
        ordered.masked_fill_(ordered < kth, -torch.inf)
    if p is not None:
        removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p[:, None]
        removed[:, -1] = False
        ordered.masked_fill_(removed, -torch.inf)
    return x.scatter_(1, ids, ordered)


def check(source: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    masked = dspark_ops.top_k_top_p_(source.clone(), k, p)
    for part in range(0, len(source), 64):
        rows = slice(part, part + 64)
        given = (None if x is None else x[rows] for x in (k, p))
        if not torch.equal(masked[rows], top_k_top_p_ref(source[rows], *given, -torch.inf)):
            sys.exit("top_k_top_p_ differs from its reference: no times")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU: torch.cuda.is_available() is False")
    bandwidth = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy bandwidth {bandwidth / 1e6:.2f} TB/s, V {VOCAB}; us, CUDA-graph replay, median")
    print(f"{'':24}" + "".join(f"{f'B = {rows}':>10}" for rows in ROWS))
    floors = (2 * 4 * rows * VOCAB / bandwidth for rows in ROWS)
    print(f"{'floor':24}" + "".join(f"{us:10.1f}" for us in floors))
    launches = {}
    for kind in ("normal", "peaked", "bf16"):
        for name, (some_k, some_p) in FILTERS.items():
            line = f"{kind:8}{name:16}"
            for rows in ROWS:
                source = make_rows(kind, rows)
                x = source.clone()
                k = p = None
                if some_k is not None:
                    k = torch.full((rows,), some_k, device="cuda", dtype=torch.int32)
                if some_p is not None:
                    p = torch.full((rows,), some_p, device="cuda")
                check(source, k, p)

                def masked(
                    x: Tensor = x, source: Tensor = source, k: Any = k, p: Any = p
                ) -> Tensor:
                    return dspark_ops.top_k_top_p_(x.copy_(source), k, p)

                def copied(x: Tensor = x, source: Tensor = source) -> Tensor:
                    return x.copy_(source)

                line += f"{replay_us(masked, 50) - replay_us(copied, 50):10.1f}"
                launches[name] = masked
            print(line, flush=True)
    line = f"{'normal':8}{'p 0.9, sorted':16}"
    for rows in ROWS:
        x = make_rows("normal", rows)
        p = torch.full((rows,), 0.9, device="cuda")
        line += f"{replay_us(lambda x=x, p=p: sorted_masking(x, None, p), 20):10.1f}"
    print(line)
    for name, masked in launches.items():
        print(f"kernels, {name}: {len(kernels(masked))}, the copy among them")


if __name__ == "__main__":
    main()
