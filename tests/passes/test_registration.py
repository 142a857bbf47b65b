"""The backend is found by its name, in a source checkout and where the distribution is installed.

torch refuses a name that is registered twice, so the order of what happens first matters.
"""

from pathlib import Path

import pytest

from .fresh_process import CHECKOUT, run_fresh


@pytest.fixture
def checkout(tmp_path: Path) -> tuple[Path, ...]:
    """Both packages, without a word about a distribution: hides one that is installed."""
    for package in ("dspark_ops", "inductor_passes"):
        (tmp_path / package).symlink_to(CHECKOUT / package)
    return (tmp_path,)


@pytest.fixture
def installed(checkout: tuple[Path, ...]) -> tuple[Path, ...]:
    """As pip leaves it: the packages and the metadata of their distribution."""
    metadata = checkout[0] / "dspark_ops-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dspark-ops\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(_entry_points())
    return checkout


def _entry_points() -> str:
    """From pyproject.toml, so that a name that moves is noticed."""
    import tomllib

    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    return "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    )


LOOK_UP = """
import torch._dynamo
print(torch._dynamo.list_backends().count("dspark"))
backend = torch._dynamo.lookup_backend("dspark")
"""
SAME = """
import inductor_passes.backend
print(backend is inductor_passes.backend.dspark)
"""


def test_installed_and_looked_up_first(installed: tuple[Path, ...]) -> None:
    code = LOOK_UP.replace("backend =", "import sys; print('inductor_passes' in sys.modules); a =")
    code += "import inductor_passes\n" + LOOK_UP + SAME
    assert run_fresh(code, path=installed) == ["1", "False", "1", "True"]


def test_installed_and_imported_first(installed: tuple[Path, ...]) -> None:
    code = "import inductor_passes\n" + LOOK_UP + SAME
    assert run_fresh(code, path=installed) == ["1", "True"]


def test_installed_and_imported_between(installed: tuple[Path, ...]) -> None:
    code = "import torch._dynamo; torch._dynamo.list_backends(); import inductor_passes\n"
    assert run_fresh(code + LOOK_UP + SAME, path=installed) == ["1", "True"]


def test_checkout_and_imported_first(checkout: tuple[Path, ...]) -> None:
    code = "import inductor_passes\n" + LOOK_UP + SAME
    assert run_fresh(code, path=checkout) == ["1", "True"]


def test_checkout_and_imported_after_a_list(checkout: tuple[Path, ...]) -> None:
    code = "import torch._dynamo; print('dspark' in torch._dynamo.list_backends())\n"
    code += "import inductor_passes\n" + LOOK_UP + SAME
    hidden = run_fresh(code, path=checkout)
    assert hidden[1:] == ["1", "True"]


def test_checkout_imported_twice(checkout: tuple[Path, ...]) -> None:
    """A notebook that reloads the package: the name stays registered once."""
    code = "import inductor_passes, importlib; importlib.reload(inductor_passes)\n"
    assert run_fresh(code + LOOK_UP, path=checkout) == ["1"]


def test_importing_compiles_and_configures_nothing() -> None:
    code = """
        import sys
        import torch._inductor.config as config
        before = config.save_config_portable()
        import inductor_passes
        print(config.save_config_portable() == before)
        print(config.post_grad_custom_pre_pass)
    """
    assert run_fresh(code) == ["True", "None"]
