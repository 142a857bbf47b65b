"""Faults that the self-test has to notice, each planted in one method of the decoder.

Those of drafting are wrong arguments or wrong buffers around right ops. Those of the verification
rule replace the acceptance draws of the CPU reference, so their decoders stay on the CPU.
"""

import importlib
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

import dspark_ops
from dspark_ops.selftest.decoding import Decoder, Rows, fused_step
from dspark_ops.selftest.laws import acceptance_bars

# The package has a function of this name.
_reference = importlib.import_module("dspark_ops.rejection_sample")


def _divisor(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0, temperature, 1.0)


class Fault(Decoder):
    name: ClassVar[str]
    about: ClassVar[str]
    method_needed: ClassVar[str | None] = None
    is_in_reference: ClassVar[bool] = False


class SharedNoise(Fault):
    name = "shared-noise"
    about = "draft and target share their noise"

    def step(
        self, logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
    ) -> Tensor:
        return dspark_ops.gumbel_sample(
            logits, *rows, bias=bias, logits_cache=cache, cache_col=column, is_drafting=False
        )


class CacheAfterTemperature(Fault):
    name = "cache-after-temperature"
    about = "the cache holds logits that are divided already"

    def step(
        self, logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
    ) -> Tensor:
        idx_mapping, temperature, _, _ = rows
        total = logits if bias is None else logits + bias
        return dspark_ops.gumbel_sample(
            (total.float() / _divisor(temperature[idx_mapping])[:, None]).to(total.dtype),
            *rows,
            logits_cache=cache,
            cache_col=column,
            is_drafting=True,
            apply_temperature=False,
        )


class Fp32Sum(Fault):
    name = "fp32-sum"
    about = "the fp32 sum is sampled, its rounding to bf16 is cached"

    def step(
        self, logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
    ) -> Tensor:
        wide = cache.float()
        wide_bias = None if bias is None else bias.float()
        token = fused_step(logits.float(), wide_bias, rows, wide, column)
        cache[:, column] = wide[:, column].to(cache.dtype)
        return token


class StopsAtFirstFailure(Fault):
    name = "stops-at-first-failure"
    about = "the block rule stops at the first test that fails"
    method_needed = "block"
    is_in_reference = True

    def verify(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.method != "block":
            return super().verify(*args)
        target_logits, draft_logits, ids, _, pos, idx_mapping, temperature, seeds = args
        num_steps = self.toy.num_steps
        live = idx_mapping >= 0  # the rows that the reference draws for
        slot = idx_mapping[live]
        p = torch.softmax(target_logits.double(), -1).view(len(live), num_steps + 1, -1)[live]
        draft = draft_logits[slot].float() / _divisor(temperature[slot])[:, None, None]
        q = torch.softmax(draft.double(), -1)
        x, pos = (y.view(len(live), num_steps + 1)[live] for y in (ids, pos))
        bars = acceptance_bars(p, q, x[:, 1:], "block")
        draw = _reference.acceptance_uniform_ref
        u = [draw(seeds[slot], pos[:, i], i) for i in range(num_steps)]
        passed = (torch.stack(u, 1) <= bars).long().cumprod(1).sum(1)  # before the first failure

        def draw_until(seed: Tensor, pos: Tensor, step: Tensor) -> Tensor:
            return torch.where(step > passed, 2.0, draw(seed, pos, step))

        with patch.object(_reference, "acceptance_uniform_ref", draw_until):
            return super().verify(*args)


class UntruncatedQ(Fault):
    name = "untruncated-q"
    about = "truncated logits are sampled, untruncated ones are cached"

    def step(
        self, logits: Tensor, bias: Tensor | None, rows: Rows, cache: Tensor, column: int
    ) -> Tensor:
        token = fused_step(logits, bias, rows, cache, column)
        slot = rows[0]
        if bias is not None:
            untruncated = self.toy.base[column].to(bias.device) + bias
            cache[slot[slot >= 0], column] = untruncated[slot >= 0]
        return token


class SeedsIgnored(Fault):
    name = "seeds-ignored"
    about = "every request draws with the same seed"

    def keys(self, seeds: Tensor) -> Tensor:
        return torch.zeros_like(seeds)


class AcceptanceWithoutStep(Fault):
    name = "acceptance-without-step"
    about = "a position that returns in a later round meets its old acceptance draw"
    method_needed = "block"
    is_in_reference = True

    def verify(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        draw = _reference.acceptance_uniform_ref

        def draw_without_step(seed: Tensor, pos: Tensor, step: Tensor) -> Tensor:
            return draw(seed, pos, 0)

        with patch.object(_reference, "acceptance_uniform_ref", draw_without_step):
            return super().verify(*args)


FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        SharedNoise,
        CacheAfterTemperature,
        Fp32Sum,
        StopsAtFirstFailure,
        UntruncatedQ,
        SeedsIgnored,
        AcceptanceWithoutStep,
    )
}
