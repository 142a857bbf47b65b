"""Ways to mask logits by top-k and top-p, in the shapes that people give them; all are fused.

``FUSED`` has, by name, the function of `Rows`, the k and the p that it masks by, in that order, and
the number of its sites. A k or p that is True is the one of each row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .masking_inputs import INF, K, P, Rows


@dataclass(frozen=True)
class Spelling:
    function: Callable[[Rows], Tensor]
    k: int | bool | None
    p: float | bool | None
    sites: int


FUSED: dict[str, Spelling] = {}


def fused(k: int | bool | None = None, p: float | bool | None = None, sites: int = 1) -> Any:
    def add(function: Callable[[Rows], Tensor]) -> Callable[[Rows], Tensor]:
        FUSED[function.__name__] = Spelling(function, k, p, sites)
        return function

    return add


# Top-p, ascending: what is removed is the tail whose mass is at most 1 - p


def warp_top_p(scores: Tensor, p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """The way of Hugging Face's warper."""
    ascending, order = torch.sort(scores, descending=False)
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    remove = mass <= (1 - p)
    remove[..., -min_tokens_to_keep:] = 0
    remove = remove.scatter(1, order, remove)
    return scores.masked_fill(remove, -INF)


@fused(p=P)
def warper(x):
    return warp_top_p(x.logits, P)


@fused(p=P)
def warper_after_temperature(x):
    return warp_top_p(x.logits * 2 / 2, P)


@fused(p=1.0)
def warper_switched_off(x):
    return warp_top_p(x.logits, 1.0)


def sorted_values_put_back(logits: Tensor, p: Tensor) -> Tensor:
    """The way of vLLM without its kernels."""
    values, order = logits.sort(dim=-1, descending=False)
    probs = values.softmax(dim=-1)
    mass = torch.cumsum(probs, dim=-1, out=probs)
    remove = mass <= 1 - p
    remove[:, -1] = False
    values.masked_fill_(remove, -INF)
    return values.scatter(dim=-1, index=order, src=values)


@fused(p=True)
def values_put_back(x):
    return sorted_values_put_back(x.logits, x.p.unsqueeze(1))


@fused(p=True)
def values_put_back_p_of_two_dims(x):
    return sorted_values_put_back(x.logits, x.p[:, None].clone())


@fused(p=True)
def values_put_back_complement_first(x):
    return sorted_values_put_back(x.logits, (1 - (1 - x.p)).unsqueeze(-1))


@fused(p=True)
def values_put_back_p_in_f64(x):
    return sorted_values_put_back(x.logits, x.p.double().unsqueeze(1))


@fused(p=True)
def values_put_back_threshold_in_a_variable(x):
    tail = x.other[:, 0] * 0 + (1 - x.p)
    values, order = x.logits.sort(dim=-1)
    remove = values.softmax(dim=-1).cumsum(-1) <= tail[:, None]
    remove[:, -1] = False
    return torch.empty_like(values).scatter_(1, order, values.masked_fill(remove, -INF))


@fused(p=P)
def values_put_back_one_p(x):
    return sorted_values_put_back(x.logits, torch.full((1,), P, device=x.logits.device))


@fused(p=P)
def values_put_back_by_index(x):
    values, order = x.logits.sort(dim=-1, stable=True)
    remove = values.softmax(-1).cumsum(-1) < 1 - P
    remove[:, -1:].fill_(False)
    values[remove] = -INF
    return values.gather(-1, order.argsort(-1))


@fused(p=P)
def unguarded_number(x):
    """The largest token stays by itself where p is a number above 0."""
    values, order = x.logits.sort(dim=-1)
    remove = values.softmax(-1).cumsum(-1) <= 1 - P
    return x.logits.masked_fill(torch.zeros_like(remove).scatter_(1, order, remove), -INF)


@fused(p=P)
def kept_ascending(x):
    values, order = x.logits.sort(dim=-1)
    keep = 1 - P < values.softmax(-1).cumsum(-1)
    keep[:, -1] = True
    return torch.where(keep.scatter(1, order, keep), x.logits, -INF)


# Top-p, descending: what is removed is all after the token that reaches p


