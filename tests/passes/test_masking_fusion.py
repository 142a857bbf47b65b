"""Every spelling of the masking is fused under ``lossless``, and masks what eager masks."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import dspark_ops
import inductor_passes

from .compiling import SAMPLER, Compiled, generated_code_of, ops_in, renamed
from .inputs import Inputs, assert_as_eager, assert_equal, copied, make_inputs
from .masking_inputs import INF, MASKING, K, P, Rows, kept, make_rows, masked_by_rule
from .masking_spellings import FUSED, Spelling, warp_top_p

LOSSLESS = {"dspark.numerics": "lossless", "dspark.strict": True}
SORTING = {"sort", "sort.stable", "topk", "cumsum", "gather", "scatter.src", "scatter.value"}
WOULD = "numerics='bitwise': would become dspark::top_k_top_p with numerics='lossless'"


def assert_fused(compiled: Compiled, sites: int) -> None:
    assert compiled.reasons(MASKING) == []
    assert compiled.fused(MASKING) == sites * len(compiled.graphs)
    for graph in compiled.graphs:
        assert not ops_in(graph) & SORTING
        assert "\n".join(graph).count("dspark.top_k_top_p(") == 1


def by_rule(spelling: Spelling, x: Rows) -> Tensor:
    k = x.k if spelling.k is True else spelling.k
    p = x.p if spelling.p is True else spelling.p
    return masked_by_rule(x.logits, k, p)


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    """The second batch makes its size a symbol."""
    spelling = FUSED[name]
    compiled = Compiled(spelling.function, options=LOSSLESS)
    for seed, num_rows in enumerate((6, 7, 13)):
        x = make_rows(num_rows, seed=seed)
        assert_as_eager(compiled, spelling.function, x)
        assert_equal(compiled(copied(x)), by_rule(spelling, x), "rule")
    assert len(compiled.graphs) == 2
    assert_fused(compiled, spelling.sites)


@pytest.mark.parametrize("name", FUSED)
def test_bitwise_says_what_it_would_become(name: str) -> None:
    spelling = FUSED[name]
    compiled = Compiled(spelling.function, options={"dspark.strict": True})
    assert_as_eager(compiled, spelling.function, make_rows())
    assert compiled.reasons(MASKING) == [WOULD] * spelling.sites
    assert compiled.fused(MASKING) == 0
    assert "dspark" not in str(compiled.graphs)


# Compiled as a symbol, the p of these might be 0, which would leave no token.
UNGUARDED = ("unguarded_number", "mass_shifted_by_pad", "mass_before_is_less")


def test_all_is_a_symbol() -> None:
    """Both sizes, and numbers that are no constants of the function."""
    names = [name for name in FUSED if name not in UNGUARDED]

    def every(*rows: Rows) -> list[Tensor]:
        return [FUSED[name].function(x) for name, x in zip(names, rows, strict=True)]

    compiled = Compiled(every, dynamic=True, options=LOSSLESS)
    for num_rows, vocab in ((6, 150), (7, 99)):
        rows = [make_rows(num_rows, vocab, seed=seed) for seed in range(len(names))]
        assert_as_eager(compiled, every, *rows)
    assert compiled.reasons(MASKING) == []


@pytest.mark.parametrize("name", UNGUARDED)
def test_p_that_is_a_symbol_and_unguarded(name: str) -> None:
    compiled = Compiled(FUSED[name].function, dynamic=True, options=LOSSLESS)
    assert_as_eager(compiled, FUSED[name].function, make_rows())
    assert len(compiled.sites) == 1
    for reason in compiled.reasons(MASKING):  # none where torch 2.11 keeps it a number
        assert "a row whose p is 0 would lose all its tokens" in reason


@pytest.mark.parametrize("num_rows", [0, 1, 2])
@pytest.mark.parametrize("vocab", [1, 2, 1025])
def test_odd_sizes(num_rows: int, vocab: int) -> None:
    def step(x: Rows) -> tuple[Tensor, ...]:
        names = ("warper", "values_put_back", "shifted", "probabilities_sorted")
        return tuple(FUSED[name].function(x) for name in names)

    compiled = Compiled(step, options=LOSSLESS)
    generator = torch.Generator().manual_seed(vocab)
    x = make_rows(num_rows, 150)
    logits = torch.randn(num_rows, vocab, generator=generator)
    x = x._replace(logits=logits.to(x.p.device), p=torch.full_like(x.p, P))
    assert_as_eager(compiled, step, x)
    if num_rows or torch.__version__ >= "2.13":  # 2.11 spells a softmax of no rows otherwise
        assert compiled.fused(MASKING) == 4


def test_as_many_tokens_as_k() -> None:
    function = FUSED["largest_put_into_minus_inf"].function
    compiled = Compiled(function, options=LOSSLESS)
    x = make_rows(4, K)
    assert_as_eager(compiled, function, x)
    assert_fused(compiled, 1)


def test_expected() -> None:
    compiled = Compiled(FUSED["values_put_back"].function, options=LOSSLESS)
    compiled(make_rows())
    assert_expected_inline(
        renamed(compiled.graphs[0]),
        """\
