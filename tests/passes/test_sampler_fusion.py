"""Every spelling of the sampler is fused, at every site, and computes what eager computes."""

from typing import Any

import pytest

from .compiling import COMBINE, SAMPLER, Compiled, ops_in
from .inputs import Inputs, assert_as_eager, make_inputs
from .spellings import FUSED


def assert_fused(compiled: Compiled, sites: int) -> None:
    assert compiled.reasons(SAMPLER) == []
    assert compiled.fused(SAMPLER) == sites
    assert compiled.reasons(COMBINE) == []
    assert compiled.fused(COMBINE) == 0
    for graph in compiled.graphs:
        assert not ops_in(graph) & {"argmax", "gather", "dspark.gumbel_block_argmax"}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    spelling = FUSED[name]
    compiled = Compiled(spelling.function)
    for seed in range(3):
        assert_as_eager(compiled, spelling.function, make_inputs(seed=seed))
    assert_fused(compiled, spelling.sites)


@pytest.mark.parametrize("part", range(3))
def test_fused_with_symbolic_sizes(part: int) -> None:
    """Many in one function, each with inputs of its own: a compilation has much that is shared."""
    spellings = list(FUSED.values())[part::3]

    def every(*inputs: Inputs) -> list[Any]:
        return [s.function(x) for s, x in zip(spellings, inputs, strict=True)]

    compiled = Compiled(every, dynamic=True)
    for num_rows in (4, 9):
        inputs = [make_inputs(num_rows=num_rows, seed=seed) for seed in range(len(spellings))]
        assert_as_eager(compiled, every, *inputs)
    assert_fused(compiled, sum(s.sites for s in spellings) * len(compiled.graphs))
