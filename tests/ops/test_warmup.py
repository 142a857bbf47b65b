"""warmup without a GPU: which variants it covers, what it refuses, that it launches nothing."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dspark_ops
from dspark_ops._launch import launch, launching_instead

from .conftest import Kernel, op_module
from .test_import import NO_TRITON, run

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
module = op_module("warmup")


def in_a_process(tmp_path: Path, function: str, **arguments: Any) -> Any:
    """A function of warmup_coverage.py where Triton does not interpret."""
    environment = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.warmup_coverage"]
    done = subprocess.run(
        [*command, json.dumps([function, arguments])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Coverage


@pytest.mark.parametrize("server", ["defaults", "odd_vocabulary", "fp64"])
def test_random_batches_ask_for_what_is_warmed(tmp_path: Path, server: str) -> None:
    """For nothing else, and for all of it: no variant is compiled that a server cannot meet."""
    found = in_a_process(tmp_path, "cover", server=server, num_batches=2000)
    assert found["launches"] > 20_000
    assert found["not warmed"] == []
    assert found["not met"] == []
    assert found["ops without calls"] == {}


def test_many_dtypes(tmp_path: Path) -> None:
    """Too many variants for random batches to meet all; every dtype with every other."""
    found = in_a_process(tmp_path, "cover", server="many_dtypes", num_batches=3000)
    assert found["not warmed"] == []
    assert len(found["not met"]) < 0.1 * sum(found["counts"].values())


def test_a_dtype_that_was_not_warmed_is_seen(tmp_path: Path) -> None:
    arguments = {"server": "defaults", "num_batches": 100, "pos_dtype": "int16"}
    found = in_a_process(tmp_path, "cover", **arguments)
    kernels = {name for name, _ in found["not warmed"]}
    assert "_gumbel_sample_kernel" in kernels
    assert all("pos_ptr: ('*i16'" in kinds for _, kinds in found["not warmed"])


def test_how_many_variants_there_are(tmp_path: Path) -> None:
    """As the README says."""
    (table,) = re.findall(r"```text\nop +variants  kernels\n(.*?)```", README.read_text(), re.S)
    written = {op: int(count) for op, count, *_ in map(str.split, table.splitlines())}
    counts = in_a_process(tmp_path, "cover", server="defaults", num_batches=0)["counts"]
    assert counts == written
    assert list(counts) == list(module.OPS)
    assert sum(counts.values()) - counts["top_k_top_p"] == 91  # _launch.py


@pytest.mark.parametrize("in_parallel", [True, False])
def test_compiles_once(tmp_path: Path, in_parallel: bool) -> None:
    """Really compiled, for a GPU that is not here; a second time nothing is."""
    ops = ["prepare_positions", "gumbel_combine"]
    wanted = {
        "prepare_positions": {"_prepare_positions_kernel": 2},
        "gumbel_combine": {"_gumbel_combine_kernel": 1},
    }
    first, second = in_a_process(tmp_path, "compile_twice", ops=ops, in_parallel=in_parallel)
    assert first["variants"] == second["variants"] == wanted
    assert sorted(text.split("[")[0] for text in first["seen"]) == [
        "_gumbel_combine_kernel",
        "_prepare_positions_kernel",
        "_prepare_positions_kernel",
    ]
    assert second["seen"] == []
    assert first["calls"] == second["calls"] == 3
    assert first["threads"] == ([3, 3] if in_parallel else [0, 0])
    assert second["threads"] == [0, 0]


def test_a_compilation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """No mode of Triton's, no future in a kernel: the next warmup compiles it."""
    found = in_a_process(tmp_path, "fail_once")
    assert found["error"] == "OSError(28, 'No space left on device')"
    assert found["variants"] == {"gumbel_combine": {"_gumbel_combine_kernel": 1}}
    assert len(found["seen"]) == 1
    assert found["kinds"] == ["CompiledKernel"]


# Launching


def test_a_future_is_not_kept_as_a_variant() -> None:
    """Triton answers with one to a thread that serves while another compiles in parallel."""

    class Future:
        def result(self) -> str:
            return "variant"

    class JittedKernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: Future()

    assert launch(None, JittedKernel(), {}, (1, 1, 1), 5) == "variant"


