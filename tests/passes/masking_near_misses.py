"""Code that masks logits by a sort and must be left as it is: the op would keep other tokens.

``LEFT_ALONE`` has, by name, the function of `Rows` and a phrase of the reason of each of its sites.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .masking_inputs import INF, K, P, Rows
from .masking_spellings import shifted_mask, warp_top_p


@dataclass(frozen=True)
class NearMiss:
    function: Callable[[Rows], Any]
    reasons: tuple[str, ...]


LEFT_ALONE: dict[str, NearMiss] = {}


def left_alone(*reasons: str) -> Any:
    def add(function: Callable[[Rows], Any]) -> Callable[[Rows], Any]:
        LEFT_ALONE[function.__name__] = NearMiss(function, reasons)
        return function

    return add


TIES = "all that tie with it stay, where dspark::top_k_top_p keeps exactly k"


# A compare with a value keeps all that tie with it


@left_alone(TIES)
def warper_top_k(x):
    """The way of Hugging Face's warper."""
    remove = x.logits < torch.topk(x.logits, K)[0][..., -1, None]
    return x.logits.masked_fill(remove, -INF)


@left_alone(TIES)
def pivot(x):
    """The way of gpt-fast."""
    values, _ = torch.topk(x.logits, min(K, x.logits.size(-1)))
    smallest = values.select(-1, -1).unsqueeze(-1)
    return torch.where(x.logits < smallest, -INF, x.logits)


@left_alone(TIES)
def pivot_sliced(x):
    values = x.logits.topk(K).values
    return torch.where(x.logits >= values[:, -1:], x.logits, -INF)


@left_alone(TIES)
def pivot_by_min(x):
    smallest = x.logits.topk(K).values.min(-1, keepdim=True).values
    return x.logits.masked_fill(smallest > x.logits, -INF)


@left_alone(TIES)
def pivot_by_amin(x):
    return x.logits.masked_fill(x.logits < x.logits.topk(K).values.amin(-1, True), -INF)


def smallest_kept(values: Tensor, k: Tensor) -> Tensor:
    """Of ascending values, the k-th largest of each row."""
    place = (values.size(1) - k.to(torch.long)).clamp(min=0)
    return values.gather(1, place.unsqueeze(dim=1))


@left_alone(TIES)
def top_k_and_top_p_in_one_order(x):
    """The way of vLLM without its kernels: k keeps ties, p does not."""
    values, order = x.logits.sort(dim=-1, descending=False)
    values.masked_fill_(values < smallest_kept(values, x.k), -INF)
    probs = values.softmax(dim=-1)
    remove = torch.cumsum(probs, dim=-1, out=probs) <= 1 - x.p.unsqueeze(dim=1)
    remove[:, -1] = False
    values.masked_fill_(remove, -INF)
    return torch.empty_like(x.logits).scatter_(dim=-1, index=order, src=values)


@left_alone(TIES)
def top_k_in_one_order(x):
    values, order = x.logits.sort(dim=-1, descending=False)
    values.masked_fill_(values < smallest_kept(values, x.k), -INF)
    return values.scatter(dim=-1, index=order, src=values)


@left_alone(TIES)
def top_k_of_each_row(x):
    """The way of vLLM for k alone."""
    is_off = x.k >= x.logits.shape[1]
    place = x.k.masked_fill(is_off, 1).sub(1).unsqueeze(1)
    smallest = x.logits.topk(x.logits.shape[1], dim=1).values.gather(1, place)
    smallest.masked_fill_(is_off.unsqueeze(1), -INF)
    return x.logits.masked_fill(x.logits < smallest, -INF)


@left_alone(TIES)
def cutoff_of_the_nucleus(x):
    values, _ = x.logits.sort(-1, descending=True)
    count = (values.softmax(-1).cumsum(-1) < P).long().sum(-1, keepdim=True)
    cutoff = values.gather(-1, count.clamp(max=values.shape[1] - 1))
    return x.logits.masked_fill(x.logits < cutoff, -INF)


@left_alone(TIES, "numerics='bitwise'")
def warpers_in_a_row(x):
    return warp_top_p(warper_top_k(x), P)


# Another set of tokens


@left_alone("keeps at least 2 tokens")
def two_tokens_at_least(x):
    return warp_top_p(x.logits, P, min_tokens_to_keep=2)


@left_alone("keeps at least 3 tokens")
def three_tokens_at_least_descending(x):
    remove, order = shifted_mask(x.logits, P)
    remove[:, :3] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("the token that reaches the mass p is removed")
