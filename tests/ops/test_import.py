"""Importing in a fresh process: without Triton, without a GPU, with the wrong torch or triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OPS = (
    "gumbel_sample",
    "gumbel_block_argmax",
    "gumbel_combine",
    "markov_step",
    "markov_loop",
    "prepare_positions",
    "prepare_dflash_inputs",
    "top_k_top_p_",
)

NO_TRITON = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Blocked())
"""

LAUNCHES = """
import importlib
import torch
import dspark_ops

x = torch.zeros(1, 7)
state = (torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.arange(1), torch.arange(1))
module = lambda name: importlib.import_module("dspark_ops." + name)

def on_sample(f, op_file):
    name, args, _ = module(op_file).sample_inputs("cpu")[0]
    schema = getattr(torch.ops.dspark, name).default._schema
    return f(**{a.name: x for a, x in zip(schema.arguments, args)})

calls = {
    "gumbel_sample": lambda f: f(x, *state),
    "gumbel_block_argmax": lambda f: f(x, *state),
    "gumbel_combine": lambda f: f(x, x.long()),
    "markov_step": lambda f: on_sample(f, "markov_step"),
    "markov_loop": lambda f: on_sample(f, "markov_loop"),
    "prepare_positions": lambda f: on_sample(f, "prepare_positions"),
    "prepare_dflash_inputs": lambda f: on_sample(f, "prepare_dflash_inputs"),
    "top_k_top_p_": lambda f: f(x, None, None, mask_value=-1.0),
}
for name, call in calls.items():
    print("reference", name, call(getattr(dspark_ops, name)))
    stem = name.rstrip("_")
    try:
        call(getattr(module(stem), f"_{stem}_launch{name[len(stem):]}"))
    except RuntimeError as error:
        print("error", error)
"""


def run(code: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(code: str, cwd: Path | None = None, **env: str) -> str:
    result = run(code, cwd, **env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_b7_01_import_without_a_gpu() -> None:
    """No CUDA is initialised and no driver is asked for; the reference works."""
    text = output(
        "import dspark_ops, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        + LAUNCHES.split("for name")[0]
        + "print(dspark_ops.gumbel_sample(x, *state).shape)\n"
        "print(sorted(dspark_ops.__all__))",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "torch.Size([1])" in text
    assert "gumbel_sample" in text


def test_b7_02_import_without_triton() -> None:
    """Import and reference work; a launcher says what to install."""
    text = output(NO_TRITON + LAUNCHES)
    assert text.count("reference") == len(OPS)
    for op in OPS:
        assert f"error dspark::{op} on a GPU needs Triton" in text
    assert text.count("No module named 'triton'") == len(OPS)
    assert text.count("pip install") == len(OPS)


@pytest.mark.parametrize("as_package", [False, True])
def test_b7_10_a_file_named_triton(tmp_path: Path, as_package: bool) -> None:
    """A user's module shadows Triton: the error shows its path."""
    if as_package:
        (tmp_path / "triton").mkdir()
        found = tmp_path / "triton" / "__init__.py"
    else:
        found = tmp_path / "triton.py"
    found.write_text("answer = 42\n")
    text = output("import sys; sys.path.insert(0, '')\n" + LAUNCHES, cwd=tmp_path)
    assert text.count("reference") == len(OPS)
    assert text.count(str(found)) == len(OPS)


@pytest.mark.parametrize("found", ["2.10.1+cpu", "1.13.1", "2.3.0a0+git1234"])
def test_b7_04_torch_too_old(found: str) -> None:
    result = run(f"import torch; torch.__version__ = {found!r}; import dspark_ops")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: dspark_ops needs torch 2.11 or newer")
    assert found in last


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0.0"])
def test_torch_new_enough(found: str) -> None:
    code = "import torch; from torch.torch_version import TorchVersion\n"
    output(code + f"torch.__version__ = TorchVersion({found!r}); import dspark_ops")


def test_b4_08_ops_outlive_the_module_reference() -> None:
    output(
        "import gc, torch\n"
        "def load():\n"
        "    import dspark_ops\n"
        "    names = torch._C._dispatch_get_all_op_names()\n"
        "    names = [name for name in names if name.startswith('dspark::')]\n"
        "    del dspark_ops\n"
        "    return names\n"
        "names = load()\n"
        "for _ in range(3): gc.collect()\n"
        "assert len(names) >= 15, names\n"
        "for name in names:\n"
        "    assert getattr(torch.ops.dspark, name.split('::')[1]).default.name() == name\n"
        "x = torch.zeros(2, 3)\n"
        "assert torch.ops.dspark.gumbel_combine(x, x.long()).shape == (2,)\n"
    )


def test_importing_twice_and_from_a_submodule() -> None:
    """A submodule first; a second import of the package defines no op again."""
    output(
        "import dspark_ops.noise, sys, importlib\n"
        "import dspark_ops\n"
        "from dspark_ops import gumbel_sample\n"
        "assert callable(gumbel_sample)\n"
        "assert importlib.import_module('dspark_ops.gumbel_sample') is not gumbel_sample\n"
    )


def test_import_changes_no_global_setting() -> None:
    output(
        "import torch, logging\n"
        "def state():\n"
        "    return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed(),\n"
        "            torch.get_rng_state().tolist(), logging.getLogger().handlers[:],\n"
        "            torch.are_deterministic_algorithms_enabled())\n"
        "before = state()\n"
        "import dspark_ops\n"
        "assert state() == before\n"
    )
