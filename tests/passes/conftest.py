"""Each test compiles from nothing: no compiled code, cache or count of another one is seen."""

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from inductor_passes.sites import clear


@pytest.fixture(scope="session", autouse=True)
def own_cache_directory() -> Iterator[None]:
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    clear()
    with inductor_config.patch(force_disable_caches=True):
        yield