top_k_top_p_default = dspark.top_k_top_p(arg0, None, arg1, -inf)
return (top_k_top_p_default,)""",
    )


def test_expected_numbers() -> None:
    """k and p become tensors of the batch; two sites become one call."""
    compiled = Compiled(FUSED["one_after_the_other"].function, options=LOSSLESS)
    compiled(make_rows())
    assert_expected_inline(
        renamed(compiled.graphs[0]),
        """\
full_default_3 = full([6], 20, dtype=torch.int32, device=cpu, pin_memory=False)
full_default_4 = full([6], 0.8, dtype=torch.float32, device=cpu, pin_memory=False)
top_k_top_p_default_1 = dspark.top_k_top_p(arg0, full_default_3, full_default_4, -inf)
return (top_k_top_p_default_1,)""",
    )


def test_expected_k_of_each_row() -> None:
    compiled = Compiled(FUSED["by_rank"].function, options=LOSSLESS)
    compiled(make_rows())
    assert_expected_inline(
        renamed(compiled.graphs[0]),
        """\
convert_element_type = prims.convert_element_type(arg0, torch.int32)
clamp_min = clamp_min(convert_element_type, 1)
clamp_max = clamp_max(clamp_min, 1000000)
clamp_min_default = clamp_min(clamp_max, 1)
clamp_max_default = clamp_max(clamp_min_default, 150)
top_k_top_p_default = dspark.top_k_top_p(arg1, clamp_max_default, None, -inf)
return (top_k_top_p_default,)""",
    )


def test_expected_bitwise() -> None:
    compiled = Compiled(FUSED["others_overwritten"].function)
    compiled(make_rows())
    assert_expected_inline(
        renamed(compiled.graphs[0]),
        """\
sort = sort(arg0, -1, True)
getitem_1 = getitem(sort, 1)
slice_1 = slice.Tensor(getitem_1, 1, 20, 9223372036854775807)
scatter = scatter.value(arg0, 1, slice_1, -inf)
return (scatter,)""",
    )


# Numbers that a caller changes


def test_p_that_changes() -> None:
    def step(x: Rows, p: float) -> Tensor:
        return warp_top_p(x.logits, p)

    compiled = Compiled(step, options=LOSSLESS)
    for p in (0.9, 0.5, 0.3):
        x = make_rows()
        assert_equal(compiled(x, p), masked_by_rule(x.logits, None, p), "rule")
    assert compiled.reasons(MASKING) == []


@pytest.mark.parametrize("checked", [True, False])
def test_k_that_changes(checked: bool) -> None:
    """k = 0 removes all tokens in the user's program, and is off in the op."""

    def step(x: Rows, k: int) -> Tensor:
        if checked:
            torch._check(k >= 1)
        values, ids = x.logits.topk(k)
        return torch.full_like(x.logits, -INF).scatter(1, ids, values)

    compiled = Compiled(step, options=LOSSLESS)
    for k in (20, 30, 40):
        assert_as_eager(compiled, step, make_rows(), k)
    reasons = compiled.reasons(MASKING)
    assert reasons == [] if checked else "not known to be 1 at least" in reasons[0]


