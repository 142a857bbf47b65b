"""Rows and filters of top_k_top_p_ from explicit seeds, and its two implementations."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dspark_ops
from dspark_ops.mass import LARGEST, masses_ref

from .conftest import Kernel, op_module
from .top_k_top_p_model import assert_kept

module = op_module("top_k_top_p")
INF, NAN = math.inf, math.nan
I32 = torch.int32


class Cpu:
    """The op on CPU tensors."""

    device = "cpu"
    top_k_top_p_ = staticmethod(dspark_ops.top_k_top_p_)

    @staticmethod
    def top_k_top_p(logits: Tensor, k: Any, p: Any, *, mask_value: float = -INF) -> Tensor:
        return torch.ops.dspark.top_k_top_p(logits, k, p, mask_value)


class Kernels:
    """The launchers: interpreted on CPU tensors, compiled on a GPU."""

    device = Kernel.device

    @staticmethod
    def top_k_top_p_(
        logits: Tensor, k: Any = None, p: Any = None, *, mask_value: float = -INF
    ) -> Tensor:
        module._top_k_top_p_launch_(logits, k, p, mask_value)
        return logits

    @staticmethod
    def top_k_top_p(logits: Tensor, k: Any, p: Any, *, mask_value: float = -INF) -> Tensor:
        return module._top_k_top_p_launch(logits, k, p, mask_value)


Ops = type[Cpu] | type[Kernels]
IMPLEMENTATIONS = {"cpu": Cpu, "kernel": Kernels}


def under_interpreter(ops: Ops, few: Any, many: Any) -> Any:
    """A row takes the interpreter tens of milliseconds."""
    return few if ops is Kernels and ops.device == "cpu" else many


# Rows: (generator, B, V) -> f32 [B, V] on the generator's device


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, device=g.device)


def _ints(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g, device=g.device).float()


def _put(g: torch.Generator, x: Tensor, value: float, num: int = 3) -> Tensor:
    """``value`` at ``num`` ids of each row."""
    ids = _ints(g, 0, x.shape[1], x.shape[0], num).long()
    return x.scatter(1, ids, value)


def _scattered(g: torch.Generator, x: Tensor) -> Tensor:
    """A permutation of each row."""
    return x.gather(1, _normal(g, *x.shape).argsort(1))


def _zipf(g: torch.Generator, b: int, v: int) -> Tensor:
    rank = torch.arange(1.0, v + 1, device=g.device)
    return _scattered(g, (-1.1 * rank.log()).expand(b, v))


def _peaked(g: torch.Generator, b: int, v: int) -> Tensor:
    """One token of about half of the mass over a flat tail, the tail in steps of one ulp."""
    tail = -1e-6 * torch.arange(v, device=g.device).float()
    return _put(g, tail.repeat(b, 1), math.log(v), 1)


def _one_ulp_apart(g: torch.Generator, b: int, v: int) -> Tensor:
    base = 2.0 ** _ints(g, -3, 7, b, 1)
    return base * (1 + 2.0**-23 * _ints(g, 0, 4, b, v))


def _huge(g: torch.Generator, b: int, v: int) -> Tensor:
    x = _put(g, _normal(g, b, v) * 1e30, -LARGEST)
    x[::2] = _put(g, x[::2], LARGEST, 2)
    x[1::4] = x[1::4] * 1e-26
    return x


def _signed_zeros(g: torch.Generator, b: int, v: int) -> Tensor:
    zeros = torch.where(_ints(g, 0, 2, b, v) == 0, 0.0, -0.0)
    return _put(g, _put(g, zeros, 0.5, 1), -0.5)


def _of_everything(g: torch.Generator, b: int, v: int) -> Tensor:
    x = _normal(g, b, v)
    for value in (INF, -INF, NAN, 0.0):
        x = _put(g, x, value, 2)
    return x


def _grammar(g: torch.Generator, b: int, v: int) -> Tensor:
    """Few ids are allowed, in every third row one."""
    allowed = _normal(g, b, v)
    mask = _put(g, torch.zeros_like(allowed), 1.0, 6)
    mask[::3] = _put(g, torch.zeros_like(allowed[::3]), 1.0, 1)
    return allowed.where(mask == 1, -INF)


KINDS: dict[str, Callable[[torch.Generator, int, int], Tensor]] = {
    "normal": lambda g, b, v: _normal(g, b, v) * 3,
    "zipf": _zipf,
    "coarse": lambda g, b, v: (_normal(g, b, v) * 2).round() / 2,
    "three_values": lambda g, b, v: _ints(g, 0, 3, b, v) / 4,
    "bf16": lambda g, b, v: (_normal(g, b, v) * 3).bfloat16().float(),
    "equal": lambda g, b, v: _normal(g, b, 1).repeat(1, v),
    "one_hot": lambda g, b, v: _put(g, torch.full((b, v), -60.0, device=g.device), 0.0, 1),
    "peaked": _peaked,
    "rising": lambda g, b, v: _normal(g, b, v).sort(1).values,
    "falling": lambda g, b, v: _normal(g, b, v).sort(1, descending=True).values,
    "mostly_minus_inf": lambda g, b, v: _normal(g, b, v).where(_ints(g, 0, 10, b, v) == 0, -INF),
    "grammar": _grammar,
    "one_ulp_apart": _one_ulp_apart,
    "huge": _huge,
    "denormal": lambda g, b, v: _ints(g, -40, 40, b, v) * 2.0**-149,
    "signed_zeros": _signed_zeros,
    "far_from_zero": lambda g, b, v: _normal(g, b, v) * 4 - 1000,
    "far_apart": lambda g, b, v: _normal(g, b, v) * 50,
    "nan": lambda g, b, v: _put(g, _normal(g, b, v), NAN),
    "inf": lambda g, b, v: _put(g, _normal(g, b, v), INF),
    "of_everything": _of_everything,
    "minus_inf": lambda g, b, v: torch.full((b, v), -INF, device=g.device),
}


def make_rows(kind: str, num_rows: int, vocab: int, seed: int, device: str = "cpu") -> Tensor:
    """f32 [B, V], the same for the same arguments."""
    number = list(KINDS).index(kind)
    generator = torch.Generator(device).manual_seed(seed * 1000 + number)
    return KINDS[kind](generator, num_rows, vocab).contiguous()


def rows_of_all_kinds(each: int, vocab: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.cat([make_rows(kind, each, vocab, seed, device) for kind in KINDS])


# Filters


def k_sentinels(vocab: int) -> list[int]:
    return [0, -1, vocab, vocab + 1, 1 << 30, 1, 2, max(vocab - 1, 1), -(2**31), 2**31 - 1]


P_SENTINELS = [0.0, -1.0, 1e-30, 1e-9, 0.5, 0.9, 0.9999999, 1.0, 2.0, NAN, 1e-45, 1 - 2**-24, -INF]


def make_filters(
    num_rows: int, vocab: int, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """k i32 [B] and p f32 [B]: sentinels in a third of the rows each, independently."""
    g = torch.Generator().manual_seed(seed + 77)
    k = torch.rand(num_rows, generator=g).mul(math.log(vocab + 1)).exp().int()
    p = torch.rand(num_rows, generator=g)
    near_one = 1 - 10.0 ** -(torch.rand(num_rows, generator=g) * 6)
    p = p.where(torch.rand(num_rows, generator=g) < 0.6, near_one)
    ks, ps = torch.tensor(k_sentinels(vocab), dtype=I32), torch.tensor(P_SENTINELS)
    k_sentinel = ks[torch.randint(len(ks), (num_rows,), generator=g)]
    p_sentinel = ps[torch.randint(len(ps), (num_rows,), generator=g)]
    k = k.where(torch.rand(num_rows, generator=g) < 0.67, k_sentinel)
    p = p.where(torch.rand(num_rows, generator=g) < 0.67, p_sentinel)
    return k.to(device), p.to(device)


def row_whose_goal_needs_integers() -> tuple[Tensor, float, int]:
    """(row, p, tokens that reach it): one fewer has the mass to reach less 1, and that is 2^56.

    Rounded to a float64, whose spacing there is 16, the sum of one fewer would reach it already.
    """
    num_tops, p = 4096, 1 - 2.0**-24
    grid = torch.arange(9 * 1024, 32 * 1024).float() / -1024
    masses = masses_ref(grid, torch.zeros(1), 0).tolist()
    by_mass = list(zip(masses, grid.tolist(), strict=True))
    odd, odd_logit = next(x for x in by_mass if x[0] < 2**31 and x[0] % 2)
    before = num_tops * 2**44 + odd
    for rest in range(2**32, 2**32 + 5000):
        goal = math.ceil(p * float(before + rest))
        if before < goal <= float(before):
            break
    tail = []
    for mass, logit in by_mass:
        while 0 < mass < 2**30 and mass <= rest:
            tail.append(logit)
            rest -= mass
    return torch.tensor([[0.0] * num_tops + [odd_logit] + tail]), p, num_tops + 2


# Calls


def same_bits(x: Tensor, y: Tensor) -> bool:
    if x.device != y.device:
        x, y = x.cpu(), y.cpu()
    return torch.equal(x.contiguous().view(I32), y.contiguous().view(I32))


def tensors(k: Any, p: Any) -> tuple[Tensor | None, Tensor | None]:
    """Lists as the tensors that the op takes."""
    k = torch.tensor(k, dtype=I32) if isinstance(k, list) else k
    p = torch.tensor(p, dtype=torch.float32) if isinstance(p, list) else p
    return k, p


def filtered(ops: Ops, rows: Tensor, k: Any, p: Any, mask_value: float = -INF) -> Tensor:
    """A filtered copy of ``rows``, on their device, by the in-place op; not yet compared."""
    k, p = (None if x is None else x.to(ops.device) for x in tensors(k, p))
    logits = rows.to(ops.device, copy=True).contiguous()
    assert ops.top_k_top_p_(logits, k, p, mask_value=mask_value) is logits
    return logits.to(rows.device)


def check(ops: Ops, rows: Tensor, k: Any, p: Any, mask_value: float = -INF) -> Tensor:
    """``filtered``, which has to satisfy the model and, bit for bit, the CPU implementation."""
    out = filtered(ops, rows, k, p, mask_value)
    k, p = tensors(k, p)
    assert_kept(rows, out, k, p, mask_value)
    if ops is Kernels:
        assert same_bits(out, filtered(Cpu, rows.cpu(), k, p, mask_value))
    return out


def kept_ids(ops: Ops, rows: list[list[float]] | Tensor, k: Any, p: Any) -> list[list[int]]:
    """Ids that ``check`` finds kept: neither masked nor -inf."""
    rows = torch.as_tensor(rows)
    out = check(ops, rows, k, p, -12345.0)
    return [row.nonzero().flatten().tolist() for row in (out != -12345.0) & (out != -INF)]
