"""What only looks like the sampler is left alone, with a reason, and equals eager."""

import pytest

from .compiling import COMBINE, SAMPLER, Compiled, ops_in
from .inputs import assert_as_eager, make_inputs
from .near_misses import LEFT_ALONE, SQUARE


def check(name: str, dynamic: bool | None) -> None:
    miss = LEFT_ALONE[name]
    num_rows = 2 if name in SQUARE else 9
    compiled = Compiled(miss.function, dynamic=dynamic)
    assert_as_eager(compiled, miss.function, make_inputs(num_rows))
    reasons = compiled.reasons(SAMPLER)
    assert len(reasons) == len(miss.reasons)
    for reason, phrase in zip(reasons, miss.reasons, strict=True):
        assert phrase in reason
    assert compiled.fused(SAMPLER) == miss.fused
    assert compiled.fused(COMBINE) == miss.combined
    for seed in range(1, 9):
        assert_as_eager(compiled, miss.function, make_inputs(num_rows, seed=seed))
    (graph,) = compiled.graphs
    assert ("dspark.gumbel_combine" in ops_in(graph)) == bool(miss.combined)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    check(name, None)


@pytest.mark.parametrize("name", [name for name in LEFT_ALONE if name not in SQUARE])
def test_left_alone_with_symbolic_sizes(name: str) -> None:
    check(name, True)
