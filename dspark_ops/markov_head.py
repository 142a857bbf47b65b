"""The Markov head: the bias that follows the previous token, and logits on the target's ids.

    e     = W1[prev]                                   # zeros where prev is outside [0, Vt)
    x     = e                                          # vanilla: no gate
          = sigmoid(Linear[hidden; e]) * e             # gated: gate, no state
          = tanh(o), state' = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c)
            where g, c, o = Linear[state; e; hidden]   # rnn: gate and state
    bias  = round(x @ W2^T)                            # fp32 accumulation
          = round((x @ W2^T) * w2_scale)               # W2 in fp8 or int8: scaled in fp32, after it

Rounding. Every operation of a gated or rnn head rounds to the head dtype, that of W1, as the
module's does; the bias rounds to it once. W2's codes are taken as they are, so a row's scale is one
fp32 product before that rounding. ``scaled_ref`` rounds once, to the dtype of what it is given.
The bits of a bias are those of the device's GEMM, which may depend on the batch size.

Source: the heads of DSpark drafts (vanilla, gated, rnn).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ops import _checks
from dspark_ops._vector_checks import check_vector

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)
CHUNK_V = 16384  # rows of a quantised W2 that are held in fp32 at a time


# 1 reference


def embedding_ref(prev: Tensor, w1: Tensor) -> Tensor:
    """[B, R]. A token is a value on the device, so one outside [0, Vt) can't raise: zeros."""
    inside = (prev >= 0) & (prev < w1.shape[0])
    return w1[torch.where(inside, prev, 0)].where(inside[:, None], 0)


