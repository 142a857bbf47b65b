"""What only looks like the fill of a padding buffer is left alone, with a reason."""

import pytest
import torch
from torch import Tensor

import inductor_passes
from inductor_passes import padding_fusion

from .compiling import Compiled
from .inputs import DEVICE, assert_as_eager
from .padding_inputs import PADDING, Batch, make_batch, prepare
from .padding_near_misses import LEFT_ALONE, NearMiss, fill
from .padding_spellings import FUSED

STRICT = {"dspark.strict": True}


def batch_of(name: str, n: int, seed: int) -> Batch:
    x = make_batch(n, seed=seed)
    if name == "two_dims":
        return x._replace(is_padding=x.is_padding.repeat(3, 1))
    return x._replace(is_padding=x.is_padding.byte()) if name == "bytes_not_bools" else x


def assert_left_alone(compiled: Compiled, miss: NearMiss) -> None:
    reasons = compiled.reasons(PADDING)
    assert compiled.fused(PADDING) == 0
    assert len(reasons) == len(miss.reasons) * len(compiled.graphs)
    for reason, phrase in zip(reasons, miss.reasons * len(compiled.graphs), strict=True):
        assert phrase in reason
    for graph in compiled.graphs:
        text = "\n".join(graph)
        assert text.count("prepare_positions.default") >= len(miss.reasons)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    """The second number of tokens is a symbol."""
    miss = LEFT_ALONE[name]
    compiled = Compiled(miss.function, options=STRICT)
    for seed, n in enumerate((6, 9)):
        assert_as_eager(compiled, miss.function, batch_of(name, 6, seed), n)
    assert_left_alone(compiled, miss)


# What can't be said by a function of one batch


def test_buffer_that_shares_memory_with_another_input() -> None:
    def step(x: Batch, n: int) -> Tensor:
        fill(x.is_padding, n)
        prepare(x)
        return x.other.sum()

    compiled = Compiled(step, options=STRICT)
    memory = make_batch(length=40).is_padding
    x = make_batch()._replace(is_padding=memory[:16], other=memory[8:24])
    assert_as_eager(compiled, step, x, 6)
    (reason,) = compiled.reasons(PADDING)
    assert "shares its memory with another input" in reason


def test_part_under_the_first_version_of_functionalization() -> None:
    function = FUSED["first_entries"].function
    options = {"enable_auto_functionalized_v2": False, **STRICT}
    compiled = Compiled(function, options=options)
    assert_as_eager(compiled, function, make_batch(), 6)
    (reason,) = compiled.reasons(PADDING)
    assert "filled in part" in reason


def test_another_device() -> None:
    def step(x: Batch, elsewhere: Tensor) -> None:
        fill(elsewhere, 6)
        prepare(x)

    compiled = Compiled(step, options=STRICT)
    compiled(make_batch(), torch.empty(16, dtype=torch.bool, device="meta"))
    (reason,) = compiled.reasons(PADDING)
    assert "is on meta, the positions are on" in reason


# Stock Inductor 2.11 ends in an error where the number is not checked.
@pytest.mark.parametrize("checked", [True] if torch.__version__ < "2.13" else [False, True])
def test_number_that_is_read_from_a_tensor(checked: bool) -> None:
    """Without a check its range is not known, and neither is what the slices take."""

    def step(x: Batch, number: Tensor) -> None:
        n = number.item()
        if checked:
            torch._check(n >= 0)
            torch._check(n <= x.is_padding.shape[0])
        x.is_padding.fill_(True)
        x.is_padding[:n].fill_(False)
        prepare(x)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = Compiled(step, options=STRICT)
        for n in (6, 9):
            assert_as_eager(compiled, step, make_batch(), torch.tensor(n))
    assert compiled.fused(PADDING) == checked
    for reason in compiled.reasons(PADDING):
        assert "starts is not known before the op" in reason


def test_number_that_the_op_computes() -> None:
    def step(x: Batch) -> None:
        prepare(x)
        n = x.seq_lens[0].item()
        torch._check(n >= 0)
        x.is_padding.copy_(torch.arange(16, device=DEVICE) >= n)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = Compiled(step, options=STRICT)
        assert_as_eager(compiled, step, make_batch())
    (reason,) = compiled.reasons(PADDING)
    assert "starts is not known before the op" in reason


def test_second_call_has_nothing_to_fuse() -> None:
    def step(x: Batch, n: int) -> None:
        prepare(x)
        x.positions.add_(1)
        fill(x.is_padding, n)
        prepare(x)

    compiled = Compiled(step, options=STRICT)
    assert_as_eager(compiled, step, make_batch(), 6)
    assert [site.fused for site in compiled.sites] == [True, False]
    assert compiled.reasons(PADDING) == ["another prepare_positions already writes the padding"]


# The report and the switch


def test_explain() -> None:
    report = inductor_passes.explain(FUSED["fills"].function, make_batch(), 6)
    (site,) = report.sites
    assert (site.pass_name, site.fused, site.launches_saved) == (PADDING, True, 2)
    report = inductor_passes.explain(LEFT_ALONE["gap"].function, make_batch(), 6)
    (site,) = report.sites
    assert not site.fused
    assert "padding_near_misses.py:" in site.reason
    report = inductor_passes.explain(LEFT_ALONE["padding_given"].function, make_batch(), 6)
    assert report.sites == []
    assert f"{PADDING} no candidate" in " ".join(str(report).split())


def test_counters() -> None:
    torch.compile(FUSED["fills"].function, backend="dspark")(make_batch(), 6)
    torch.compile(LEFT_ALONE["inverted"].function, backend="dspark")(make_batch(), 6)
    counted = dict(torch._dynamo.utils.counters["dspark"])
    assert counted == {f"{PADDING}.fused": 1, f"{PADDING}.skipped": 1}


def test_switched_off() -> None:
    options = {f"dspark.{PADDING}": False}
    compiled = Compiled(FUSED["fills"].function, options=options)
    assert_as_eager(compiled, FUSED["fills"].function, make_batch(), 6)
    assert compiled.sites == []
    assert "slice_scatter" in str(compiled.graphs)
    report = inductor_passes.explain(FUSED["fills"].function, make_batch(), 6, options=options)
    assert f"{PADDING} is switched off" in report.notes
    slot = "post_grad_custom_pre_pass"
    uuids = [inductor_passes.options(o)[slot].uuid() for o in (None, options)]
    assert uuids[0] != uuids[1]


def crash(*_: object) -> None:
    raise ZeroDivisionError("made up")


@pytest.mark.parametrize("place", ["find_fills", "find_mask"])
def test_crash_is_contained(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_fusion, place, crash)
    compiled = Compiled(FUSED["fills"].function)
    assert_as_eager(compiled, FUSED["fills"].function, make_batch(), 6)
    assert compiled.reasons(PADDING) == ["internal error: ZeroDivisionError: made up"]


def test_crash_is_raised_by_no_odd_shape() -> None:
    """With ``strict`` every internal error would be an error of the compilation."""
    for length in (0, 1, 2):
        for name in ("fills", "whole_then_head", "compared", "first_entries", "one_by_one"):
            if length < 2 and name == "one_by_one":
                continue
            function = FUSED[name].function
            for dynamic in (False, True):
                compiled = Compiled(function, dynamic=dynamic, options=STRICT)
                x = make_batch()._replace(is_padding=make_batch(length=length).is_padding)
                assert_as_eager(compiled, function, x, 1)
