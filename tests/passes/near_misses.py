"""Code that looks like the sampler's and must be left as it is.

``LEFT_ALONE`` has, by name, the function, the reason that `sampler_fusion` must give at each of its
sites, and how many argmax + gather pairs `combine_fusion` may still take.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dspark_ops import gumbel_block_argmax

from .inputs import Inputs
from .spellings import block_op, block_op_uncached, choose, sample


@dataclass(frozen=True)
class NearMiss:
    function: Callable[[Inputs], Any]
    reasons: tuple[str, ...]  # a phrase of each
    combined: int


LEFT_ALONE: dict[str, NearMiss] = {}


def left_alone(*reasons: str, combined: int = 1) -> Callable[..., Any]:
    def add(function: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
        LEFT_ALONE[function.__name__] = NearMiss(function, reasons, combined)
        return function

    return add


# Readers of the biased logits


@left_alone("are also read by the output of the graph")
def biased_logits_returned(x):
    logits = x.base[:, 0] + x.bias
    return sample(logits, x), logits


@left_alone("are also read by sin")
def biased_logits_read_before(x):
    logits = x.base[:, 0] + x.bias
    before = logits.sin()
    return sample(logits, x), before


@left_alone("are also read by exp")
def biased_logits_read_after(x):
    logits = x.base[:, 0] + x.bias
    token = sample(logits, x)
    return token, logits.exp()


@left_alone("are also read by")
def cache_written_by_hand(x):
    logits = x.base[:, 0] + x.bias
    token = choose(*block_op_uncached(logits, x))
    x.logits_cache[torch.arange(logits.shape[0], device=logits.device), 0] = logits
    return token


@left_alone("are also read by sort")
def watermarker(x):
    """Adds to the logits of a green list, after looking at how sure the model is."""
    logits = x.base[:, 0] + x.bias
    margin = logits.sort(-1).values[:, -2:].diff(dim=-1)
    return sample(logits, x), margin


@left_alone("stands between the add", combined=1)
def watermark_added_where_unsure(x):
    logits = x.base[:, 0] + x.bias
    sure = logits.amax(-1, keepdim=True) > 3
    green = torch.arange(logits.shape[-1], device=logits.device) % 2 == 0
    return sample(torch.where(green & ~sure, logits + 1, logits), x)


@left_alone("are also read by")
def acceptance_estimator(x):
    logits = x.base[:, 0] + x.bias
    token = sample(logits, x)
    return token, logits.gather(-1, token[:, None]) - logits.amax(-1, keepdim=True)


@left_alone("stands between the add")
def output_logit_transform(x):
    logits = x.base[:, 0] + x.bias
    return sample(logits * 0.25 - 1.0, x)


@left_alone("are also read by", "are also read by", combined=2)
def two_block_ops_on_one_sum(x):
    logits = x.base[:, 0] + x.bias
    return sample(logits, x, 0), sample(logits, x, 1)


@left_alone("are also read by")
def position_computed_from_the_sum(x):
    logits = x.base[:, 0] + x.bias
    pos = logits.nan_to_num(0.0, 0.0, 0.0).argmax(-1)
    return choose(*gumbel_block_argmax(logits, x.idx_mapping[:, 0], x.temperature, x.seeds, pos))


# The add


@left_alone("alpha=2")
def alpha(x):
    return sample(torch.add(x.base[:, 0], x.bias, alpha=2), x)


@left_alone("alpha=-1")
def alpha_negative(x):
    return sample(torch.add(x.base[:, 0], x.bias, alpha=-1), x)


@left_alone("the logits come from sub")
def subtraction(x):
    return sample(x.base[:, 0] - x.bias, x)


@left_alone("the scalar 1.5")
def scalar_bias(x):
    return sample(x.base[:, 0] + 1.5, x)


@left_alone("the scalar 1.5")
def scalar_after_the_bias(x):
    return sample(x.base[:, 0] + x.bias + 1.5, x)


@left_alone("bias")
def zero_dim_bias(x):
    return sample(x.base[:, 0] + x.bias[0, 0], x)


@left_alone("not [B, V], [1, V] or [V]")
def bias_of_one_column(x):  # [B, 1]
    return sample(x.base[:, 0] + x.bias[:, :1], x)


@left_alone("no operand of")
def outer_sum(x):  # [B, 1] + [1, V]
    return sample(x.base[:, 0, :1] + x.bias[:1], x)


@left_alone("not a float of 16 or 32 bit")
def integer_bias(x):
    return sample(x.base[:, 0] + x.d2t, x)


@left_alone("not a float of 16 or 32 bit")
def boolean_bias(x):
    return sample(x.base[:, 0] + (x.d2t > 1), x)


@left_alone("not contiguous in the vocabulary")
def bias_transposed(x):
    storage = x.bias.t().contiguous()
    return sample(x.base[:, 0] + storage.t(), x)


@left_alone("the logits come from mul")
def multiply(x):
    return sample(x.base[:, 0] * x.bias, x)


@left_alone("there is no add in front of the sampler")
def no_bias(x):
    return sample(x.base[:, 0], x)


# Between add and sampler


@left_alone("tanh")
def soft_cap_by_tanh(x):
    logits = x.base[:, 0] + x.bias
    return sample(torch.tanh(logits), x)


@left_alone("stands between the add")
def soft_cap(x):
    logits = x.base[:, 0] + x.bias
    return sample(30.0 * torch.tanh(logits / 30.0), x)


@left_alone("mul")
def scale(x):
    return sample((x.base[:, 0] + x.bias) * 0.5, x)


@left_alone("div")
def temperature_by_hand(x):
    return sample((x.base[:, 0] + x.bias) / 0.7, x)


@left_alone("stands between the add")
def token_masked(x):
    logits = x.base[:, 0] + x.bias
    logits[:, 3] = -torch.inf
    return sample(logits, x)


@left_alone("stands between the add")
def masked_fill_in_place(x):
    logits = x.base[:, 0] + x.bias
    logits.masked_fill_(x.other > 0, -torch.inf)
    return sample(logits, x)


@left_alone("converted to torch.float32")
def float_before_the_cache(x):
    cache = x.logits_cache.float()
    token = sample((x.base[:, 0] + x.bias).float(), x, logits_cache=cache)
    return token, cache


@left_alone("converted to torch.float16")
def half_before_the_cache(x):
    cache = x.logits_cache.half()
    token = sample((x.base[:, 0] + x.bias).half(), x, logits_cache=cache)
    return token, cache


@left_alone("to torch.float16")
def half_without_cache(x):
    return choose(*block_op_uncached((x.base[:, 0] + x.bias).half(), x))


@left_alone("stands between the add")
def d2t_scatter(x):
    """Reduced vocabulary: draft logits are scattered to target ids before the sampler."""
    logits = x.base[:, 0] + x.bias
    num_ids = logits.shape[1]
    full = torch.full_like(x.other, -torch.inf)
    ids = torch.arange(num_ids // 2, device=logits.device) * 2
    full.index_copy_(1, ids, logits[:, : num_ids // 2])
    return sample(full, x)


@left_alone("stands between the add")
def vocabulary_cut_after_the_add(x):
    return sample((x.base[:, 0] + x.bias)[:, :1000], x)


# Memory


@left_alone("they are stored")
def added_in_place_to_an_input(x):
    logits = x.base[:, 0]
    logits += x.bias
    return sample(logits, x)


@left_alone("they are stored")
def added_in_place_by_method(x):
    return sample(x.base[:, 1].add_(x.bias), x)


@left_alone("shares memory with the logits cache")
def base_is_a_view_of_the_cache(x):
    base = x.logits_cache[: x.bias.shape[0], 2]
    return sample(base + x.bias, x, 1)


@left_alone("shares memory with the logits cache")
def bias_is_a_view_of_the_cache(x):
    bias = x.logits_cache[: x.bias.shape[0], 2]
    return sample(x.base[:, 0] + bias, x)


@left_alone("shares memory with the logits cache")
def cache_cloned_as_base(x):
    base = x.logits_cache.clone()[: x.bias.shape[0], 2]
    return sample(base + x.bias, x, 2)


# The choice of the block


@left_alone("the block maxima (block_max) are also read by sin")
def block_maxima_read(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return choose(block_max, block_argmax), block_max.sin()


@left_alone("the block maxima (block_max) are also read by the output")
def block_maxima_returned(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return choose(block_max, block_argmax), block_max


@left_alone("block_argmax is also read by", combined=0)
def block_argmax_returned(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return choose(block_max, block_argmax), block_argmax


@left_alone("is also read by", combined=0)
def best_block_returned(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    best = block_max.argmax(-1, keepdim=True)
    return block_argmax.gather(-1, best).view(-1), best


@left_alone("the largest block maximum", combined=0)
def largest_maximum_returned(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    best = block_max.max(-1, keepdim=True)
    return block_argmax.gather(-1, best.indices).view(-1), best.values


@left_alone("block_argmax is not read by a gather", combined=0)
def no_gather(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_max.amax(-1), block_argmax[:, 0]


@left_alone("comes from", combined=0)
def index_from_elsewhere(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, x.prev[:, None] % 2), block_max.sum()


@left_alone("comes from elsewhere", combined=0)
def index_of_another_argmax(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    best = x.other[:, :2].argmax(-1, keepdim=True)
    return block_argmax.gather(-1, best).view(-1), block_max.sum()


@left_alone("comes from", combined=0)
def smallest_maximum(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmin(-1, keepdim=True)).view(-1)


@left_alone("comes from", combined=0)
def neighbour_of_the_best_block(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    best = block_max.argmax(-1, keepdim=True)
    return block_argmax.gather(-1, (best + 1) % 2).view(-1)


@left_alone("comes from", combined=0)
def best_block_of_the_first_row(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    best = block_max.argmax(-1, keepdim=True)[:1].expand(block_max.shape[0], 1)
    return block_argmax.gather(-1, best).view(-1)


@left_alone("not block_max", combined=0)
def maxima_changed_before_argmax(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return choose(block_max * -1, block_argmax)


@left_alone("not block_max", combined=0)
def maxima_cut_before_argmax(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return choose(block_max[:, :1], block_argmax)


@left_alone("reads add", combined=0)
def ids_changed_before_gather(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return choose(block_max, block_argmax + 1)


@left_alone("two block ops share", "block_max is never read", combined=0)
def two_block_ops_share_one_gather(x):
    one = block_op(x.base[:, 0] + x.bias, x, 0)
    two = block_op(x.base[:, 1] + x.bias, x, 1)
    return choose(one[0], two[1])


@left_alone("two block ops share", "there is no add", combined=0)
def maxima_of_another_block_op(x):
    """The other op's maxima choose for both; its own choice is complete."""
    one = block_op(x.base[:, 0] + x.bias, x, 0)
    two = block_op_uncached(x.other, x)
    return one[1].gather(-1, two[0].argmax(-1, keepdim=True)), one[0].sum()


# Square shapes, where a wrong dim has the shape of the right one: B = K = 2


@left_alone("dim 0", combined=0)
def argmax_over_rows(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(0).unsqueeze(-1)).view(-1)


@left_alone("dim 0", combined=0)
def gather_over_rows(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(0, block_max.argmax(-1, keepdim=True)).view(-1)


@left_alone("not over the blocks of a row", combined=0)
def argmax_of_everything(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    best = (block_max.argmax() % 2).expand(block_max.shape[0], 1)
    return block_argmax.gather(-1, best).view(-1)


@left_alone("does not take one block a row", combined=0)
def every_block_gathered(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    order = block_max.argsort(-1)
    return block_argmax.gather(-1, order)


SQUARE = ("argmax_over_rows", "gather_over_rows", "argmax_of_everything")


@left_alone("are also read by")
def logits_copied_out(x):
    logits = x.base[:, 0] + x.bias
    x.other.copy_(logits)
    return sample(logits, x)
