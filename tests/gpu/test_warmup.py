"""No compilation while serving, after ``warmup`` in a process with an empty cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dspark_ops

from .compilations import compilations

ROOT = Path(__file__).parents[2]


def test_10000_random_batches_compile_nothing(tmp_path: Path) -> None:
    """Any batch size, strides, addresses and optional arguments, of all ops."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.warmup_server"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    print(done.stderr.replace("\r", "\n")[-6000:])
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["not_warmed"] == {}
    assert found["serving"] == [], "\n".join(found["serving"][:10])
    # The hook fires for each variant, once, and for a dtype that was not warmed.
    assert len(found["warming"]) == len(set(found["warming"])) == found["num_variants"]
    assert found["again"] == []
    for kernel in ("_gumbel_sample_kernel[", "_rejection_decide_kernel["):
        assert any(kernel in text for text in found["unwarmed"])
    assert all("i16" in text for text in found["unwarmed"]), "\n".join(found["unwarmed"])


def test_some_ops() -> None:
    result = dspark_ops.warmup(1000, 3, ops=("gumbel_combine", "prepare_dflash_inputs"))
    assert result.variants == {"gumbel_combine": {"_gumbel_combine_kernel": 1}}
    assert result.not_warmed.keys() == {"prepare_dflash_inputs"}
    with compilations() as seen:
        dspark_ops.gumbel_combine(
            torch.zeros(3, 5, device="cuda"), torch.zeros(3, 5, dtype=torch.int64, device="cuda")
        )
    assert seen == []


def test_under_capture_it_is_refused() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before a graph's capture"):
        dspark_ops.warmup(1000, 3)


def test_a_gpu_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=f"no GPU 'cuda:{count}': torch sees {count}"):
        dspark_ops.warmup(1000, 3, device=count)


def test_the_other_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    result = dspark_ops.warmup(1000, 3, device="cuda:1", ops=("gumbel_combine",))
    assert result.num_variants == 1
    assert torch.cuda.current_device() == 0
    x = torch.zeros(3, 5, device="cuda:1")
    with compilations() as seen:
        dspark_ops.gumbel_combine(x, x.long())
    assert seen == []
