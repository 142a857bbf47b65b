"""Spellings of the biased logits and of the choice of the token."""

import torch
import torch.nn.functional as F

from .inputs import Inputs
from .step import block_op, block_op_uncached, choose, fused, sample

# The token


@fused()
def view(x):
    return sample(x.base[:, 0] + x.bias, x)


@fused()
def reshape(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).reshape(-1)


@fused()
def flatten(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).flatten()


@fused()
def squeeze(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).squeeze(-1)


@fused()
def first_column(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True))[:, 0]


@fused()
def no_view(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True))


@fused()
def token_in_two_shapes(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    column = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True))
    return column, column.view(-1) + 1, column.squeeze(-1) * 2


@fused()
def indices_of_max(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.max(-1, keepdim=True).indices).view(-1)


@fused()
def indices_of_max_without_keepdim(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.max(-1)[1].unsqueeze(-1)).view(-1)


@fused()
def take_along_dim(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return torch.take_along_dim(block_argmax, block_max.argmax(-1, keepdim=True), -1).view(-1)


@fused()
def argmax_without_keepdim(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(-1, block_max.argmax(-1).unsqueeze(-1)).squeeze(-1)


@fused()
def argmax_indexed_by_none(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return block_argmax.gather(1, block_max.argmax(1)[:, None])[:, 0]


@fused()
def dim_1(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    return torch.gather(block_argmax, 1, torch.argmax(block_max, dim=1, keepdim=True)).view(-1)


# The biased logits


@fused()
def bias_first(x):
    return sample(x.bias + x.base[:, 0], x)


@fused()
def bias_row(x):  # [1, V]
    return sample(x.base[:, 0] + x.bias[:1], x)


@fused()
def bias_vector(x):  # [V]
    return sample(x.base[:, 0] + x.bias[0], x)


@fused()
def bias_vector_first(x):
    return sample(x.bias[0] + x.base[:, 0], x)


@fused()
def base_contiguous(x):
    return sample(x.base[:, 1].contiguous() + x.bias, x, 1)


@fused()
def sum_contiguous(x):
    return sample((x.base[:, 1] + x.bias).contiguous(), x, 1)


@fused()
def base_by_unbind(x):
    return sample(x.base.unbind(1)[1] + x.bias, x, 1)


@fused()
def base_by_split(x):
    return sample(x.base.split(1, 1)[1].squeeze(1) + x.bias, x, 1)


@fused()
def base_by_chunk(x):
    return sample(x.base.flatten(1).chunk(3, -1)[1] + x.bias, x, 1)


@fused()
def base_computed(x):
    return sample(x.other.abs() + x.bias, x)


@fused()
def added_in_place_to_a_fresh_tensor(x):
    logits = x.base[:, 0].clone()
    logits += x.bias
    return sample(logits, x)


@fused()
def added_in_place_to_a_computed_tensor(x):
    logits = x.base[:, 0] * 2
    logits.add_(x.bias)
    return sample(logits, x)


@fused()
def add_function(x):
    return sample(torch.add(x.base[:, 0], x.bias, alpha=1), x)


@fused()
def three_addends(x):  # the last add is the one that is fused
    return sample(x.base[:, 0] + x.other + x.bias, x)


@fused()
def float_without_cache(x):
    logits = (x.base[:, 0] + x.bias).float()
    return choose(*block_op_uncached(logits, x))


@fused()
def to_float32_without_cache(x):
    logits = (x.base[:, 0] + x.bias).to(torch.float32)
    return choose(*block_op_uncached(logits, x, is_drafting=True))


@fused()
def without_cache(x):
    return choose(*block_op_uncached(x.base[:, 0] + x.bias, x))


# Where the bias comes from


class Head(torch.nn.Module):
    """A bias from parameters that require grad."""

    def __init__(self, x: Inputs) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(x.w1.clone())
        self.w2 = torch.nn.Parameter(x.w2.clone())
        self.bias = torch.nn.Parameter(x.bias[0].clone())


@fused()
def bias_from_linear(x):
    bias = F.linear(F.embedding(x.prev, x.w1), x.w2)
    return sample(x.base[:, 0] + bias, x), bias


@fused()
def bias_from_mm(x):
    bias = x.w1[x.prev] @ x.w2.t()
    return sample(x.base[:, 0] + bias, x), bias


@fused()
def bias_from_embedding(x):
    table = x.other.new_ones(3, x.other.shape[1]) * x.other[:3]
    return sample(x.base[:, 0] + F.embedding(x.prev % 3, table), x)
