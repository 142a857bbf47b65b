"""top_k_top_p_ in numpy float64, from its contract, and what an implementation must satisfy.

The set is that of exact arithmetic, which the float64 sums here stand for, except where the mass of
a prefix of the order lies within ``bound_of(V)`` of p. Everything else is exact.
"""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor


def bound_of(vocab: int) -> float:
    """How far from p the share of a prefix may be and still be taken to lie on the other side.

    Each token may lose a unit of mass, which doubles with the vocabulary from 2^18 on.
    """
    unit = 2.0 ** (max(0, (vocab - 1).bit_length() - 18) - 44)
    return max(1e-7, vocab * unit)


@dataclass
class Expected:
    """Of each row: the order, and how far down it the exact set reaches."""

    order: np.ndarray  # [B, V] ids, logit descending, then id ascending
    is_on: np.ndarray  # [B] a filter is on
    p: np.ndarray  # [B] 0 for less, 1 where off
    num_kept: np.ndarray  # [B]
    num_left_by_k: np.ndarray  # [B]
    share: np.ndarray  # [B, V + 1] mass of the first n of those that k left; NaN if not finite


def expect(logits: np.ndarray, k: np.ndarray | None, p: np.ndarray | None) -> Expected:
    num_rows, vocab = logits.shape
    k = np.zeros(num_rows, np.int64) if k is None else k.astype(np.int64)
    p = np.ones(num_rows) if p is None else p.astype(np.float64)
    k_on, p_on = (k > 0) & (k < vocab), p < 1
    x = logits.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
    first_nan = np.isnan(x).argmax(1)
    has_nan = np.isnan(x).any(1)
    x[has_nan] = -np.inf
    x[has_nan, first_nan[has_nan]] = 0.0
    order = np.argsort(-x, axis=1, kind="stable")
    x = np.take_along_axis(x, order, 1)
    is_left = (x > -np.inf) & (np.arange(vocab) < np.where(k_on, k, vocab)[:, None])
    with np.errstate(invalid="ignore"):
        mass = np.where(is_left, np.exp(x - x[:, :1]), 0.0)
        total = np.cumsum(mass, 1)
        share = np.pad(total, ((0, 0), (1, 0))) / total[:, -1:]
    p = np.where(p_on, np.maximum(p, 0.0), 1.0)
    num_left = is_left.sum(1)
    reached = np.maximum((is_left & (share[:, :-1] < p[:, None])).sum(1), 1)
    reached[x[:, 0] == np.inf] = 1
    num_kept = np.where(p_on, np.minimum(reached, num_left), num_left)
    return Expected(order, k_on | p_on, p, num_kept, num_left, share)


def assert_kept(
    before: Tensor,
    after: Tensor,
    k: Tensor | None,
    p: Tensor | None,
    mask_value: float = -math.inf,
) -> int:
    """``after`` is ``before`` filtered; the number of rows that the bound let differ from exact.

    No logit above -inf may equal ``mask_value``: it would be neither kept nor masked.
    """
    x, y = before.cpu().numpy(), after.cpu().numpy()
    assert x.shape == y.shape
    e = expect(x, None if k is None else k.cpu().numpy(), None if p is None else p.cpu().numpy())
    is_changed = x.view(np.int32) != y.view(np.int32)
    is_lowest = x == -np.inf
    assert not is_changed[is_lowest].any(), "-inf stays -inf"
    assert not is_changed[~e.is_on].any(), "a row without a filter is bit-unchanged"
    value = np.float32(mask_value)
    is_value = np.isnan if math.isnan(mask_value) else value.__eq__
    assert is_value(y[is_changed]).all(), "what is masked is mask_value"
    assert not is_value(x[~is_lowest]).any(), "the test's mask_value is among its logits"

    rows = e.is_on
    kept = (~is_changed & ~is_lowest)[rows]
    x, order, p_on = x[rows], e.order[rows], e.p[rows] < 1
    num = kept.sum(1)
    num_left = e.num_left_by_k[rows]
    assert (num >= np.minimum(num_left, 1)).all(), "a row lost all its tokens"
    assert (num <= num_left).all(), "more than k"
    in_order = np.take_along_axis(kept, order, 1)
    assert (in_order == (np.arange(x.shape[1]) < num[:, None])).all(), "no prefix of the order"
    is_number = ~np.isnan(x).any(1)
    lowest = np.where(kept, x, np.inf).min(1)
    highest = np.where(is_changed[rows], x, -np.inf).max(1)
    assert (lowest >= highest)[is_number].all()
    assert (num == num_left)[~p_on].all(), "fewer than k, or than there are"
    wanted = e.num_kept[rows]
    share, p_of_row = e.share[rows], e.p[rows]
    reached = np.take_along_axis(share, num[:, None], 1)[:, 0]
    one_fewer = np.take_along_axis(share, np.maximum(num - 1, 0)[:, None], 1)[:, 0]
    bound = bound_of(x.shape[1])
    within = (reached >= p_of_row - bound) & ((one_fewer < p_of_row + bound) | (num == 1))
    differs = num != wanted
    assert within[differs].all(), list(zip(num[differs], wanted[differs], strict=True))
    return int(differs.sum())