def markov_bias_ref(
    prev: Tensor,
    w1: Tensor,
    w2: Tensor,
    w2_scale: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    hidden: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """Bias [B, V] of the head dtype; ``state`` is written."""
    x = embedding_ref(prev, w1)
    if gate_weight is not None and hidden is not None:
        if state is None:
            x = F.linear(torch.cat((hidden, x), -1), gate_weight, gate_bias).sigmoid() * x
        else:
            joint = F.linear(torch.cat((state, x, hidden), -1), gate_weight, gate_bias)
            gate, candidate, output = joint.chunk(3, -1)
            gate = gate.sigmoid()
            state.copy_(gate * state + (1 - gate) * candidate.tanh())
            x = output.tanh()
    if w2_scale is None:
        return F.linear(x, w2)
    chunks = [F.linear(x.float(), rows.float()) for rows in w2.split(CHUNK_V)]
    return (torch.cat(chunks, -1) * w2_scale).to(x.dtype)


def scaled_ref(x: Tensor, scale: float, softcap: float | None) -> Tensor:
    """round(softcap * tanh(x * scale / softcap)), in fp32 until then; x itself if both are off."""
    if scale == 1.0 and softcap is None:
        return x
    y = x.float() * scale
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    return y.to(x.dtype)


def on_target_ids_ref(logits: Tensor, d2t: Tensor, num_targets: int) -> Tensor:
    """[B, Vt]: draft token v at ``v + d2t[v]``, -inf where no draft token is.

    A draft token whose target id is outside [0, Vt) is dropped; of several with one target id the
    highest counts, so that the row is the same in every run.
    """
    draft_ids = torch.arange(logits.shape[1], device=logits.device)
    ids = draft_ids + d2t
    ids = torch.where((ids >= 0) & (ids < num_targets), ids, num_targets)
    proposed = draft_ids.new_full((num_targets + 1,), -1)
    proposed = proposed.scatter_reduce(0, ids, draft_ids, "amax")[:num_targets]
    return logits[:, proposed.clamp(min=0)].where(proposed >= 0, -torch.inf)


# 2 checks


def check_head(
    w1: Tensor,
    w2: Tensor,
    w2_scale: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    hidden: Tensor | None,
    state: Tensor | None,
    rows: tuple[Any, ...],
    letters: str,
    vocab: Any,
    device: torch.device,
) -> None:
    """``rows`` is [B] or [B, N], whose ``letters`` a message says; ``hidden`` has a last H."""
    _checks.check_dtype("w1", w1, _checks.LOGITS_DTYPES)
    head = w1.dtype
    if w1.dim() != 2 or w1.shape[1] < 1 or w1.shape[0] < vocab:
        raise ValueError(
            f"w1 must have shape [Vt, R], a row for each of at least V = {vocab} target ids, "
            f"R >= 1; got {tuple(w1.shape)}"
        )
    rank = w1.shape[1]
    _check_like_base("w1", w1, device)
    _checks.check_dtype("w2", w2, (head, *QUANTIZED_DTYPES))
    _check_shape("w2", w2, "[V, R]", (vocab, rank))
    _check_like_base("w2", w2, device)
    if w2.dtype in QUANTIZED_DTYPES:
        if w2_scale is None:
            raise ValueError(f"w2_scale must be given with w2 of {w2.dtype}: f32 [V]; got None")
        check_vector("w2_scale", w2_scale, (torch.float32,), "[V]", vocab, "base", device)
    elif w2_scale is not None:
        raise ValueError(
            f"w2_scale must be given only with w2 of float8_e4m3fn or int8, w2 is {w2.dtype}; "
            "pass None"
        )
    if gate_weight is None:
        for name, x in (("hidden", hidden), ("state", state), ("gate bias", gate_bias)):
            if x is not None:
                raise ValueError(
                    f"{name} must be given only with gate, the weights of a gated or rnn head; "
                    "got gate=None"
                )
        return
    if hidden is None:
        raise ValueError(f"hidden must be given with gate: [{letters}, H]; got None")
    _checks.check_dtype("hidden", hidden, (head,))
    if hidden.dim() != len(rows) + 1 or tuple(hidden.shape[:-1]) != rows:
        raise ValueError(
            f"hidden must have shape [{letters}, H] = [{', '.join(map(str, rows))}, H]; "
            f"got {tuple(hidden.shape)}"
        )
    _check_like_base("hidden", hidden, device)
    width = hidden.shape[-1]
    _checks.check_dtype("gate", gate_weight, (head,))
    outputs, inputs, wanted = rank, width + rank, "[R, H + R]"
    if state is not None:
        outputs, inputs, wanted = 3 * rank, width + 2 * rank, "[3 R, 2 R + H]"
    _check_shape("gate", gate_weight, wanted, (outputs, inputs))
    _check_like_base("gate", gate_weight, device)
    if gate_bias is not None:
        name = "[R]" if state is None else "[3 R]"
        check_vector("gate bias", gate_bias, (head,), name, outputs, "base", device)
    if state is not None:
        _checks.check_dtype("state", state, (head,))
        _check_shape("state", state, "[B, R]", (rows[0], rank))
        _check_like_base("state", state, device)
        if rows[0] > 1 and state.stride(0) < rank:
            raise ValueError(
                "state is written in place and must have an address for each entry; got strides "
                f"{tuple(state.stride())} for shape {tuple(state.shape)}; pass .contiguous()"
            )


def _check_shape(name: str, x: Tensor, letters: str, shape: tuple[Any, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{name} must have shape {letters} = [{', '.join(map(str, shape))}]; "
            f"got {tuple(x.shape)}"
        )


def _check_like_base(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where base is; got {x.device}")
    _checks.check_last_stride(name, x)


def gate_arguments(gate: Any) -> tuple[Tensor | None, Tensor | None]:
    """(weight, bias) of ``gate``: None, a weight, or a pair."""
    if gate is None or isinstance(gate, Tensor):
        return gate, None
    if not isinstance(gate, tuple | list) or len(gate) != 2:
        raise TypeError(
            "gate must be the weight of a Linear or (weight, bias or None), "
            f"got {type(gate).__name__}: {gate!r}"
        )
    weight, bias = gate
    _checks.check_is_tensor("gate weight", weight)
    if bias is not None:
        _checks.check_is_tensor("gate bias", bias)
    return weight, bias


def check_scales(**scales: Any) -> None:
    """Each a finite number; a ``*_softcap`` above 0, or None."""
    for name, value in scales.items():
        is_cap = name.endswith("_softcap")
        if is_cap and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, float | int):
            raise TypeError(f"{name} must be a float, got {type(value).__name__}: {value!r}")
        if not math.isfinite(value) or (is_cap and value <= 0):
            wanted = "finite and above 0; pass None for no cap" if is_cap else "finite"
            raise ValueError(f"{name} must be {wanted}; got {value!r}")
