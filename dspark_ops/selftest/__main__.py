"""The command: options, tables, exit status."""

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from dspark_ops.selftest.checks import FALSE_ALARM, Check, limit
from dspark_ops.selftest.faults import FAULTS, Fault
from dspark_ops.selftest.suite import METHODS, Settings, run_clean, run_planted
from dspark_ops.selftest.toys import toys

DRAWS = {"cpu": 100_000, "cuda": 1_000_000}
PLANTED_DRAWS = 20_000
QUICK_DRAWS = 6_000
QUICK_COMPILED = ("returning", "reduced")
LEAST_DRAWS = 1_000


def _draws(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_DRAWS:
        raise argparse.ArgumentTypeError(
            f"must be an integer from {LEAST_DRAWS} on, fewer draws show nothing; got {text!r}"
        )
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 2^31 - 1; got {text!r}")
    return int(text)


def _device(text: str) -> str:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in DRAWS:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N; got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here; got {text!r}; "
            "use --device cpu"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    planted = "\n".join(f"  {name:24s} {fault.about}" for name, fault in FAULTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m dspark_ops.selftest",
        description="Does what verification lets through have the target's distribution?",
        epilog=f"faults to plant:\n{planted}\n\n"
        "exit status: 0 all passed (--plant all: each fault was caught), 1 not, 2 wrong options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", type=_device, default="cpu", help="cpu (default), cuda or cuda:N")
    add(
        "--draws",
        type=_draws,
        help="sampled requests of each toy and method (default: "
        f"{DRAWS['cpu']}, on a GPU {DRAWS['cuda']}, with a fault {PLANTED_DRAWS})",
    )
    add("--seed", type=_seed, default=0, help="of the requests' seeds (default: 0)")
    add("--method", choices=METHODS, help="only this rule (default: both)")
    add("--plant", choices=(*FAULTS, "all"), metavar="FAULT", help="plant a fault, or each of all")
    add("--quick", action="store_true", help=f"{QUICK_DRAWS} draws, two of the toys compiled")
    return parser


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    fault = FAULTS.get(options.plant)
    methods = METHODS if options.method is None else (options.method,)
    needed = None if fault is None else fault.method_needed
    if needed is not None and needed not in methods:
        parser.error(
            f"argument --plant: {options.plant} is a fault of the {needed} rule; "
            f"use --method {needed}, got {options.method}"
        )
    if options.plant == "all" and options.method == "standard":
        parser.error("argument --plant: some faults are of the block rule; leave --method out")
    draws = DRAWS[torch.device(options.device).type]
    if options.plant is not None:
        draws = PLANTED_DRAWS
    if options.quick:
        draws = QUICK_DRAWS
    settings = Settings(options.device, options.draws or draws, options.seed, methods)
    return replace(settings, compiled_toys=QUICK_COMPILED) if options.quick else settings


def _of_fault(settings: Settings, fault: type[Fault]) -> Settings:
    return replace(settings, device="cpu") if fault.is_in_reference else settings


def print_checks(checks: Iterable[Check], alpha: float) -> list[Check]:
    """The table, row by row as they come; returns the checks that failed."""
    print(
        f"\n{'toy':10s} {'method':9s} {'check':23s} {'draws':>8s} {'chi2':>9s} {'dof':>5s}"
        f" {'p-value':>8s}  verdict"
    )
    failed = []
    for check in checks:
        has_failed = check.p_value < alpha
        if has_failed:
            failed.append(check)
        columns = f"{'equal':>9s} {'':5s} {'':8s}"
        if check.statistic is not None:
            chi2, dof = check.statistic
            columns = f"{chi2:9.1f} {dof:5d} {check.p_value:8.2g}"
        verdict = f"FAILED {check.note}".rstrip() if has_failed else "ok"
        print(
            f"{check.toy:10s} {check.method:9s} {check.name:23s} {check.draws:8d} {columns}"
            f"  {verdict}",
            flush=True,
        )
    return failed


def self_test(settings: Settings, fault: type[Fault] | None) -> bool:
    """Print the table of a run; whether all passed."""
    if fault is not None:
        settings = _of_fault(settings, fault)
        print(f"planted: {fault.name}, {fault.about}")
    print(
        f"{len(toys())} toys on {settings.device}, {settings.draws} draws of each by each method, "
        f"seed {settings.seed}.\nFalse alarms: {FALSE_ALARM:.0e} of a run, so {settings.alpha:.1e} "
        f"of each of {settings.num_statistical} statistical checks."
    )
    start = time.monotonic()
    if fault is None:
        checks = run_clean(settings, print)
    else:
        checks = run_planted(settings, fault)
    failed = print_checks(checks, settings.alpha)
    count = f"{len(failed)} checks failed" if failed else "all checks passed"
    print(f"\n{count}, {time.monotonic() - start:.0f} s")
    return not failed


def caught_by(failed: Iterable[Check], alpha: float) -> str:
    """The failed check that is furthest beyond its limit, and how many times."""

    def times(check: Check) -> float:
        if check.statistic is None:
            return 0.0
        return check.statistic.chi2 / limit(check.statistic.dof, alpha)

    check = max(failed, key=times)
    name = f"{check.toy}, {check.method}: {check.name}"
    if check.statistic is None:
        return name
    chi2, dof = check.statistic
    return f"{name:44s} {chi2:8.0f} {dof:4d} {limit(dof, alpha):6.0f} {times(check):6.1f}"


def plant_all(settings: Settings) -> bool:
    """Plant each fault and print which check caught it; whether all were."""
    print(
        f"Each fault planted, {settings.draws} draws of each toy by each method, seed "
        f"{settings.seed}.\nOf the checks that fail, the one furthest beyond its limit:\n"
    )
    print(
        f"{'fault':24s} {'device':6s} {'failed':>6s}  {'caught by':44s} {'chi2':>8s} {'dof':>4s}"
        f" {'limit':>6s} {'times':>6s}"
    )
    num_caught = 0
    for fault in FAULTS.values():
        run = _of_fault(settings, fault)
        failed = [check for check in run_planted(run, fault) if check.p_value < run.alpha]
        num_caught += bool(failed)
        found = caught_by(failed, run.alpha) if failed else "MISSED"
        print(f"{fault.name:24s} {run.device:6s} {len(failed):6d}  {found}", flush=True)
    print(f"\n{num_caught} of {len(FAULTS)} faults caught")
    return num_caught == len(FAULTS)


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = _settings(parser, options)
    # The CPU ops are small: a second thread costs them more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if options.plant == "all":
            passed = plant_all(settings)
        else:
            passed = self_test(settings, FAULTS.get(options.plant))
    finally:
        torch.set_num_threads(threads)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
