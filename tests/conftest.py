"""Set-up that all tests share.

Without a GPU the Triton kernels run under Triton's interpreter, which has to be chosen before
triton is imported. In the tests of ops, ``empty`` is filled with NaN (integers with their largest
value), so that an output that no kernel writes cannot pass.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """Fill what ``empty`` and ``new_empty`` return; seen to reach the ops in ops/test_poison.py."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = before[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.path.parent == GPU_TESTS:
            item.add_marker(skip)
