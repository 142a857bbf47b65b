"""top_k_top_p_: keep a row's k largest logits, then of those the nucleus of mass p; mask the rest.

    order    logit descending, then id ascending (-0.0 equals 0.0)
    top-k    the first min(k, number above -inf) of that order
    top-p    of the survivors, the shortest prefix whose mass reaches p of theirs, never less than
             one token; mass(x) = exp(x - max)

logits f32 [B, V], k i32 [B], p f32 [B]. k <= 0 or k >= V: k is off. p >= 1 or NaN: p is off; p < 0
counts as 0. Both off: the row is bit-unchanged. -inf stays -inf; a row of only -inf is left as it
is. With a filter on, a row with NaN keeps its first NaN alone; with p on, a row with +inf keeps its
lowest +inf alone (of those that k left).

Why no row can lose all its tokens: masses are integers (``mass.py``), the first token of the order
has the largest, and the mass to reach is the integer ``max(1, ceil(p * total))``. Sums of integers
are exact in any order, so a prefix reaches it on one device, batch size, alignment and path exactly
if it does on all; a float sum, at p below its resolution, would round to "already reached" before
the first token. p * total is one product in f64.

The kept set is that of exact arithmetic, except where the mass of a prefix is within 1e-7 of p.
"""

from typing import Any

import torch
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._library import is_plain_gpu_call, register
from dspark_ops._triton import require_triton
from dspark_ops.mass import mass_shift, masses_ref

# 1 reference


