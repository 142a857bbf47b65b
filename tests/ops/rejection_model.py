"""Verification in numpy, written from the text of the issue and not from dspark_ops.

``read`` takes a call apart into rows with f64 probabilities; ``assert_verified`` says whether what
an op returned is what these rows have to give. Two implementations may part only where a decision
hangs on less than their rounding, so each quantity is an interval: ``p / (1 + e) .. p (1 + e)``,
``e = PROBABILITY * max(1, largest logit involved)``. An accepted length is right if no step of it
is surely refused and the one after it not surely accepted, a token if its highest score reaches the
highest of the lowest scores.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from .model import acceptance, first_argmax, gumbel, values_of
from .tolerances import id_tolerance, noise_tolerance

# Division within 2 ulp, subtraction of the maximum, logarithm of the sum and the exponential: each
# is off by about 1.2e-7 of the largest term.
PROBABILITY = 1e-6


def log_softmax(x: np.ndarray) -> np.ndarray:
    """f64, NaN somewhere if it is no distribution."""
    with np.errstate(invalid="ignore", over="ignore"):
        below = x.astype(np.float64) - x.max()
        return below - np.log(np.exp(below).sum())


def bar_of(prefix: float, rest: float) -> float:
    """h_i of P_i and R_i, 0/0 = 1."""
    return rest / (rest + 1 - prefix) if rest + 1 - prefix > 0 else 1.0


def next_prefix(log_prefix: float, log_ratio: float) -> float:
    """log P_i of log P_{i-1}; 0 stays 0, whatever the ratio."""
    return -np.inf if log_prefix == -np.inf else min(log_prefix + log_ratio, 0.0)


def residual_law(prefix: float, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """``max(P p - q, 0)`` normalised, p where it is zero."""
    residual = np.maximum(prefix * p - q, 0)
    return residual / residual.sum() if residual.any() else p


def acceptance_law(
    ps: list[np.ndarray], qs: list[np.ndarray], xs: list[int], method: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(probability of each accepted length 0..g, law of the token after it) of draft ``xs``.

    ``ps`` has g + 1 rows, ``qs`` g.
    """
    g = len(xs)
    prefixes = [1.0]
    if method == "standard":
        passes = [min(ps[i][x] / qs[i][x], 1.0) for i, x in enumerate(xs)]
        lengths = [np.prod(passes[:i]) * (1 - passes[i]) for i in range(g)] + [np.prod(passes)]
        prefixes *= g + 1
    else:
        for i, x in enumerate(xs):
            prefixes.append(min(prefixes[i] * ps[i][x] / qs[i][x], 1.0))
        rests = [np.maximum(prefixes[i] * ps[i] - qs[i], 0).sum() for i in range(g)]
        bars = [1.0] + [bar_of(prefixes[i], rests[i]) for i in range(1, g)] + [prefixes[g]]
        if g == 0:
            bars = [1.0]
        lengths = [bars[i] * np.prod([1 - h for h in bars[i + 1 :]]) for i in range(g + 1)]
    after = [residual_law(prefixes[i], ps[i], qs[i]) for i in range(g)] + [ps[g]]
    return np.array(lengths), after


@dataclass
class Step:
    """A draft step of a row: what is known of draft token i + 1."""

    x: int
    u: float
    log_p: np.ndarray  # [V] f64
    log_q: np.ndarray
    error: np.ndarray  # [V] relative, of p and of q

    def log_ratio(self, sign: int) -> float:
        """Of p(x) / q(x), at its lower (-1) or upper (1) end; p = q = 0 counts as p = 0."""
        if not 0 <= self.x < self.log_p.size or self.log_p[self.x] == -np.inf:
            return -np.inf
        exact = self.log_p[self.x] - self.log_q[self.x]
        return float(exact + 2 * sign * np.log1p(self.error[self.x]))


@dataclass
class Row:
    start: int
    num_drafts: int
    sampled: bool
    steps: list[Step]  # those before the draft ends


@dataclass
class Call:
    """Arguments on the CPU, and its rows; None where nothing is sampled."""

    target: np.ndarray
    pos: list[int]
    seed: list[int]
    rows: list[Row | None]
    num_steps: int
    method: str
    use_fp64: bool