# With what comes after


def masked_step(x: Inputs) -> Tensor:
    """The target's side: logits are masked, then sampled from."""
    logits = warp_top_p((x.base[:, 0] + x.bias).float(), P)
    return dspark_ops.gumbel_sample(
        logits, x.idx_mapping[:, 0], x.temperature, x.seeds, x.pos[:, 0], is_drafting=False
    )


@pytest.mark.parametrize("dynamic", [False, None])
def test_sampled_from(dynamic: bool | None) -> None:
    """Compiled with kernels."""
    compiled = Compiled(masked_step, backend="dspark", dynamic=dynamic, options=LOSSLESS)
    for seed, num_rows in enumerate((9, 9, 18)):
        x = make_inputs(num_rows, dtype=torch.float32, seed=seed)
        # Without NaN and ties, where eager keeps other tokens or others of them.
        normal = torch.Generator().manual_seed(seed)
        base = torch.randn(x.base.shape, generator=normal) * 3
        x = x._replace(base=base.to(x.base.device), bias=x.other)
        assert_as_eager(compiled, masked_step, x)
    assert compiled.reasons(MASKING) == []
    assert compiled.fused(MASKING) == len(compiled.graphs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_kernels(dynamic: bool) -> None:
    names = [name for name in FUSED if name not in UNGUARDED or not dynamic]

    def every(*rows: Rows) -> list[Tensor]:
        return [FUSED[name].function(x) for name, x in zip(names, rows, strict=True)]

    compiled = Compiled(every, backend="dspark", dynamic=dynamic, options=LOSSLESS)
    for num_rows in (6, 7) if dynamic else (6,):
        rows = [make_rows(num_rows, seed=seed) for seed in range(len(names))]
        assert_as_eager(compiled, every, *rows)
    assert compiled.reasons(MASKING) == []


def test_one_kernel_call() -> None:
    compiled = torch.compile(
        FUSED["values_put_back"].function, backend="dspark", options={"dspark.numerics": "lossless"}
    )
    (code,) = generated_code_of(compiled, make_rows())
    assert code.count("torch.ops.dspark.top_k_top_p.default(") == 1
    assert "aten.sort" not in code


def test_beside_a_draft_step() -> None:
    """Both fusions in one graph."""

    def step(x: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        from .spellings import view

        return view(x), FUSED["warper"].function(rows)

    compiled = Compiled(step, options=LOSSLESS)
    assert_as_eager(compiled, step, make_inputs(), make_rows())
    assert (compiled.fused(SAMPLER), compiled.fused(MASKING)) == (1, 1)


def test_float_of_bf16_logits() -> None:
    """What is masked are the f32 logits, which are all ties where bf16 has them."""

    def step(logits: Tensor) -> Tensor:
        return warp_top_p(logits.float(), P)

    compiled = Compiled(step, options=LOSSLESS)
    logits = (make_rows().logits * 4).bfloat16()
    got = compiled(logits)
    assert_equal(got, masked_by_rule(logits.float(), None, P), "rule")
    assert compiled.fused(MASKING) == 1


# Where a sort-based masking depends on its sort, or on rounding, and the op on neither


def test_of_tied_tokens_as_many_stay() -> None:
    x = make_rows(60, seed=3)
    x = x._replace(logits=(x.logits * 2).round() / 2)
    for name in ("warper", "largest_put_into_minus_inf", "shifted_p_of_each_row"):
        spelling = FUSED[name]
        got = Compiled(spelling.function, options=LOSSLESS)(copied(x))
        expected = spelling.function(copied(x))
        clear = _clear_of_edges(x.logits, x.p if spelling.p is True else P)
        counts = [(y > -INF).sum(-1)[clear] for y in (got, expected)]
        assert_equal(counts[0], counts[1], "number of kept tokens")
        assert int(clear.sum()) > 20
        assert_equal(got, by_rule(spelling, x), "rule")


def _clear_of_edges(logits: Tensor, p: Tensor | float) -> Tensor:
    mass = logits.double().sort(descending=True).values.softmax(-1).cumsum(-1)
    p = torch.as_tensor(p, device=logits.device, dtype=torch.float64).view(-1, 1)
    return ((mass - p).abs().amin(-1) > 1e-5) | (p.view(-1) >= 1)


def test_mass_that_is_p() -> None:
    """Four equal tokens and p = 0.5: a prefix of two reaches p, of three exceeds it."""
    logits = torch.zeros(1, 4)
    x = make_rows(1)._replace(logits=logits, p=torch.tensor([0.5]))
    function = FUSED["shifted_p_of_each_row"].function
    assert int((function(copied(x)) > -INF).sum()) == 3
    got = Compiled(function, options=LOSSLESS)(copied(x))
    assert (got > -INF).tolist() == [[True, True, False, False]]


# The report


def sites_of(function: Any, *args: Any, numerics: str) -> list[inductor_passes.Site]:
    report = inductor_passes.explain(function, *args, options={"dspark.numerics": numerics})
    return [site for site in report.sites if site.pass_name == MASKING]


def test_explain() -> None:
    (site,) = sites_of(FUSED["warper"].function, make_rows(), numerics="lossless")
    assert (site.fused, site.reason) == (True, None)
    assert site.file.endswith("masking_spellings.py")
    # sort, softmax, cumsum, compare, the write of 0, scatter, masked_fill become p and the op.
    assert site.launches_saved == 5
    (site,) = sites_of(FUSED["warper"].function, make_rows(), numerics="bitwise")
    assert (site.fused, site.reason, site.launches_saved) == (False, WOULD, 0)


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("values_put_back", 6),  # no tensor for p
        ("shifted_into_the_input", 7),  # a zeros_like more, and a copy back
        ("largest_put_into_minus_inf", 1),
        ("one_after_the_other", 6),
    ],
)
def test_launches_saved(name: str, saved: int) -> None:
    sites = sites_of(FUSED[name].function, make_rows(), numerics="lossless")
    assert sum(site.launches_saved for site in sites) == saved