def top_k_top_p_ref(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> Tensor:
    vocab = logits.shape[1]
    k_on = torch.zeros_like(logits[:, :1], dtype=torch.bool) if k is None else _k_is_on(k, vocab)
    p_on = torch.zeros_like(k_on) if p is None else ~(p >= 1).view(-1, 1) & ~p.isnan().view(-1, 1)
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    keep = ordered > -torch.inf
    if k is not None:
        rank = torch.arange(vocab, device=logits.device)
        keep &= (rank < k.view(-1, 1)) | ~k_on
    if p is not None:
        top = ordered[:, :1]
        mass = masses_ref(ordered, top, mass_shift(vocab)) * keep
        total = mass.sum(-1, keepdim=True)
        goal = (p.clamp(min=0).double().view(-1, 1) * total).ceil().clamp(min=1)
        goal = goal.where(top < torch.inf, 1)
        before = mass.cumsum(-1) - mass
        keep &= (before < goal) | ~p_on
    # A NaN sorts above all numbers.
    has_nan = ordered[:, :1].isnan()
    keep = torch.where(has_nan, torch.zeros_like(keep).index_fill_(1, ids.new_zeros(1), True), keep)
    kept = torch.zeros_like(keep).scatter_(1, ids, keep)
    kept |= (logits == -torch.inf) | ~(k_on | p_on)
    return logits.where(kept, mask_value)


def _k_is_on(k: Tensor, vocab: int) -> Tensor:
    return ((k > 0) & (k < vocab)).view(-1, 1)


# 3 launcher


def _check(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    _checks.check_dtype("logits", logits, (torch.float32,))
    _checks.check_logits(logits)
    for name, x, dtype in (("k", k, torch.int32), ("p", p, torch.float32)):
        if x is None:
            continue
        _checks.check_dtype(name, x, (dtype,))
        if x.dim() != 1 or x.shape[0] != logits.shape[0]:
            raise ValueError(
                f"{name} must have shape [B] = [{logits.shape[0]}], a row of logits each; "
                f"got {tuple(x.shape)}"
            )
        _checks.check_device(name, x, logits.device)


def _check_in_place(logits: Tensor, k: Tensor | None, p: Tensor | None) -> None:
    _check(logits, k, p)
    if logits.stride(0) < logits.shape[1] and logits.shape[0] > 1:
        raise ValueError(
            "logits is written in place and must have an address for each entry; got strides "
            f"{tuple(logits.stride())} for shape {tuple(logits.shape)}; pass .contiguous()"
        )


def _top_k_top_p_launch_(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> None:
    require_triton("top_k_top_p_")
    _check_in_place(logits, k, p)
    raise NotImplementedError


def _top_k_top_p_launch(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> Tensor:
    require_triton("top_k_top_p")
    _check(logits, k, p)
    raise NotImplementedError


# 4 op


def top_k_top_p_(
    logits: Tensor,
    k: Tensor | None = None,
    p: Tensor | None = None,
    *,
    mask_value: float = -torch.inf,
) -> Tensor:
    """Mask, in place, what top-k and then top-p remove; no row loses all its tokens.

    Args:
        logits: f32 [B, V], masked in place; rows may be strided, columns contiguous.
        k: i32 [B], any stride: tokens to keep. <= 0 or >= V: all. None: all in every row.
        p: f32 [B], any stride: mass to keep of what k left. >= 1 or NaN: all; <= 0: one token.
            None: all in every row.
        mask_value: what masked logits become; -inf stays -inf.

    Returns:
        ``logits``.

    Raises:
        TypeError, ValueError: metadata that does not fit.
    """
    _checks.check_is_tensor("logits", logits)
    for name, x in (("k", k), ("p", p)):
        if x is not None:
            _checks.check_is_tensor(name, x)
    if isinstance(mask_value, bool) or not isinstance(mask_value, float | int):
        raise TypeError(
            f"mask_value must be a float, got {type(mask_value).__name__}: {mask_value!r}"
        )
    if is_plain_gpu_call(logits):
        _top_k_top_p_launch_(logits, k, p, float(mask_value))
    else:
        torch.ops.dspark.top_k_top_p_.default(logits, k, p, float(mask_value))
    return logits


# 5 CPU


def _cpu_(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> None:
    _check_in_place(logits, k, p)
    logits.copy_(top_k_top_p_ref(logits, k, p, mask_value))


def _cpu(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> Tensor:
    _check(logits, k, p)
    return top_k_top_p_ref(logits, k, p, mask_value)


# 6 fake


def _fake_(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> None:
    _check_in_place(logits, k, p)


def _fake(
    logits: Tensor, k: Tensor | None, p: Tensor | None, mask_value: float
) -> Tensor:
    _check(logits, k, p)
    return logits.new_empty(logits.shape)


_ARGS = "Tensor? k, Tensor? p, float mask_value"
register(
    f"top_k_top_p_(Tensor(a!) logits, {_ARGS}) -> ()",
    cpu=_cpu_,
    cuda=_top_k_top_p_launch_,
    fake=_fake_,
)
# What a pass writes where the unfused masking returned a new tensor: the row is not copied first.
register(
    f"top_k_top_p(Tensor logits, {_ARGS}) -> Tensor",
    cpu=_cpu,
    cuda=_top_k_top_p_launch,
    fake=_fake,
)


# 7 samples


def sample_inputs(
    device: torch.device | str,
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(op name, arguments, keywords): both ops; k, p, both, neither; strided; B = 0; odd V."""
    generator = torch.Generator(device).manual_seed(5)
    samples: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def add(
        num_rows: int, vocab: int, k: Any, p: Any, pad: int = 0, mask_value: float = -torch.inf
    ) -> None:
        for name in ("top_k_top_p_", "top_k_top_p"):
            rows = torch.randn(num_rows, vocab + pad, device=device, generator=generator) * 3
            ks = None if k is None else torch.tensor(k, device=device, dtype=torch.int32)
            ps = None if p is None else torch.tensor(p, device=device, dtype=torch.float32)
            samples.append((name, (rows[:, pad:], ks, ps, mask_value), {}))

    add(3, 1500, [5, 0, 2000], None)
    add(3, 1025, None, [0.9, 1.0, 0.0], pad=3)
    add(4, 1024, [50, 3, -1, 1], [0.5, 1.5, 1e-9, 0.9], mask_value=-1e4)
    add(2, 1, [1, 0], [0.5, 0.5])
    add(2, 7, None, None)
    add(0, 1024, [], [])
    return samples
