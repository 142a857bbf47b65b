"""What only looks like the sampler is left alone, with a reason, and equals eager."""

from typing import Any

import pytest

from .compiling import COMBINE, SAMPLER, Compiled
from .inputs import Inputs, assert_as_eager, make_inputs
from .near_misses import LEFT_ALONE, SQUARE, NearMiss


def assert_left_alone(compiled: Compiled, misses: list[NearMiss]) -> None:
    reasons = compiled.reasons(SAMPLER)
    phrases = [phrase for miss in misses for phrase in miss.reasons]
    assert len(reasons) == len(phrases)
    for reason, phrase in zip(reasons, phrases, strict=True):
        assert phrase in reason
    assert compiled.fused(SAMPLER) == 0
    assert compiled.fused(COMBINE) == sum(miss.combined for miss in misses)
    (graph,) = compiled.graphs
    assert "\n".join(graph).count("dspark.gumbel_combine(") == compiled.fused(COMBINE)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    miss = LEFT_ALONE[name]
    num_rows = 2 if name in SQUARE else 9
    compiled = Compiled(miss.function)
    for seed in range(9 if name in SQUARE else 2):
        assert_as_eager(compiled, miss.function, make_inputs(num_rows, seed=seed))
    assert_left_alone(compiled, [miss])


@pytest.mark.parametrize("part", range(3))
def test_left_alone_with_symbolic_sizes(part: int) -> None:
    misses = [miss for name, miss in LEFT_ALONE.items() if name not in SQUARE][part::3]

    def every(*inputs: Inputs) -> list[Any]:
        return [miss.function(x) for miss, x in zip(misses, inputs, strict=True)]

    compiled = Compiled(every, dynamic=True)
    for num_rows in (4, 9):
        inputs = [make_inputs(num_rows, seed=seed) for seed in range(len(misses))]
        assert_as_eager(compiled, every, *inputs)
    assert_left_alone(compiled, misses)
