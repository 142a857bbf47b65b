"""A server in a process of its own: warms up with an empty cache, then serves random batches.

Prints, as JSON, what was compiled: while warming up, while serving, for a dtype not warmed.
"""

import json
import sys
import time
from typing import Any

import torch

import dspark_ops

from ..serving_batches import Batches
from .compilations import compilations

NUM_BATCHES = 10_000
BF16, F32 = torch.bfloat16, torch.float32
WARMED: dict[str, Any] = {
    "vocab_size": (151936, 50257),
    "num_steps": 7,
    "dtype": (BF16,),
    "target_dtype": (F32,),
    "index_dtype": (torch.int32,),
    "pos_dtype": (torch.int64,),
    "id_dtype": (torch.int64,),
    "cache_col_dtype": (torch.int64,),
    "use_fp64": True,
    "markov_rank": 256,
    "block_size": 16,
    "sample_from_anchor": False,
    "cp_size": 1,
    "cp_interleave": 1,
}


def serve(warmed: dict[str, Any], num_batches: int) -> tuple[list[str], float]:
    """What the batches compile, each with the batch that did it, and the time they took."""
    found = []
    started = time.perf_counter()
    batches = Batches("cuda", warmed, 16)
    for seed in range(num_batches):
        with compilations() as seen:
            batches.serve(seed)
        found += [f"batch {seed}: {text}" for text in seen]
    torch.cuda.synchronize()
    return found, time.perf_counter() - started


def main() -> None:
    with compilations() as warming:
        result = dspark_ops.warmup(**WARMED, show_progress=True)
    with compilations() as again:
        dspark_ops.warmup(**WARMED)
    print(result, file=sys.stderr)
    serving, seconds = serve(WARMED, NUM_BATCHES)
    print(f"{NUM_BATCHES} batches in {seconds:.1f} s", file=sys.stderr)
    unwarmed, _ = serve({**WARMED, "pos_dtype": (torch.int16,)}, 30)
    found = {
        "num_variants": result.num_variants,
        "not_warmed": result.not_warmed,
        "warming": warming,
        "again": again,
        "serving": serving,
        "unwarmed": unwarmed,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