def not_shifted(x):
    values, order = x.logits.sort(-1, descending=True)
    remove = values.softmax(-1).cumsum(-1) > P
    remove[:, 0] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("its first entry is not set to keep")
def shifted_and_the_first_left(x):
    values, order = x.logits.sort(-1, descending=True)
    remove = values.softmax(-1).cumsum(-1) > P
    remove[:, 1:] = remove[:, :-1].clone()
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("does not count the token itself")
def shifted_twice(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs > P
    remove[:, 1:] = remove[:, :-1].clone()
    remove[:, 0] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("slice_scatter")
def shifted_by_two(x):
    values, order = x.logits.sort(-1, descending=True)
    remove = values.softmax(-1).cumsum(-1) > P
    remove[:, 2:] = remove[:, :-2].clone()
    remove[:, :2] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("slice_scatter")
def shifted_nowhere(x):
    values, order = x.logits.sort(-1, descending=True)
    remove = values.softmax(-1).cumsum(-1) > P
    remove[:, :-1] = remove[:, :-1].clone()
    remove[:, 0] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("the mass must count the token itself")
def ascending_and_shifted(x):
    values, order = x.logits.sort(-1)
    remove = values.softmax(-1).cumsum(-1) <= 1 - P
    remove[:, 1:] = remove[:, :-1].clone()
    remove[:, -1] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("the mass must count the token itself")
def ascending_mass_before(x):
    values, order = x.logits.sort(-1)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs <= 1 - P
    remove[:, -1] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("select_scatter")
def wrong_end_kept(x):
    values, order = x.logits.sort(-1)
    remove = values.softmax(-1).cumsum(-1) <= 1 - P
    remove[:, 0] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("select_scatter")
def largest_removed(x):
    values, order = x.logits.sort(-1)
    remove = values.softmax(-1).cumsum(-1) <= 1 - P
    remove[:, -1] = True
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("a row whose p is 0 would lose all its tokens")
def unguarded_p_of_each_row(x):
    values, order = x.logits.sort(-1)
    p = P + 0 * x.p[:, None]  # where it is 0 it depends on rounding what this removes
    remove = values.softmax(-1).cumsum(-1) <= 1 - p
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("a row whose p is 0 would lose all its tokens")
def unguarded_reached(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs >= x.p[:, None]
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("p = 0.0 removes all tokens")
def unguarded_zero(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs >= 0.0
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("p = -0.5 removes all tokens")
def unguarded_negative(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs > -0.5
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("a row whose k is 0 would lose all its tokens")
def unguarded_k_of_each_row(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place >= (x.k - 1)[:, None], -INF)
    return values.scatter(1, order, values)


@left_alone("which reads the sorted logits, is no step")
def one_more_than_k(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place > K, -INF)
    return values.scatter(1, order, values)


@left_alone("masks the tokens that the test keeps")
def all_but_k_kept(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(~(place >= K), -INF)
    return values.scatter(1, order, values)


@left_alone("which reads the sorted logits, is no step")
def place_from_the_end(x):
    values, order = x.logits.sort(-1)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place >= K, -INF)
    return values.scatter(1, order, values)


@left_alone("which reads the sorted logits, is no step")
def place_from_one(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(1, values.shape[-1] + 1, device=values.device)
    values = values.masked_fill(place >= K, -INF)
    return values.scatter(1, order, values)


@left_alone("which reads the sorted logits, is no step")
def every_other_place(x):
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(0, 2 * values.shape[-1], 2, device=values.device)
    values = values.masked_fill(place >= K, -INF)
    return values.scatter(1, order, values)


@left_alone("a row whose k is 0 would lose all its tokens")
def clamp_that_wraps(x):
    k = (x.k + (1 << 32) - 1).clamp(min=1).int()  # 0 in a row
    values, order = x.logits.sort(-1, descending=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place >= k[:, None], -INF)
    return values.scatter(1, order, values)


@left_alone("k = 0 is not known to be 1 at least")
def no_token(x):
    values, ids = x.logits.topk(0)
    return torch.full_like(x.logits, -INF).scatter(1, ids, values)


@left_alone("takes the smallest")
def smallest_kept_alone(x):
    values, ids = x.logits.topk(K, largest=False)
    return torch.full_like(x.logits, -INF).scatter(1, ids, values)


@left_alone("masks the largest logits, not the others")
def largest_overwritten(x):
    return x.logits.scatter(1, x.logits.topk(K).indices, -INF)


@left_alone("masks the tokens that the test keeps")
def nucleus_removed(x):
    remove, order = shifted_mask(x.logits, P)
    return torch.where(remove.scatter(1, order, remove), x.logits, -INF)


@left_alone("masks the tokens that the test keeps")
def polarity_lost(x):
    mask = torch.zeros_like(x.logits, dtype=torch.bool)
    mask = mask.scatter(1, x.logits.topk(K).indices, True)
    return x.logits.masked_fill(mask, -INF)


@left_alone("by a mask in the other order")
def mask_not_put_back(x):
    remove, _ = shifted_mask(x.logits, P)
    return x.logits.masked_fill(remove, -INF)


@left_alone("by a mask in the other order")
def mask_put_back_values_not(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs > P
    values = values.masked_fill(remove.scatter(1, order, remove), -INF)
    return values.scatter(1, order, values)


@left_alone("scatter")
def put_back_twice(x):
    remove, order = shifted_mask(x.logits, P)
    remove = remove.scatter(1, order, remove)
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("gather")
def put_back_by_the_order(x):
    remove, order = shifted_mask(x.logits, P)
    return x.logits.masked_fill(remove.gather(1, order), -INF)


@left_alone("mass is cumulated")
def mass_of_all_masks_the_largest(x):
    """The nucleus of all tokens, where the op takes that of the k largest."""
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(place >= K, -INF)
    values = values.masked_fill(probs.cumsum(-1) - probs > P, -INF)
    return values.scatter(1, order, values)


@left_alone("bitwise_or")
def masks_united(x):
    remove, order = shifted_mask(x.logits, P)
    place = torch.arange(x.logits.shape[-1], device=order.device)
    remove = remove | (place >= K)
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("ge")
def threshold_of_each_token(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs >= x.other.abs()
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("runs over dim 0")
def over_the_rows(x):
    values, order = x.logits.sort(0, descending=True)
    probs = values.softmax(0)
    remove = probs.cumsum(0) - probs > P
    return x.logits.masked_fill(remove.scatter(0, order, remove), -INF)


@left_alone("cumsum")
def mass_over_the_rows(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(0) - probs > P
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("amax")
def softmax_over_the_rows(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(0)
    remove = probs.cumsum(-1) - probs > P
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("mul")
def temperature_after_the_sort(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = (values * 0.5).softmax(-1)
    remove = probs.cumsum(-1) - probs > P
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("amax")
def exponentials_not_normalised(x):
    values, order = x.logits.sort(-1, descending=True)
    weights = (values - values.amax(-1, keepdim=True)).exp()
    remove = weights.cumsum(-1) - weights > P
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("sub")
def another_mass_taken_off(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = torch.sub(probs.cumsum(-1), probs, alpha=2) > P
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("gather")
def probabilities_below_a_share(x):
    """min-p, in the order of a sort."""
    order = x.logits.argsort(-1, descending=True)
    probs = x.logits.softmax(-1)
    remove = (probs < 0.1 * probs.amax(-1, keepdim=True)).gather(1, order)
    remove[:, :1] = False
    values = x.logits.gather(1, order).masked_fill(remove, -INF)
    return values.scatter(1, order, values)


# Another tensor, another value


@left_alone("which is not the tensor that was sorted")
def another_tensor_masked(x):
    remove, order = shifted_mask(x.logits * 0.5, P)
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("writes -10000.0 where a token is removed")
def finite_value(x):
    remove, order = shifted_mask(x.logits, P)
    return x.logits.masked_fill(remove.scatter(1, order, remove), -1e4)


@left_alone("where a token is removed")
def smallest_float(x):
    remove, order = shifted_mask(x.logits, P)
    value = torch.finfo(x.logits.dtype).min
    return x.logits.masked_fill(remove.scatter(1, order, remove), value)


@left_alone("is not a constant")
def value_of_each_row(x):
    remove, order = shifted_mask(x.logits, P)
    remove = remove.scatter(1, order, remove)
    return torch.where(remove, x.other[:, :1] - INF, x.logits)


@left_alone("writes 0 where a token is removed")
def zeros_below_the_largest(x):
    values, ids = x.logits.topk(K)
    return torch.zeros_like(x.logits).scatter(1, ids, values)


@left_alone("is not a constant")
def largest_put_into_something(x):
    values, ids = x.logits.topk(K)
    return x.other.scatter(1, ids, values)


@left_alone("are torch.bfloat16, not torch.float32")
def bf16(x):
    return warp_top_p(x.logits.bfloat16(), P)


@left_alone("are torch.float64, not torch.float32")
def f64(x):
    return warp_top_p(x.logits.double(), P)


@left_alone("which is not the tensor that was sorted")
def bf16_masked_by_its_float(x):
    logits = x.logits.bfloat16()
    remove, order = shifted_mask(logits.float(), P)
    return logits.masked_fill(remove.scatter(1, order, remove), -INF)


@left_alone("makes torch.float64 of the logits")
def promoted(x):
    remove, order = shifted_mask(x.logits, P)
    value = torch.full_like(x.logits, -INF, dtype=torch.float64)
    return torch.where(remove.scatter(1, order, remove), value, x.logits)


@left_alone("have 3 dimensions, not 2")
def three_dimensions(x):
    logits = x.logits[None]
    values, order = logits.sort(-1)
    remove = values.softmax(-1).cumsum(-1) <= 1 - P
    remove[..., -1] = False
    return logits.masked_fill(remove.scatter(-1, order, remove), -INF)


@left_alone("have 1 dimensions, not 2")
def one_row_alone(x):
    values, ids = x.logits[0].topk(K)
    return torch.full_like(x.logits[0], -INF).scatter(0, ids, values)


@left_alone("not contiguous in the vocabulary")
def transposed(x):
    return warp_top_p(x.logits.t().contiguous().t(), P)


@left_alone("masks probabilities, not logits")
def probabilities_masked_and_normalised(x):
    """The way of a reference sampler: it stays in the order of the sort."""
    probs, order = x.logits.softmax(-1).sort(dim=-1, descending=True)
    mass = probs.cumsum(-1)
    probs[mass - probs > P] = 0.0
    probs.div_(probs.sum(dim=-1, keepdim=True))
    return torch.gather(order, dim=-1, index=probs.argmax(-1, keepdim=True))


@left_alone("is no step of a masking")
def masked_logits_stay_sorted(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    values = values.masked_fill(probs.cumsum(-1) - probs > P, -INF)
    return order.gather(1, (values + x.other).argmax(-1, keepdim=True))


# Other readers of what the op would not compute


@left_alone("the output of the graph reads the sorted ids")
def order_returned(x):
    remove, order = shifted_mask(x.logits, P)
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF), order


@left_alone("the output of the graph reads the mask")
def mask_returned(x):
    remove, order = shifted_mask(x.logits, P)
    remove = remove.scatter(1, order, remove)
    return x.logits.masked_fill(remove, -INF), remove


@left_alone("reads the cumulated mass")
def mass_returned(x):
    values, order = x.logits.sort(-1)
    mass = values.softmax(-1).cumsum(-1)
    remove = mass <= 1 - P
    remove[:, -1] = False
    return x.logits.masked_fill(remove.scatter(1, order, remove), -INF), mass.argmax(-1)


@left_alone("reads the mask")
def kept_tokens_counted(x):
    remove, order = shifted_mask(x.logits, P)
    masked = x.logits.masked_fill(remove.scatter(1, order, remove), -INF)
    return masked, remove.logical_not().sum(-1)


@left_alone("reads the sorted logits")
def margin_returned(x):
    values, order = x.logits.sort(-1, descending=True)
    probs = values.softmax(-1)
    remove = probs.cumsum(-1) - probs > P
    masked = x.logits.masked_fill(remove.scatter(1, order, remove), -INF)
    return masked, values[:, :2].diff(dim=-1)


@left_alone("several masked logits come from one sort")
def two_maskings_of_one_sort(x):
    remove, order = shifted_mask(x.logits, P)
    remove = remove.scatter(1, order, remove)
    return x.logits.masked_fill(remove, -INF), torch.where(~remove, x.logits, -INF) * 2


# Sorts that mask nothing: no candidates


@left_alone()
def sorted_alone(x):
    values, order = x.logits.sort(-1)
    return values.cummax(-1), order


@left_alone()
def experts_chosen(x):
    """Routing: the weights of the chosen few, put back among zeros."""
    weights, ids = x.logits.topk(4)
    weights = weights.nan_to_num(0.0, 0.0, 0.0) * 0.5
    return torch.zeros_like(x.logits).scatter(1, ids, weights)


@left_alone()
def groups_chosen(x):
    """Routing: experts of the groups that were not chosen are masked."""
    scores = x.logits.reshape(-1, 30, 5)
    chosen = scores.amax(-1).topk(4).indices
    mask = torch.zeros_like(scores[..., 0]).scatter_(1, chosen, 1).bool()
    return scores.masked_fill(~mask[..., None], -INF)


@left_alone()
def beams(x):
    values, ids = (x.logits + x.other).topk(8)
    return values, ids // 10, ids % 10


@left_alone()
def median(x):
    return x.logits.nan_to_num(0.0, 0.0, 0.0).median(-1)
