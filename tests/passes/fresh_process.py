"""Python code in a process of its own, where nothing is imported, registered or cached yet."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def run_fresh(
    code: str, *, path: tuple[Path, ...] = (CHECKOUT,), cache: Path | None = None, **env: str
) -> list[str]:
    """What ``code`` prints, as lines. ``path``: instead of what is installed beside torch."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(p) for p in path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **env,
    }
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    if cache is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