def shifted_mask(logits: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(logits, descending=True)
    mass = torch.cumsum(F.softmax(values, dim=-1), dim=-1)
    remove = mass > p
    remove[..., 1:] = remove[..., :-1].clone()
    remove[..., 0] = 0
    return remove, order


@fused(p=P)
def shifted(x):
    remove, order = shifted_mask(x.logits, P)
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@fused(p=True)
def shifted_p_of_each_row(x):
    remove, order = shifted_mask(x.logits, x.p.unsqueeze(-1))
    return x.logits.masked_fill(remove.scatter(dim=1, index=order, src=remove), -INF)


@fused(p=P)
def shifted_into_the_input(x):
    remove, order = shifted_mask(x.logits, P)
    mask = torch.zeros_like(x.logits, dtype=torch.bool).scatter_(-1, order, remove)
    x.logits[mask] = -INF
    return x.logits


@fused(p=P)
def masked_fill_into_the_input(x):
    remove, order = shifted_mask(x.logits, P)
    return x.logits.masked_fill_(remove.scatter(1, order, remove), -INF).clone()


@fused(p=P)
def shifted_by_cat(x):
    order = x.logits.argsort(-1, descending=True)
    remove = x.logits.gather(-1, order).softmax(-1).cumsum(-1) > P
    remove = torch.cat([torch.zeros_like(remove[:, :1]), remove[:, :-1]], dim=-1)
    return x.logits.masked_fill(remove.gather(1, order.argsort(-1)), -INF)


@fused(p=True)
def shifted_by_pad(x):
    values, order = x.logits.sort(-1, descending=True)
    remove = values.softmax(-1).cumsum(-1) >= x.p[:, None]
    remove = F.pad(remove[:, :-1], (1, 0), value=False)
    return torch.where(remove.scatter(1, order, remove), torch.full_like(x.logits, -INF), x.logits)


@fused(p=P)
def mass_shifted_by_pad(x):
    values, order = x.logits.sort(-1, descending=True)
    before = F.pad(values.softmax(-1).cumsum(-1)[:, :-1], (1, 0))
    keep = (before < P).scatter(1, order, before < P)
    return x.logits.masked_fill(keep.logical_not(), -INF)


@fused(p=True)
def mass_before(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    values = values.masked_fill(probs.cumsum(-1) - probs > x.p[:, None], -INF)
    return torch.zeros_like(values).scatter_(-1, order, values)


@fused(p=P)
def mass_before_is_less(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    values = torch.where(probs.cumsum(-1) - probs < P, values, -INF)
    ranks = torch.empty_like(order).scatter_(
        1, order, torch.arange(values.shape[1], device=order.device).expand_as(order)
    )
    return values.gather(1, ranks)


@fused(p=True)
def probabilities_sorted(x):
    probs, order = x.logits.softmax(-1).sort(dim=-1, descending=True)
    remove = probs.cumsum(-1) - probs > x.p.unsqueeze(-1)
    return x.logits.masked_fill(remove.scatter(-1, order, remove), -INF)


@fused(p=P)
def probabilities_read_elsewhere(x):
    """Of the logits, not of the sorted ones: nobody needs the sort for them."""
    probs = x.logits.softmax(-1)
    sorted_probs, order = probs.sort(dim=-1, descending=True)
    remove = sorted_probs.cumsum(-1) - sorted_probs > P
    masked = x.logits.masked_fill(remove.scatter(-1, order, remove), -INF)
    return torch.where(probs > 2, probs, masked)


@fused(p=P)
def copy_of_the_logits(x):
    logits = x.logits.clone()
    remove, order = shifted_mask(logits, P)
    logits[remove.scatter(1, order, remove)] = -INF
    return logits


# Top-k that keeps exactly k


@fused(k=K)
def largest_put_into_minus_inf(x):
    values, ids = x.logits.topk(K)
    return torch.full_like(x.logits, -INF).scatter_(-1, ids, values)


@fused(k=K)
def largest_of_the_logits_by_ids(x):
    ids = torch.topk(x.logits, K, dim=1, sorted=False).indices
    return torch.full_like(x.logits, -INF).scatter(1, ids, x.logits.gather(1, ids))


@fused(k=K)
def mask_without_the_largest(x):
    mask = torch.ones_like(x.logits, dtype=torch.bool)
    mask.scatter_(1, x.logits.topk(K).indices, False)
    return x.logits.masked_fill(mask, -INF)


@fused(k=K)
def mask_of_the_largest(x):
    mask = torch.zeros_like(x.logits, dtype=torch.bool)
    return x.logits.masked_fill(~mask.scatter(1, x.logits.topk(K).indices, True), -INF)


@fused(k=K)
def mask_of_numbers(x):
    values, ids = x.logits.topk(K)
    mask = torch.zeros_like(x.logits).scatter_(1, ids, torch.ones_like(values))
    return x.logits.masked_fill(mask == 0, -INF)


@fused(k=K)
def mask_of_numbers_made_bool(x):
    mask = torch.zeros_like(x.logits).scatter_(1, x.logits.topk(K).indices, 1.0)
    return torch.where(mask.bool(), x.logits, -INF)


@fused(k=K)
def likeliest(x):
    mask = torch.zeros_like(x.logits, dtype=torch.bool)
    mask = mask.scatter(1, x.logits.softmax(-1).topk(K).indices, True)
    return torch.where(mask, x.logits, -INF)


@fused(k=K)
def others_overwritten(x):
    order = x.logits.argsort(-1, descending=True)
    return x.logits.scatter(1, order[:, K:], -INF)


@fused(k=K)
def others_overwritten_ascending(x):
    order = x.logits.argsort(-1)
    return x.logits.scatter(1, order[:, :-K], -INF)


@fused(k=K)
def mask_of_the_others(x):
    order = x.logits.argsort(-1, descending=True)
    mask = torch.zeros_like(x.logits, dtype=torch.bool).scatter_(1, order[:, K:], True)
    return x.logits.masked_fill(mask, -INF)


@fused(k=K)
def by_place(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place >= K, -INF)
    return values.scatter(1, order, values)


@fused(k=K)
def by_place_inverted(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill((place < K).logical_not(), -INF)
    return values.scatter(1, order, values)


@fused(k=True)
def by_place_k_of_each_row(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device).unsqueeze(0)
    keep = place < x.k.clamp(min=1).unsqueeze(1)
    return torch.where(keep, values, -INF).gather(1, order.argsort(-1))


@fused(k=True)
def by_rank(x):
    ranks = x.logits.argsort(-1, descending=True).argsort(-1)
    return torch.where(ranks < x.k.int().clamp(1, 10**6)[:, None], x.logits, -INF)


# Both


@fused(k=K, p=P, sites=2)
def one_after_the_other(x):
    values, ids = x.logits.topk(K)
    return warp_top_p(torch.full_like(x.logits, -INF).scatter_(-1, ids, values), P)


@fused(k=K, p=True)
def in_one_order(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place >= K, -INF)
    probs = values.softmax(-1)
    values = values.masked_fill(probs.cumsum(-1) - probs > x.p[:, None], -INF)
    return torch.empty_like(values).scatter_(1, order, values)
