"""Random programs that write a bool buffer around the op: fused or not, they do what eager does.

A program is a list of statements, most of them writes of random parts of the buffer. What a static
one leaves is told by eager, run with opposite contents; all of those that leave padding are fused.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from .compiling import Compiled
from .inputs import assert_as_eager, copied
from .padding_inputs import PADDING, Batch, make_batch, prepare

LENGTH = 10
STRICT = {"dspark.strict": True}
STATIC, SYMBOLIC = 176, 24  # programs


class Programs:
    """``bounds`` are expressions of n and p that a slice may have."""

    def __init__(self, seed: int, bounds: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self.bounds = bounds

    def one(self) -> str:
        pick = self.random
        lines = [self.statement() for _ in range(pick.randint(0, 4))]
        if pick.random() < 0.7:
            lines += self.padding()
        for _ in range(2 if pick.random() < 0.15 else 1):
            lines.insert(pick.randint(0, len(lines)), "prepare(x)")
        if pick.random() < 0.3:
            lines.insert(pick.randint(0, len(lines)), self.read())
        body = "\n    ".join(["m, read = x.is_padding, []", *lines, "return read"])
        return f"def program(x, n, p):\n    {body}\n"

    def slice(self) -> str:
        return f"{self.random.choice(self.bounds)}:{self.random.choice(self.bounds)}"

    def part(self) -> str:
        pick = self.random.random()
        if pick < 0.2:
            return "m"
        if pick < 0.8:
            return f"m[{self.slice()}]"
        return f"m[{self.slice()}][{self.slice()}]"

    def value(self) -> str:
        return self.random.choice(("True", "False"))

    def statement(self) -> str:
        pick = self.random.random()
        part, value, bound = self.part(), self.value(), self.random.choice(self.bounds) or "3"
        if pick < 0.4:
            return f"{part}.fill_({value})"
        if pick < 0.65:
            return f"{part}[:] = {value}"
        if pick < 0.7:
            return f"m[{self.random.randint(-3, 3)}] = {value}"
        if pick < 0.75:
            return f"{part}.logical_not_()"
        if pick < 0.8:
            return f"m.copy_(indices >= {bound})"
        if pick < 0.85:
            return f"m[indices < {bound}] = {value}"
        if pick < 0.9:
            return f"m.masked_fill_(indices > {bound}, {value})"
        if pick < 0.95:
            return "m[:5].copy_(x.other[2:7])"
        return self.read()

    def read(self) -> str:
        # No clone(): stock Inductor returns the buffer itself, with what is written later.
        how = self.random.choice(("sum()", "logical_not()", "long()"))
        return f"read.append({self.part()}.{how})"

    def padding(self) -> list[str]:
        bound = self.random.choice(self.bounds) or "4"
        length = self.random.choice(("", "", "", "8"))
        kind = self.random.randrange(5)
        if kind == 0:
            return [f"m[:{length}][:{bound}].fill_(False)", f"m[:{length}][{bound}:].fill_(True)"]
        if kind == 1:
            return [f"m[:{length}].fill_(True)", f"m[:{length}][:{bound}] = False"]
        if kind == 2:
            return [f"m[{bound}:{length}] = True", f"m[:{bound}] = False"]
        if kind == 3:
            return [f"m.copy_(indices >= {bound})"]
        return ["m.zero_()", f"m[{bound}:] = True"]


def function_of(source: str) -> Callable[[Batch, int, int], Any]:
    names = {"prepare": prepare, "torch": torch}
    source = source.replace("indices", "torch.arange(m.shape[0], device=m.device)")
    exec(source, names)
    return names["program"]


def left_by(program: Callable[[Batch, int, int], Any], n: int, p: int) -> str:
    """f, t, k as it was, or ? for each entry of the buffer."""
    results = []
    for first in (False, True):
        for other in (False, True):
            x = copied(make_batch(length=LENGTH))
            x.is_padding.fill_(first)
            x.other.fill_(other)
            program(x, n, p)
            results.append(x.is_padding.tolist())
    kinds = {(False,) * 4: "f", (True,) * 4: "t", (False, False, True, True): "k"}
    return "".join(kinds.get(entry, "?") for entry in zip(*results, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_static(seed: int) -> None:
    programs = Programs(seed, ("", *map(str, range(-LENGTH - 1, LENGTH + 2))))
    fused = 0
    for number in range(STATIC // 4):
        source = programs.one()
        program = function_of(source)
        torch._dynamo.reset()
        compiled = Compiled(program, options=STRICT)
        x = make_batch(seed=number, length=LENGTH)
        assert_as_eager(compiled, program, x, 0, 0)
        left = left_by(program, 0, 0)
        reasons = compiled.reasons(PADDING)
        fused += compiled.fused(PADDING)
        if re.fullmatch("k*f*t*k*", left):
            # The second of two calls has nothing to do.
            expected = ["another prepare_positions"] if source.count("prepare(x)") > 1 else []
            if "read.append" in source:
                expected.append("held before is read by")
            for reason in reasons:
                assert any(phrase in reason for phrase in expected), (source, left, reason)
            assert reasons or compiled.fused(PADDING) or set(left) == {"k"}, source
        else:
            assert compiled.fused(PADDING) == 0, (source, left)
    assert fused >= STATIC // 4 // 3


@pytest.mark.parametrize("seed", range(4))
def test_symbolic(seed: int) -> None:
    bounds = ("", "n", "p", "n + 1", "n + p", "-p", "x.is_padding.shape[0] - n", "2", "-1", "p - n")
    programs = Programs(seed, bounds)
    fused = 0
    for number in range(SYMBOLIC // 4):
        source = programs.one()
        program = function_of(source)
        torch._dynamo.reset()
        compiled = Compiled(program, dynamic=True, options=STRICT)
        for n, p in ((3, 5), (6, 2)):
            x = make_batch(seed=number, length=LENGTH)
            assert_as_eager(compiled, program, x, n, p)
        fused += compiled.fused(PADDING)
    assert fused >= SYMBOLIC // 4 // 3
