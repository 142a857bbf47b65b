"""Random maskings, right ones and ones that are off by a step: what is fused masks as eager does.

A program is a choice for each step of a masking. As chosen at first they mask by top-k and top-p,
and are fused; then one or two steps are chosen anew, which may make it another masking. That must
be left alone, or be one that keeps the same tokens for all inputs.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .compiling import Compiled
from .inputs import assert_equal, copied
from .masking_inputs import INF, MASKING, P, Rows, make_rows, masked_by_rule

PROGRAMS = 240
OPTIONS = {"dspark.numerics": "lossless", "dspark.strict": True}

STEPS: dict[str, tuple[str, ...]] = {
    "before": ("", "", "topk"),
    "sort": ("ascending", "descending"),
    "by": ("values", "ids", "probs"),
    "rank": ("", "", "7", "0", "x.k[:, None]", "x.k.clamp(min=1)[:, None]"),
    "rank_is": (">=", ">"),
    "mass": ("own", "before", "padded"),
    "is": ("<", "<=", ">", ">="),
    "p": (str(P), "x.p[:, None]", "0.0", "-0.5"),
    "complement": ("", "1 - "),
    "shift": ("", "write", "cat", "two"),
    "guard": ("", "first", "last", "two"),
    "polarity": ("removes", "keeps"),
    "inverted": ("", "~"),
    "masked": ("logits", "values"),
    "back": ("scatter", "gather", "wrong"),
    "value": ("-INF", "-INF", "-1e4"),
    "read": ("", "", "", "order.sum(-1)"),
}


class Programs:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def right(self) -> dict[str, str]:
        """A masking that the op does; ``rank`` only where all is done in the order of the sort."""
        pick = self.random.choice
        step = {name: pick(choices) for name, choices in STEPS.items()}
        descending = step["sort"] == "descending"
        step.update(rank_is=">=", value="-INF", read="", p=pick((str(P), "x.p[:, None]")))
        step["complement"] = "" if descending else "1 - "
        step["mass"] = pick(("own", "before", "padded")) if descending else "own"
        needs_shift = descending and step["mass"] == "own"
        step["shift"] = pick(("write", "cat")) if needs_shift else ""
        step["guard"] = "" if step["shift"] == "cat" else "first" if descending else "last"
        step["polarity"] = pick(("removes", "keeps"))
        test = (">", ">=") if descending == (step["polarity"] == "removes") else ("<", "<=")
        step["is"] = pick(test)
        step["back"] = pick(("scatter", "gather"))
        if step["by"] == "probs":
            step["masked"] = "logits"
        if not descending or step["masked"] == "logits":
            step["rank"] = ""
        elif step["rank"] in ("0", "x.k[:, None]"):
            step["rank"] = pick(("7", "x.k.clamp(min=1)[:, None]"))
        return step

    def changed(self, step: dict[str, str]) -> dict[str, str]:
        names = self.random.sample(list(STEPS), self.random.randint(1, 2))
        return {**step, **{name: self.random.choice(STEPS[name]) for name in names}}


def source_of(step: dict[str, str]) -> str:
    lines = ["logits = x.logits"]
    if step["before"]:
        lines += ["top, ids = logits.topk(9)"]
        lines += ["logits = torch.full_like(logits, -INF).scatter(1, ids, top)"]
    descending = step["sort"] == "descending"
    if step["by"] == "values":
        lines += [f"values, order = logits.sort(-1, descending={descending})"]
    elif step["by"] == "ids":
        lines += [f"order = logits.argsort(-1, descending={descending})"]
        lines += ["values = logits.gather(-1, order)"]
    else:
        lines += [f"values, order = logits.softmax(-1).sort(-1, descending={descending})"]
    if step["rank"]:
        lines += ["place = torch.arange(values.shape[-1], device=values.device)"]
        lines += [f"values = values.masked_fill(place {step['rank_is']} {step['rank']}, -INF)"]
    lines += ["probs = values" if step["by"] == "probs" else "probs = values.softmax(-1)"]
    lines += ["mass = probs.cumsum(-1)"]
    if step["mass"] == "before":
        lines += ["mass = mass - probs"]
    elif step["mass"] == "padded":
        lines += ["mass = F.pad(mass[:, :-1], (1, 0))"]
    lines += [f"mask = mass {step['is']} {step['complement']}{step['p']}"]
    keep = step["polarity"] == "keeps"
    if step["shift"] == "write":
        lines += ["mask[:, 1:] = mask[:, :-1].clone()"]
    elif step["shift"] == "two":
        lines += ["mask[:, 2:] = mask[:, :-2].clone()"]
    elif step["shift"] == "cat":
        lines += [f"mask = torch.cat([torch.full_like(mask[:, :1], {keep}), mask[:, :-1]], -1)"]
    if step["guard"]:
        entry = {"first": "0", "last": "-1", "two": ":2" if descending else "-2:"}[step["guard"]]
        lines += [f"mask[:, {entry}] = {keep}"]
    if step["inverted"]:
        lines += ["mask, keep = ~mask, None"]
        keep = not keep
    name = "values" if step["masked"] == "values" else "mask"
    if step["masked"] == "values":
        fill = f"mask, values, {step['value']}" if keep else f"mask, {step['value']}, values"
        lines += [f"values = torch.where({fill})"]
    if step["back"] == "scatter":
        lines += [f"{name} = torch.zeros_like({name}).scatter(1, order, {name})"]
    else:
        index = "order.argsort(-1)" if step["back"] == "gather" else "order"
        lines += [f"{name} = {name}.gather(1, {index})"]
    if step["masked"] == "values":
        lines += ["out = values"]
    else:
        fill = f"mask, logits, {step['value']}" if keep else f"mask, {step['value']}, logits"
        lines += [f"out = torch.where({fill})"]
    lines += [f"return out, {step['read'] or 'None'}"]
    return "def program(x):\n    " + "\n    ".join(lines) + "\n"


def function_of(source: str) -> Callable[[Rows], Any]:
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "INF": INF}
    exec(source, names)
    return names["program"]


def rule_of(step: dict[str, str], x: Rows) -> Tensor:
    p = x.p if "x.p" in step["p"] else P
    k = None
    if step["rank"]:
        k = 7 if step["rank"] == "7" else x.k
    logits = masked_by_rule(x.logits, 9, None) if step["before"] else x.logits
    return masked_by_rule(logits, k, p)


@pytest.mark.parametrize("seed", range(4))
def test_random(seed: int) -> None:
    programs = Programs(seed)
    fused = changed_and_fused = 0
    for number in range(PROGRAMS // 4):
        right = programs.right()
        for step in (right, programs.changed(right)):
            source = source_of(step)
            program = function_of(source)
            torch._dynamo.reset()
            compiled = Compiled(program, options=OPTIONS)
            x = make_rows(num_rows=12, vocab=40, seed=number)
            expected, _ = program(copied(x))
            got, _ = compiled(copied(x))
            sites = 1 + bool(step["before"])
            if step is right:
                assert compiled.fused(MASKING) == sites, (source, compiled.reasons(MASKING))
                assert_equal(got, rule_of(step, x), source)
            if compiled.fused(MASKING) == sites:
                assert_equal(got, expected, source)
                fused += 1
                changed_and_fused += step is not right
            else:
                assert len(compiled.sites) == sites, source
    assert fused > PROGRAMS // 4
    assert 0 < changed_and_fused < PROGRAMS // 4
