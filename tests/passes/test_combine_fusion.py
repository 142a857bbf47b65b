"""argmax + gather become one op where the sampler as a whole can't, and only there."""

import pytest
import torch
from torch import Tensor

from .compiling import COMBINE, SAMPLER, Compiled, ops_in
from .inputs import Inputs, assert_as_eager, make_inputs
from .near_misses import LEFT_ALONE
from .spellings import block_op, block_op_uncached, choose

CHOICES = {
    "view": lambda m, a: a.gather(-1, m.argmax(-1, keepdim=True)).view(-1),
    "column": lambda m, a: a.gather(-1, m.argmax(-1, keepdim=True)),
    "squeeze": lambda m, a: a.gather(-1, m.argmax(-1, keepdim=True)).squeeze(-1),
    "first column": lambda m, a: a.gather(1, m.argmax(1, keepdim=True))[:, 0],
    "unsqueeze": lambda m, a: a.gather(-1, m.argmax(-1).unsqueeze(-1)).flatten(),
    "max": lambda m, a: a.gather(-1, m.max(-1, keepdim=True).indices).reshape(-1),
    "take_along_dim": lambda m, a: a.take_along_dim(m.argmax(-1, keepdim=True), -1).view(-1),
    "both shapes": lambda m, a: (t := a.gather(-1, m.argmax(-1, keepdim=True)), t.view(-1) + 1),
    "block_max read": lambda m, a: (a.gather(-1, m.argmax(-1, keepdim=True)), m.amax(-1), m * 2),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_fused(name: str, cached: bool, dynamic: bool | None) -> None:
    op = block_op if cached else block_op_uncached

    def step(x: Inputs) -> Tensor:
        return CHOICES[name](*op(x.base[:, 0] * 2, x))

    compiled = Compiled(step, dynamic=dynamic)
    for seed in range(2):
        assert_as_eager(compiled, step, make_inputs(seed=seed))
    assert compiled.fused(COMBINE) == 1
    assert compiled.reasons(COMBINE) == []
    assert not ops_in(compiled.graphs[0]) & {"argmax", "gather", "max.dim"}


NEAR = [name for name, miss in LEFT_ALONE.items() if miss.combined == 0]


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("best_block_returned", "the index of the best block"),
        ("largest_maximum_returned", "the largest block maximum"),
        ("index_of_another_argmax", "the index comes from elsewhere"),
        ("smallest_maximum", "not from the argmax of block_max"),
        ("neighbour_of_the_best_block", "not from the argmax of block_max"),
        ("argmax_over_rows", "runs over dim 0"),
        ("gather_over_rows", "gathers along dim 0"),
        ("two_block_ops_share_one_gather", "two block ops share"),
        ("every_block_gathered", "does not take one block a row"),
        ("block_argmax_returned", "block_argmax is also read by"),
    ],
)
def test_reasons(name: str, phrase: str) -> None:
    compiled = Compiled(LEFT_ALONE[name].function, options={"dspark.sampler_fusion": False})
    compiled(make_inputs(2))
    assert any(phrase in reason for reason in compiled.reasons(COMBINE))


def test_no_candidate_where_nothing_is_chosen() -> None:
    def step(x: Inputs) -> Tensor:
        block_max, block_argmax = block_op_uncached(x.base[:, 0], x)
        return block_max.sum(), block_argmax.sum()

    compiled = Compiled(step)
    compiled(make_inputs())
    assert [site.pass_name for site in compiled.sites] == [SAMPLER]


def test_tensors_that_no_block_op_made() -> None:
    def step(x: Inputs) -> Tensor:
        return choose(x.other, x.d2t.expand(x.other.shape))

    compiled = Compiled(step)
    assert_as_eager(compiled, step, make_inputs())
    assert compiled.sites == []


def test_maxima_with_nan_infinities_and_ties() -> None:
    def step(x: Inputs) -> Tensor:
        return choose(*block_op_uncached(x.base[:, 0].abs(), x))

    compiled = Compiled(step)
    inputs = make_inputs(8, 4096)
    base = torch.zeros(8, 3, 4096).to(inputs.base)
    base[0, 0, [3000, 1500]] = torch.nan
    base[1, 0] = -torch.inf
    base[2, 0] = torch.inf
    base[3, 0, 4095] = -0.0
    base[4, 0, [1023, 1024]] = 5.0
    inputs = inputs._replace(base=base, temperature=torch.zeros_like(inputs.temperature))
    assert_as_eager(compiled, step, inputs)
    assert compiled.fused(COMBINE) == 1
