"""``explain``, `Site`, counters, the log, and that a crash in a pass stays in the pass."""

import logging
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.utils import counters

import dspark_ops
import inductor_passes
from inductor_passes.combine_fusion import CombineFusion
from inductor_passes.sampler_fusion import SamplerFusion

from .compiling import COMBINE, SAMPLER, Compiled
from .inputs import Inputs, assert_as_eager, assert_equal, copied, make_inputs
from .near_misses import LEFT_ALONE
from .spellings import FUSED, column_write, draft_loop, sample, view


def step(x: Inputs) -> Tensor:
    logits = x.base[:, 0] + x.bias
    block_max, block_argmax = dspark_ops.gumbel_block_argmax(  # fused
        logits, x.idx_mapping[:, 0], x.temperature, x.seeds, x.pos[:, 0] - 1
    )
    token = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)
    logits = x.base[:, 1] + x.bias
    block_max, block_argmax = dspark_ops.gumbel_block_argmax(  # read
        logits, x.idx_mapping[:, 1], x.temperature, x.seeds, x.pos[:, 1] - 1
    )
    second = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)
    return token, second, logits.amax(-1)


def line_with(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (line,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"  # {comment}")]
    return line


def test_sites() -> None:
    report = inductor_passes.explain(step, make_inputs())
    fused, read, combined = report.sites
    assert (fused.pass_name, fused.fused, fused.reason) == (SAMPLER, True, None)
    assert (read.pass_name, read.fused) == (SAMPLER, False)
    assert (combined.pass_name, combined.fused, combined.reason) == (COMBINE, True, None)
    assert {site.file for site in report.sites} == {__file__}
    assert fused.line == line_with("fused")
    assert read.line == combined.line == line_with("read")
    # add, sub, block op, argmax, gather: 5 launches become 2; argmax, gather: 2 become 1.
    assert [site.launches_saved for site in report.sites] == [3, 0, 1]
    assert f"amax at {Path(__file__).name}" in read.reason


def test_table_expected(capsys: pytest.CaptureFixture[str]) -> None:
    report = inductor_passes.explain(step, make_inputs())
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    for comment in ("fused", "read"):
        printed = printed.replace(f"{Path(__file__).name}:{line_with(comment)}", f"f.py:{comment}")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    lines = [line.split(" the biased logits")[0] for line in lines]
    assert_expected_inline(
        "\n".join(lines),
        """\
pass outcome where launches saved reason
sampler_fusion fused f.py:fused 3
sampler_fusion left alone f.py:read 0
combine_fusion fused f.py:read 1
padding_fusion no candidate 0
masking_fusion no candidate 0""",
    )


def test_a_site_for_each_step_of_a_loop() -> None:
    report = inductor_passes.explain(draft_loop, make_inputs())
    assert [site.pass_name for site in report.sites] == [SAMPLER] * 3
    assert all(site.fused for site in report.sites)
    assert "fused x3" in str(report)


def test_no_candidate() -> None:
    report = inductor_passes.explain(lambda x: x + 1, torch.ones(3))
    assert report.sites == []
    text = str(report)
    assert "no candidate" in text
    assert SAMPLER in text
    assert COMBINE in text


def test_launches_saved() -> None:
    """Of the eager program: each of these is one launch fewer than without its last part."""
    saved = {
        name: [site.launches_saved for site in inductor_passes.explain(f, make_inputs()).sites]
        for name, f in (
            ("position_as_it_is", FUSED["position_as_it_is"].function),
            ("view", view),
            ("column_write", column_write),
            ("next_embedding", FUSED["next_embedding"].function),
        )
    }
    assert saved == {
        "position_as_it_is": [2],
        "view": [3],
        "column_write": [4],
        "next_embedding": [4],
    }


# Explaining changes nothing


@pytest.mark.parametrize("name", ["draft_loop", "whole_buffer_written", "cache_cleared_before"])
def test_tensors_of_the_caller_are_unchanged(name: str) -> None:
    x = make_inputs()
    kept = copied(x)
    versions = [tensor._version for tensor in x]
    inductor_passes.explain(FUSED[name].function, x)
    assert_equal(x, kept, "input")
    assert [tensor._version for tensor in x] == versions


def test_nothing_is_run_or_kept() -> None:
    calls = []
    kept = []

    def with_side_effects(x: Inputs) -> Tensor:
        kept.append(x.base.shape[0])
        return sample(x.base[:, 0] + x.bias, x)

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.calls = 0

        def forward(self, x: Inputs) -> Tensor:
            self.calls += 1
            self.steps += 1
            return sample(x.base[:, 0] + x.bias, x)

    x = make_inputs()
    assert len(inductor_passes.explain(with_side_effects, x).sites) == 1
    module = Counting()
    assert len(inductor_passes.explain(module, x).sites) == 1
    assert (calls, kept, module.calls, module.steps.item()) == ([], [], 0, 0)
    assert inductor_passes.report().graphs == 0
    assert not counters["dspark"]


def test_random_state_is_unchanged() -> None:
    def step(x: Inputs) -> Tensor:
        return sample(x.base[:, 0] + torch.rand_like(x.bias), x)

    state = torch.get_rng_state()
    assert inductor_passes.explain(step, make_inputs()).sites[0].fused
    assert torch.equal(torch.get_rng_state(), state)


def test_compiling_afterwards_is_not_disturbed() -> None:
    compiled = Compiled(view)
    inductor_passes.explain(view, make_inputs())
    assert_as_eager(compiled, view, make_inputs())
    inductor_passes.explain(view, make_inputs())
    assert_as_eager(compiled, view, make_inputs())
    assert len(compiled.graphs) == 1