def test_only_one_thread_launches_nothing() -> None:
    block_max = torch.tensor([[1.0, 3.0, 2.0]], device=Kernel.device)
    ids = torch.tensor([[10, 11, 12]], device=Kernel.device)
    seen: list[Any] = []
    tokens: list[int] = []

    def other_thread() -> None:
        tokens.extend(Kernel.gumbel_combine(block_max, ids).tolist())

    with launching_instead(lambda *launched: seen.append(launched)):
        Kernel.gumbel_combine(block_max, ids)
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert tokens == [11]
    assert len(seen) == 1
    kernel, options, grid, args, named = seen[0]
    assert kernel is op_module("gumbel_combine")._gumbel_combine_kernel
    assert options["num_warps"] == 2
    assert grid == (1, 1, 1)
    assert args == ()
    assert named["num_blocks"] == 3
    assert Kernel.gumbel_combine(block_max, ids).tolist() == [11]
    assert len(seen) == 1


# What is refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"torch sees none.*torch\.cuda\.is_available"):
        dspark_ops.warmup(1000, 7)


def test_without_triton() -> None:
    """Where there is a GPU, which a process can be made to believe."""
    code = (
        "import torch, dspark_ops\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.device_count = lambda: 1\n"
        "dspark_ops.warmup(1000, 7)\n"
    )
    result = run(NO_TRITON + code)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: dspark::warmup on a GPU needs Triton")
    assert "pip install" in last


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"device": "cpu"}, ValueError, "device must be a CUDA device.*'cpu'"),
        ({"device": "nothing"}, ValueError, "device must be a CUDA device; got 'nothing'"),
        ({"device": 256}, ValueError, "device must be a CUDA device; got 256"),
        ({"device": None}, TypeError, "device must be a device, got NoneType"),
        ({"vocab_size": 0}, ValueError, r"vocab_size must be in \[1, 1073741824\]; got 0"),
        ({"vocab_size": ()}, ValueError, r"vocab_size must be .*; got \(\)"),
        ({"vocab_size": (7, 2.0)}, TypeError, "vocab_size must be an int, got float"),
        ({"num_steps": 129}, ValueError, r"num_steps must be in \[1, 128\]; got 129"),
        ({"num_steps": True}, TypeError, "num_steps must be an int, got bool"),
        ({"dtype": torch.float64}, TypeError, "dtype must be of bfloat16, .*float64"),
        ({"dtype": ()}, ValueError, r"dtype must be of bfloat16, .*got \(\)"),
        ({"target_dtype": "float32"}, TypeError, "target_dtype must be of .*'float32'"),
        ({"index_dtype": torch.float32}, TypeError, "index_dtype must be of int32"),
        ({"id_dtype": torch.int16}, TypeError, "id_dtype must be of int32, int64; .*int16"),
        ({"markov_rank": 0}, ValueError, r"markov_rank must be in .*; got 0"),
        ({"block_size": -1}, ValueError, r"block_size must be in .*; got -1"),
        ({"cp_size": 0}, ValueError, r"cp_size must be in .*; got 0"),
        ({"ops": ("gumbel_sampel",)}, ValueError, "ops must be of .*; got 'gumbel_sampel'"),
        ({"ops": "health"}, TypeError, "ops must be a tuple of names, got str: 'health'"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        dspark_ops.warmup(**{"vocab_size": 1000, "num_steps": 7, **given})


# What is printed


def test_the_table() -> None:
    variants = {"gumbel_sample": {"_a_kernel": 28, "_b_kernel": 6}, "gumbel_combine": {"_c": 1}}
    result = module.Warmup(None, variants, {"prepare_positions": "tell it"}, 12.34)
    assert result.num_variants == 35
    assert str(result).splitlines() == [
        "op                     variants  kernels",
        "gumbel_sample          34        a_kernel 28, b_kernel 6",
        "gumbel_combine         1         c 1",
        "prepare_positions      none      not warmed: tell it",
        "in all                 35        12.3 s",
    ]


def test_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        bar = module._Bar(shown)
        bar.start("loading", 3)
        for _ in range(3):
            bar.step()
        bar.end("done")
        text = capsys.readouterr().err
        if not shown:
            assert text == ""
            continue
        lines = [line.strip() for line in text.split("\r")]
        assert lines[1:] == [
            f"warmup: loading   [{'#' * 10}{'-' * 20}] 1/3",
            f"warmup: loading   [{'#' * 20}{'-' * 10}] 2/3",
            f"warmup: loading   [{'#' * 30}] 3/3",
            "warmup: done",
        ]
