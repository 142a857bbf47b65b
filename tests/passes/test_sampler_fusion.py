"""Every spelling of the sampler is fused, at every site, and computes what eager computes."""

import pytest

from .compiling import COMBINE, SAMPLER, Compiled, ops_in
from .inputs import assert_as_eager, make_inputs
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


@pytest.mark.parametrize("name", [n for n in FUSED if FUSED[n].dynamic])
def test_fused_with_symbolic_sizes(name: str) -> None:
    spelling = FUSED[name]
    compiled = Compiled(spelling.function, dynamic=True)
    assert_as_eager(compiled, spelling.function, make_inputs(num_rows=4))
    assert_fused(compiled, spelling.sites)
    for num_rows in (6, 9):
        assert_as_eager(compiled, spelling.function, make_inputs(num_rows=num_rows, seed=1))
    assert_fused(compiled, spelling.sites * len(compiled.graphs))
