"""The README is true: its quick start runs, its commands exist, its names can be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import dspark_ops
import inductor_passes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quick_start_prints_what_it_says(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (printed,) = re.findall(r"```text\n(pass .*?)```", README, re.S)
    code += "\nassert [site.fused for site in report.sites] == [True]\nassert token.shape == (B,)\n"
    script = tmp_path / "quick.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_its_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([a-z-]+)`", README))
    assert targets >= {"demo", "test", "test-gpu", "bench"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_its_names_exist() -> None:
    for name in re.findall(r"`((?:gumbel|markov|prepare|rejection|top_k)_\w+)\(", README):
        assert hasattr(dspark_ops, name)
    for name in re.findall(r"inductor_passes\.(\w+)\(", README):
        assert hasattr(inductor_passes, name)
    for option in re.findall(r"`(dspark\.\w+)`", README):
        assert option in inductor_passes.passes.DEFAULTS


def test_its_files_exist() -> None:
    names = re.findall(r"`(\w+\.py)`", README)
    assert names
    for name in names:
        assert list(ROOT.rglob(name)), name
