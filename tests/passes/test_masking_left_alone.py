"""What only looks like the masking that the op does is left alone, with a reason."""

import pytest
import torch

from inductor_passes import masking_fusion

from .compiling import Compiled
from .inputs import DEVICE, assert_as_eager
from .masking_inputs import INF, MASKING, Rows, make_rows
from .masking_near_misses import LEFT_ALONE
from .masking_spellings import FUSED
from .test_masking_fusion import LOSSLESS


def assert_left_alone(compiled: Compiled, reasons: tuple[str, ...]) -> None:
    assert compiled.fused(MASKING) == 0
    got = compiled.reasons(MASKING)
    assert len(got) == len(reasons)
    for reason, phrase in zip(got, reasons, strict=True):
        assert phrase in reason
    assert "dspark" not in str(compiled.graphs)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    miss = LEFT_ALONE[name]
    numerics = "bitwise" if "numerics" in str(miss.reasons) else "lossless"
    options = {**LOSSLESS, "dspark.numerics": numerics}
    compiled = Compiled(miss.function, dynamic=False, options=options)
    assert_as_eager(compiled, miss.function, make_rows(seed=1))
    assert_left_alone(compiled, miss.reasons)


def test_square() -> None:
    """As many rows as tokens: a mask of one dimension may be either's, and rows take the last."""
    size = 6
    x = make_rows(size, 150)
    x = Rows(x.logits[:, :size].clone(), x.k, x.p, x.other[:, :size].clone())

    def p_of_each_token(x: Rows) -> torch.Tensor:
        values, order = x.logits.sort(-1)
        remove = values.softmax(-1).cumsum(-1) <= 1 - x.p
        remove[:, -1] = False
        return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)

    def rows_overwritten(x: Rows) -> torch.Tensor:
        values, order = x.logits.sort(-1, descending=True)
        values[torch.arange(size, device=DEVICE) >= 2] = -INF
        return values.scatter(1, order, values)

    def rows_masked(x: Rows) -> torch.Tensor:
        values, order = x.logits.sort(-1, descending=True)
        rows = (torch.arange(size, device=DEVICE) >= 2)[:, None]
        values = values.masked_fill(rows, -INF)
        return values.scatter(1, order, values)

    def count_of_each_token(x: Rows) -> torch.Tensor:
        values, order = x.logits.sort(-1, descending=True)
        place = torch.arange(size, device=DEVICE)
        values = values.masked_fill(place >= x.k.clamp(min=1), -INF)
        return values.scatter(1, order, values)

    for function in (p_of_each_token, rows_overwritten, rows_masked, count_of_each_token):
        compiled = Compiled(function, options=LOSSLESS)
        assert_as_eager(compiled, function, x)
        assert compiled.fused(MASKING) == 0
        assert len(compiled.reasons(MASKING)) == 1


def test_training() -> None:
    """What the backward pass needs is an output of the forward graph."""

    def gradient(function, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone().requires_grad_()
        function(logits).backward()
        return logits.grad

    x = make_rows()
    logits = x.logits[:2].contiguous()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return FUSED["shifted"].function(x._replace(logits=logits)).softmax(-1).square().sum()

    compiled = Compiled(loss, options=LOSSLESS)
    torch.testing.assert_close(gradient(compiled, logits), gradient(loss, logits))
    assert compiled.fused(MASKING) == 0
    assert "reads the mask" in compiled.reasons(MASKING)[0]


def crash(*_: object) -> None:
    raise ZeroDivisionError("made up")


@pytest.mark.parametrize("place", ["masks_what_it_sorts", "read"])
def test_crash_is_contained(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_fusion, place, crash)
    options = {"dspark.numerics": "lossless"}
    function = FUSED["warper"].function
    compiled = Compiled(function, options=options)
    assert_as_eager(compiled, function, make_rows())
    if place == "read":
        assert compiled.reasons(MASKING) == ["internal error: ZeroDivisionError: made up"]