def test_explains_what_is_compiled_already() -> None:
    compiled = torch.compile(view, backend="dspark")
    compiled(make_inputs())
    assert len(inductor_passes.explain(compiled, make_inputs()).sites) == 1
    module = torch.compile(Module(), backend="dspark")
    module(make_inputs())
    assert len(inductor_passes.explain(module, make_inputs()).sites) == 1


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        x = make_inputs()
        self.w1, self.w2 = torch.nn.Parameter(x.w1), torch.nn.Parameter(x.w2)

    def forward(self, x: Inputs) -> Tensor:
        bias = torch.nn.functional.linear(torch.nn.functional.embedding(x.prev, self.w1), self.w2)
        return sample(x.base[:, 0] + bias, x)


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_that_require_grad(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        report = inductor_passes.explain(Module(), make_inputs())
    assert [site.fused for site in report.sites] == [True]


def test_symbolic_sizes() -> None:
    x = make_inputs()
    for tensor in x:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    report = inductor_passes.explain(draft_loop, x)
    assert [site.fused for site in report.sites] == [True] * 3


def test_keyword_arguments_and_options() -> None:
    def step(x: Inputs, *, scale: float) -> Tensor:
        return sample((x.base[:, 0] + x.bias) * scale, x)

    report = inductor_passes.explain(step, make_inputs(), scale=0.5)
    assert [site.fused for site in report.sites] == [False, True]
    options = {"dspark.combine_fusion": False}
    report = inductor_passes.explain(step, make_inputs(), scale=0.5, options=options)
    assert [site.pass_name for site in report.sites] == [SAMPLER]
    assert "combine_fusion is switched off" in report.notes


def test_graph_break_is_told() -> None:
    def broken(x: Inputs) -> Tensor:
        token = sample(x.base[:, 0] + x.bias, x)
        torch._dynamo.graph_break()
        return token

    x = make_inputs()
    kept = copied(x)
    report = inductor_passes.explain(broken, x)
    assert report.sites == []
    assert any("not one graph" in note and "test_explain.py" in note for note in report.notes)
    assert_equal(x, kept, "input")


def test_error_of_the_program_is_raised() -> None:
    x = make_inputs()
    with pytest.raises(Exception, match="logits_cache must have the dtype of the logits"):
        inductor_passes.explain(view, x._replace(logits_cache=x.logits_cache.double()))


def test_unknown_option() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'dspark\.typo'"):
        inductor_passes.explain(view, make_inputs(), options={"dspark.typo": True})


# Counters and the log


def test_counters_and_report() -> None:
    torch.compile(step, backend="dspark")(make_inputs())
    assert dict(counters["dspark"]) == {
        "sampler_fusion.fused": 1,
        "sampler_fusion.skipped": 1,
        "combine_fusion.fused": 1,
    }
    assert len(inductor_passes.report().sites) == 3


def test_report_before_anything_was_compiled() -> None:
    assert "no pass ran" in str(inductor_passes.report())


def test_a_warning_for_each_site_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="inductor_passes"):
        Compiled(step)(make_inputs())
    records = [record for record in caplog.records if record.name == "inductor_passes"]
    warnings = [r.getMessage() for r in records if r.levelno == logging.WARNING]
    infos = [r.getMessage() for r in records if r.levelno == logging.INFO]
    place = f"{__file__}:{line_with('read')}"
    assert len(warnings) == 1
    assert warnings[0].startswith(f"sampler_fusion: left alone at {place}: the biased logits")
    assert infos == [
        f"sampler_fusion: fused at {__file__}:{line_with('fused')}",
        f"combine_fusion: fused at {place}",
    ]


def test_every_near_miss_has_a_line_of_the_user() -> None:
    for name in ("alpha", "soft_cap", "block_maxima_read"):
        for site in inductor_passes.explain(LEFT_ALONE[name].function, make_inputs()).sites:
            assert Path(site.file).name in ("near_misses.py", "step.py")


# A crash in a pass


def crash(*_: object) -> None:
    raise ZeroDivisionError("made up")


@pytest.mark.parametrize("fusion", [SamplerFusion, CombineFusion])
def test_crash_is_contained(
    fusion: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusion, "decide", crash)
    compiled = Compiled(LEFT_ALONE["scale"].function)
    assert_as_eager(compiled, LEFT_ALONE["scale"].function, make_inputs())
    (reason,) = compiled.reasons(fusion.name)
    assert reason == "internal error: ZeroDivisionError: made up"
    assert any(r.levelno == logging.ERROR and r.exc_info for r in caplog.records)


def test_crash_is_raised_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplerFusion, "decide", crash)
    with pytest.raises(Exception, match="made up"):
        Compiled(view, options={"dspark.strict": True})(make_inputs())


def test_crash_is_raised_by_no_odd_shape() -> None:
    """With ``strict`` every internal error would be an error of the compilation."""

    def unused_bias(x: Inputs) -> Tensor:
        return sample(x.base[:, 0], x)

    for num_rows, vocab in ((0, 5), (1, 1), (2, 1), (1, 2049)):
        for function in (view, draft_loop, unused_bias, FUSED["bias_row"].function):
            for dynamic in (False, True):
                if num_rows == 0 and function is not view:
                    continue
                compiled = Compiled(function, dynamic=dynamic, options={"dspark.strict": True})
                assert_as_eager(compiled, function, make_inputs(num_rows, vocab))