def test_switched_off() -> None:
    options = {f"dspark.{MASKING}": False, "dspark.numerics": "lossless"}
    compiled = Compiled(FUSED["warper"].function, options=options)
    assert_as_eager(compiled, FUSED["warper"].function, make_rows())
    assert compiled.sites == []


def test_counters() -> None:
    torch.compile(FUSED["warper"].function, backend="dspark")(make_rows())
    options = {"dspark.numerics": "lossless"}
    torch.compile(FUSED["shifted"].function, backend="dspark", options=options)(make_rows())
    counted = dict(torch._dynamo.utils.counters["dspark"])
    assert counted == {f"{MASKING}.fused": 1, f"{MASKING}.skipped": 1}


def test_numerics_change_the_uuid() -> None:
    slot = "post_grad_custom_pre_pass"
    options = [{"dspark.numerics": n} for n in ("bitwise", "lossless")]
    assert len({inductor_passes.options(o)[slot].uuid() for o in options}) == 2


def test_rule_of_the_tests() -> None:
    """By hand: masses 0.5, 0.3, 0.15, 0.05."""
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    assert kept(logits, None, 0.6).tolist() == [[False, True, False, True]]
    assert kept(logits, 3, None).tolist() == [[True, True, False, True]]
    assert kept(logits, 2, 0.62).tolist() == [[False, True, False, False]]  # 0.5 of 0.8