def _error(t: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Relative error of p and q: grows with the logits involved."""
    terms = [np.ones_like(t)]
    for x in (t, d):
        magnitude = np.where(np.isfinite(x), np.abs(x), 0.0)
        terms += [magnitude, np.full_like(t, np.abs(x.max()) if np.isfinite(x.max()) else 0.0)]
    return PROBABILITY * np.maximum.reduce(terms)


def read(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    *,
    num_steps: int,
    method: str = "standard",
    use_fp64: bool = False,
) -> Call:
    target = values_of(target_logits)
    num_logits, vocab = target.shape
    cu, ids, positions = cu_num_logits.tolist(), draft_token_ids.tolist(), pos.tolist()
    slots, temperatures = idx_mapping.tolist(), temperature.tolist()
    call = Call(target, positions, [], [], num_steps, method, use_fp64)
    for b, slot in enumerate(slots):
        start = min(max(cu[b], 0), num_logits)
        num_drafts = min(min(cu[b + 1], num_logits) - start, num_steps + 1) - 1
        live = 0 <= slot < len(temperatures) and num_drafts >= 0
        seed = int(seeds[slot]) if live else 0
        call.seed.append(seed)
        if not live:
            call.rows.append(None)
            continue
        t = np.float32(temperatures[slot])
        sampled = bool(np.float32(1e-5) <= t < np.inf)
        row = Row(start, num_drafts, sampled, [])
        for i in range(num_drafts):
            x, logits = ids[start + i + 1], target[start + i]
            if x < 0:
                break
            log_p, log_q = log_softmax(logits), np.where(np.arange(vocab) == x, 0.0, -np.inf)
            scaled = np.zeros(vocab, np.float32)
            if draft_logits is not None and sampled:
                with np.errstate(over="ignore"):
                    scaled = values_of(draft_logits[slot, i, :vocab]) / t
                log_q = log_softmax(scaled)
            if sampled and np.isnan(log_p + np.where(log_q == -np.inf, 0.0, log_q)).any():
                break
            u = float(acceptance(seed, positions[start + i], i)[0])
            row.steps.append(Step(x, u, log_p, log_q, _error(logits, scaled)))
        call.rows.append(row)
    return call


def _standard(steps: list[Step]) -> tuple[list[bool], list[bool]]:
    """Of each step: may be accepted, may be rejected."""
    may = [np.log(s.u) < s.log_ratio(1) for s in steps]
    may_not = [not np.log(s.u) < s.log_ratio(-1) for s in steps]
    return may, may_not


def _prefixes(steps: list[Step], sign: int) -> list[float]:
    """P_0, P_1, ...; at their lower (-1) or upper (1) ends."""
    logs = [0.0]
    for s in steps:
        logs.append(next_prefix(logs[-1], s.log_ratio(sign)))
    return np.exp(logs).tolist()


def _scaled_residual(prefix: float, s: Step, sign: int) -> np.ndarray:
    p, q = np.exp(s.log_p), np.exp(s.log_q)
    return np.maximum(prefix * p * (1 + s.error) ** sign - q * (1 + s.error) ** -sign, 0)


def _block(steps: list[Step]) -> tuple[list[bool], list[bool]]:
    ends = []
    for sign in (-1, 1):
        prefixes = _prefixes(steps, sign)
        bars = []
        for i in range(1, len(steps) + 1):
            rest = prefixes[i]
            if i < len(steps):
                rest = float(_scaled_residual(prefixes[i], steps[i], sign).sum())
            bars.append(bar_of(prefixes[i], rest) * (1 + PROBABILITY) ** sign)
        ends.append(bars)
    may = [s.u <= h for s, h in zip(steps, ends[1], strict=True)]
    may_not = [s.u > h for s, h in zip(steps, ends[0], strict=True)]
    return may, may_not


def lengths(row: Row, target: np.ndarray, method: str) -> set[int]:
    """The accepted lengths that rounding leaves open; mostly one."""
    g = len(row.steps)
    if not row.sampled:
        hits = [s.x == first_argmax(target[row.start + i]) for i, s in enumerate(row.steps)]
        return {hits.index(False) if False in hits else g}
    may, may_not = (_standard if method == "standard" else _block)(row.steps)
    if method == "standard":
        return {a for a in range(g + 1) if all(may[:a]) and (a == g or may_not[a])}
    return {a for a in range(g + 1) if (a == 0 or may[a - 1]) and all(may_not[a:])}


def _reaches(lowest: np.ndarray, highest: np.ndarray) -> set[int]:
    """Ids that may have the best score; of equal ones the lowest where nothing is open."""
    best = lowest.max()
    return {first_argmax(lowest)} | set(np.flatnonzero((highest >= best) & (highest > lowest)))


def tokens_after(call: Call, b: int, accepted: int) -> set[int]:
    """Ids that may follow ``accepted`` draft tokens of row b; mostly one."""
    row = call.rows[b]
    assert row is not None
    logits = call.target[row.start + accepted]
    if not row.sampled:
        return {first_argmax(logits)}
    pos, ids = call.pos[row.start + accepted], np.arange(logits.size)
    noise = gumbel(call.seed[b], pos, ids, call.use_fp64).astype(np.float64)
    limit = id_tolerance(call.use_fp64)

    def scored(low: np.ndarray, high: np.ndarray) -> set[int]:
        term = np.where(np.isfinite(high), np.abs(high), 0.0)
        slack = limit * np.maximum(1.0, np.maximum(np.abs(noise), term))
        slack += noise_tolerance(call.use_fp64)
        return _reaches(low + noise - slack, high + noise + slack)

    from_target = scored(logits.astype(np.float64), logits.astype(np.float64))
    if not np.isfinite(logits.max()):
        from_target = {first_argmax(logits)}
    if accepted == len(row.steps):
        return from_target
    step = row.steps[accepted]
    scales = (1.0, 1.0)
    if call.method == "block":
        scales = tuple(_prefixes(row.steps[:accepted], sign)[-1] for sign in (-1, 1))
    low, high = (
        _scaled_residual(scale, step, sign) for scale, sign in zip(scales, (-1, 1), strict=True)
    )
    with np.errstate(divide="ignore"):
        drawn = scored(np.log(low), np.log(high)) if high.any() else set()
    return drawn if low.any() else drawn | from_target


def assert_verified(outputs: tuple[Tensor, ...], call: Call) -> int:
    """Raise where an output cannot be; return how many rows rounding leaves open."""
    tokens, num_sampled, num_rejected = (x.cpu().numpy() for x in outputs)
    num_rows = len(call.rows)
    assert tokens.dtype == np.int64
    assert num_sampled.dtype == num_rejected.dtype == np.int32
    assert tokens.shape == (num_rows, call.num_steps + 1)
    assert num_sampled.shape == num_rejected.shape == (num_rows,)
    num_open = 0
    for b, row in enumerate(call.rows):
        got = f"row {b}: {tokens[b].tolist()}, {num_sampled[b]} sampled, {num_rejected[b]} rejected"
        if row is None:
            assert (tokens[b] == -1).all(), got
            assert num_sampled[b] == num_rejected[b] == 0, got
            continue
        accepted = int(num_sampled[b]) - 1
        may_be = lengths(row, call.target, call.method)
        assert accepted in may_be, f"{got}; accepted may be {may_be}"
        assert num_rejected[b] == row.num_drafts - accepted, got
        assert tokens[b, :accepted].tolist() == [s.x for s in row.steps[:accepted]], got
        after = tokens_after(call, b, accepted)
        assert tokens[b, accepted] in after, f"{got}; after {accepted} may come {after}"
        assert (tokens[b, accepted + 1 :] == -1).all(), got
        num_open += len(may_be) > 1 or len(after) > 1
    return num_open


def assert_call(
    ops: Any, args: tuple[Any, ...], has_ties: bool = False, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Call the op and compare; rounding leaves few rows open unless the case is made of ties."""
    outputs = ops.rejection_sample(*args, **kwargs)
    call = read(*args, **kwargs)
    num_open = assert_verified(outputs, call)
    assert has_ties or num_open <= 1 + len(call.rows) // 10, f"{num_open} rows are open"
    return outputs
