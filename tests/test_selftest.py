"""The self-test passes, for any seed, and fails for each planted fault; its laws and exit statuses.

Seeds are fixed, so what passes once passes always; the rate of false alarms is the command's.
"""

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dspark_ops.selftest import checks, decoding, faults, laws, suite, toys

CHECKOUT = Path(__file__).parent.parent
QUICK = 6000
TOYS = {toy.name: toy for toy in toys.toys()}


@pytest.fixture(scope="module")
def command() -> ModuleType:
    return importlib.import_module("dspark_ops.selftest.__main__")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the command has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(draws: int = QUICK, seed: int = 0, **options) -> suite.Settings:
    return suite.Settings("cpu", draws, seed, compiled_toys=(), **options)


def rejected(found: list[checks.Check], alpha: float) -> list[str]:
    return [f"{x.toy}, {x.method}: {x.name}" for x in found if x.p_value < alpha]


# The command


def test_a_clean_run_passes(command, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert command.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "False alarms: 1e-06 of a run, so 1.6e-08 of each of 63 statistical checks" in printed
    assert printed.count("same text, unfused") == 14
    assert printed.count("same text, compiled") == 4
    assert "all checks passed" in printed
    assert torch.get_num_threads() == threads


def test_every_planted_fault_is_caught(command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--plant", "all", "--quick"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line}
    for name in faults.FAULTS:
        assert float(rows[name][-1]) > 4, rows[name]  # times the limit
    assert "7 of 7 faults caught" in printed


def test_a_planted_run_fails(command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--plant", "seeds-ignored", "--draws", "1000"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("planted: seeds-ignored")
    assert "FAILED" in printed


def test_a_missed_fault_fails(command, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Harmless(faults.Fault):
        name = "harmless"
        about = "nothing is wrong"

    monkeypatch.setattr(command, "FAULTS", {"harmless": Harmless})
    assert command.main(["--plant", "all", "--draws", "1000"]) == 1
    assert "MISSED" in capsys.readouterr().out
    assert command.main(["--plant", "harmless", "--draws", "1000"]) == 0


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspark_ops.selftest", *options],
        cwd=CHECKOUT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_exit_status_of_the_module_and_a_missing_compiler() -> None:
    done = run("--draws", "1000", "--method", "block", CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    assert "skipped, the compiled step: Inductor finds no C++ compiler" in done.stdout
    assert "same text, compiled" not in done.stdout
    done = run("--draws", "1000", "--method", "block", "--plant", "stops-at-first-failure")
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draws", "999"], r"an integer from 1000 on, .*; got '999'"),
        (["--draws", "1e5"], r"got '1e5'"),
        (["--seed", "-1"], r"from 0 to 2\^31 - 1; got '-1'"),
        (["--seed", "2147483648"], r"got '2147483648'"),
        (["--device", "tpu"], r"must be cpu, cuda or cuda:N; got 'tpu'"),
        (["--device", "meta"], r"must be cpu, cuda or cuda:N; got 'meta'"),
        (["--device", "cuda:99"], r"sees \d+ GPUs here; got 'cuda:99'; use --device cpu"),
        (["--method", "both"], r"invalid choice: 'both'"),
        (["--plant", "gremlin"], r"invalid choice: 'gremlin' .*shared-noise.*all"),
        (["--plant", "all", "--method", "standard"], r"leave --method out"),
        (
            ["--plant", "acceptance-without-step", "--method", "standard"],
            r"a fault of the block rule; use --method block, got standard",
        ),
    ],
)
def test_bad_options(command, options, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(options)
    assert stopped.value.code == 2
    assert re.search(f"error: argument .*{message}", capsys.readouterr().err)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plant", [[], ["--plant", "all"]])
def test_on_a_gpu(command, plant: list[str]) -> None:
    assert command.main(["--device", "cuda", "--quick", *plant]) == 0


# Statistics


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [1, 2])
def test_clean_runs_pass_for_other_seeds(seed: int) -> None:
    options = settings(seed=seed)
    found = list(suite.run_clean(options, print))
    assert rejected(found, options.alpha) == []
    assert sum(x.statistic is not None for x in found) == options.num_statistical
    assert sum(x.statistic is None for x in found) == 7 * 2 * 2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("methods", [("standard",), ("block",)])
def test_one_method_has_as_many_checks_as_it_says(methods: tuple[str, ...]) -> None:
    options = settings(1000, methods=methods)
    found = list(suite.run_planted(options, faults.SeedsIgnored))
    assert sum(x.statistic is not None for x in found) == options.num_statistical
    assert options.alpha * options.num_statistical == pytest.approx(checks.FALSE_ALARM)


@pytest.mark.parametrize(
    ("p", "q", "steps", "method", "mean"),
    [
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, "standard", 10 / 9),
        ((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2, "block", 11 / 9),
        ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), 3, "standard", 1.176),
        ((0.1, 0.6, 0.3), (0.5, 0.2, 0.3), 3, "block", 1.284),
    ],
)
def test_b2_04_accepted_lengths(p, q, steps: int, method: str, mean: float) -> None:
    vocab = len(p)
    target, draft = (torch.tensor(x).log().expand(vocab, -1) for x in (p, q))
    toy = toys.Toy("published", target, torch.zeros(steps, vocab), draft, num_tokens=2)
    law = laws.length_law(toy, 1.0, method)
    assert law.sum(1) == pytest.approx(1.0)
    assert law @ torch.arange(steps + 1.0).double() == pytest.approx(mean, abs=1e-6)


def test_law_of_a_text() -> None:
    """Two tokens by hand, and the law of the last ones sums over the first."""
    toy = TOYS["one step"]
    law = laws.target_law(toy, 0.7)
    pairs = laws.text_law(toy, 0.7, 0, 2).view(3, 3)
    for first in range(3):
        for second in range(3):
            assert pairs[first, second] == law[0, first] * law[first, second]
    assert torch.allclose(laws.text_law(toy, 0.7, 1, 1), pairs.sum(0), rtol=1e-14)
    weight = torch.exp((toy.target / 0.7).double())
    assert torch.allclose(law, weight / weight.sum(1, keepdim=True), rtol=1e-6)


def test_a_draft_law_is_that_of_rounded_sums() -> None:
    law = laws.draft_law(TOYS["rounding"], 1.0)
    e = math.e  # the biases are 1/16 apart
    after_0 = torch.tensor([1, e, 1, e], dtype=torch.float64)
    assert torch.allclose(law[0, 0], after_0 / after_0.sum())
    reduced = TOYS["reduced"]
    never = torch.ones(16, dtype=torch.bool)
    never[reduced.draft_ids] = False
    assert (laws.draft_law(reduced, 0.7)[..., never] == 0).all()


@pytest.mark.usefixtures("one_thread")
def test_the_fault_of_the_block_rule_is_what_it_says() -> None:
    """It accepts i tokens or more when the first i tests pass."""
    toy = TOYS["returning"]
    drafts = torch.cartesian_prod(*[torch.arange(3)] * 2)
    before = torch.stack([torch.zeros(9, dtype=torch.long), drafts[:, 0]], 1)
    q = laws.draft_law(toy, 1.0)[torch.arange(2), before]
    p = laws.target_law(toy, 1.0)[torch.cat([before, drafts[:, 1:]], 1)]
    drawn = q.gather(-1, drafts[..., None]).prod(1)
    reached = (drawn * laws.acceptance_bars(p, q, drafts, "block").cumprod(1)).sum(0)
    law = torch.stack([1 - reached[0], reached[0] - reached[1], reached[1]])

    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(2**62, (10_000,), generator=generator)
    record = faults.StopsAtFirstFailure(toy, "block", "cpu").decode(seeds, torch.ones(10_000))
    counts = torch.bincount(record.lengths[:, 0], minlength=3)
    assert checks.fit(counts, law * 10_000).p_value > 1e-6
    right = laws.length_law(toy, 1.0, "block")[0]
    assert checks.fit(counts, right * 10_000).p_value < 1e-50


def test_p_values_and_limits() -> None:
    """Quantiles from a table of chi-square."""
    for chi2, dof, p_value in ((3.841459, 1, 0.05), (23.20925, 10, 0.01), (149.4493, 100, 0.001)):
        assert checks.Statistic(chi2, dof).p_value == pytest.approx(p_value, rel=1e-5)
        assert checks.limit(dof, p_value) == pytest.approx(chi2, rel=1e-5)
    assert checks.Statistic(0.0, 0).p_value == 1.0
    assert checks.Statistic(math.inf, 1).p_value == 0.0


def test_fit_of_counts() -> None:
    law = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    counts = torch.tensor([520, 290, 190, 0])
    chi2 = 2 * (520 * math.log(1.04) + 290 * math.log(290 / 300) + 190 * math.log(0.95))
    assert checks.fit(counts, law * 1000) == (pytest.approx(chi2), 2)
    impossible = torch.tensor([520, 290, 189, 1])
    assert checks.fit(impossible, law * 1000).p_value == 0.0
    # Of 100 draws the cells of 10, 8 and 7 share one, as do less than 25 with the next cell.
    expected = torch.tensor([40.0, 10, 35, 8, 7], dtype=torch.float64)
    assert checks.fit(torch.tensor([40, 0, 35, 20, 5]), expected) == (0.0, 2)
    assert checks.fit(torch.tensor([60, 15]), torch.tensor([65.0, 10]).double()) == (0.0, 0)
    assert checks.fit(torch.tensor([0, 0]), torch.zeros(2, dtype=torch.float64)) == (0.0, 0)


def test_which_check_caught_a_fault(command) -> None:
    def check(name: str, chi2: float | None, dof: int = 1) -> checks.Check:
        statistic = None if chi2 is None else checks.Statistic(chi2, dof)
        return checks.Check("toy", "block", name, 1000, statistic, 0.0)

    near, far, equal = check("near", 300.0, 100), check("far", 200.0), check("text", None)
    assert command.caught_by([near, far, equal], 1e-8).startswith("toy, block: far ")
    assert command.caught_by([equal], 1e-8) == "toy, block: text"
    never = command.caught_by([far, check("impossible", math.inf)], 1e-8).split()
    assert never[2:] == ["impossible", "inf", "1", "33", "inf"]


def test_another_way_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of one request; a compiled step that is not fused."""
    toy = TOYS["returning"]
    seeds = torch.arange(40)
    record = decoding.Decoder(toy, "block", "cpu").decode(seeds, torch.ones(40))
    other = record._replace(tokens=record.tokens.clone())
    assert checks.check_same(toy, "block", "unfused", record, other, "").p_value == 1.0
    assert checks.check_same(toy, "block", "compiled", record, other, "0 of 2").p_value == 0.0
    other.tokens[7, 3] ^= 1
    assert checks.check_same(toy, "block", "unfused", record, other, "").p_value == 0.0
