"""Spellings of a draft step that are one thing to a user, and must be fused.

Each is a function of `Inputs`. ``FUSED`` has them by name, with the number of their sites.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_ops import gumbel_block_argmax

from .inputs import Inputs


@dataclass(frozen=True)
class Spelling:
    function: Callable[[Inputs], Any]
    sites: int


FUSED: dict[str, Spelling] = {}


def fused(sites: int = 1) -> Callable[..., Any]:
    def add(function: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
        FUSED[function.__name__] = Spelling(function, sites)
        return function

    return add


def block_op(logits: Tensor, x: Inputs, i: int = 0, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Block maxima of ``logits``, which are cached in column i."""
    options = {"logits_cache": x.logits_cache, "cache_col": i, "is_drafting": True, **kwargs}
    return gumbel_block_argmax(
        logits, x.idx_mapping[:, i], x.temperature, x.seeds, x.pos[:, i] - 1, **options
    )


def block_op_uncached(logits: Tensor, x: Inputs, i: int = 0, **kwargs: Any):
    return gumbel_block_argmax(
        logits, x.idx_mapping[:, i], x.temperature, x.seeds, x.pos[:, i] - 1, **kwargs
    )


def choose(block_max: Tensor, block_argmax: Tensor) -> Tensor:
    """The token of each row."""
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)


def sample(logits: Tensor, x: Inputs, i: int = 0, **kwargs: Any) -> Tensor:
    return choose(*block_op(logits, x, i, **kwargs))


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


# Draft tokens


@fused()
def column_write(x):
    x.draft_tokens[:, 1] = sample(x.base[:, 1] + x.bias, x, 1)


@fused()
def column_write_and_return(x):
    token = sample(x.base[:, 1] + x.bias, x, 1)
    x.draft_tokens[:, 1] = token
    return token, x.draft_tokens


@fused()
def column_write_by_copy(x):
    x.draft_tokens[:, 2].copy_(sample(x.base[:, 1] + x.bias, x, 1))


@fused()
def column_write_of_the_first_rows(x):
    n = x.base.shape[0]
    x.draft_tokens[:n, 1] = sample(x.base[:, 1] + x.bias, x, 1)


@fused()
def column_write_with_gather_shape(x):
    block_max, block_argmax = block_op(x.base[:, 1] + x.bias, x, 1)
    token = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True))
    x.draft_tokens[:, 1:2] = token


@fused()
def column_write_int32(x):
    tokens = torch.full_like(x.draft_tokens, -1, dtype=torch.int32)
    tokens[:, 1] = sample(x.base[:, 1] + x.bias, x, 1)
    return tokens


@fused()
def column_write_into_a_new_buffer(x):
    tokens = torch.empty_like(x.draft_tokens).fill_(-3)
    tokens[:, 0] = sample(x.base[:, 0] + x.bias, x)
    return tokens


@fused()
def whole_buffer_written(x):
    x.prev.copy_(sample(x.base[:, 1] + x.bias, x, 1))


@fused()
def column_read_before_and_after(x):
    before = x.draft_tokens[:, 1] * 2
    x.draft_tokens[:, 1] = sample(x.base[:, 1] + x.bias, x, 1)
    return before, x.draft_tokens[:, 1] * 3


@fused()
def old_column_read_later(x):
    old = x.draft_tokens[:, 1].clone()
    x.draft_tokens[:, 1] = sample(x.base[:, 1] + x.bias, x, 1)
    return old + 1


@fused(sites=2)
def same_column_written_twice(x):
    x.draft_tokens[:, 1] = sample(x.base[:, 0] + x.bias, x, 0)
    x.draft_tokens[:, 1] = sample(x.base[:, 1] + x.bias, x, 1)


@fused(sites=2)
def steps_stacked(x):
    return torch.stack([sample(x.base[:, i] + x.bias, x, i) for i in range(2)], dim=1)


# Positions


def at_position(x, pos, **kwargs):
    options = {"logits_cache": x.logits_cache, "cache_col": 0, "is_drafting": True, **kwargs}
    return choose(
        *gumbel_block_argmax(
            x.base[:, 0] + x.bias, x.idx_mapping[:, 0], x.temperature, x.seeds, pos, **options
        )
    )


@fused()
def position_as_it_is(x):
    return at_position(x, x.pos[:, 0])


@fused()
def position_plus(x):
    return at_position(x, x.pos[:, 0] + 5, pos_offset=2)


@fused()
def position_minus_twice(x):
    return at_position(x, x.pos[:, 0] - 1 - 2)


@fused()
def position_int32(x):
    return at_position(x, x.pos[:, 0].int() - 1)


@fused()
def position_int32_column(x):
    return at_position(x, x.pos.int()[:, 0] - 1)


@fused()
def position_subtracted_first(x):  # 9 - pos is no shift
    return at_position(x, 9 - x.pos[:, 0])


@fused()
def position_plus_tensor(x):
    return at_position(x, x.pos[:, 0] + x.pos[:, 1])


@fused()
def position_twice(x):
    return at_position(x, torch.add(x.pos[:, 0], 3, alpha=2))


@fused()
def shifted_position_returned(x):
    pos = x.pos[:, 0] - 1
    return at_position(x, pos), pos


@fused(sites=2)
def position_shifted_before_the_loop(x):
    pos = x.pos - 1
    return at_position(x, pos[:, 0]), at_position(x, pos[:, 0], cache_col=1)


# The cache


@fused()
def cache_layer_of_a_larger_buffer(x):
    larger = torch.full((2, *x.logits_cache.shape), 7.0, dtype=x.logits_cache.dtype)
    larger = larger.to(x.base.device)
    token = sample(x.base[:, 0] + x.bias, x, logits_cache=larger[1])
    return token, larger


@fused()
def cache_first_columns(x):
    return sample(x.base[:, 0] + x.bias, x, 1, logits_cache=x.logits_cache[:, :2])


@fused()
def cache_last_columns(x):
    return sample(x.base[:, 0] + x.bias, x, 1, logits_cache=x.logits_cache[:, 1:])


@fused()
def cache_wider_than_the_vocabulary(x):
    n = 1000
    return sample(x.base[:, 0, :n] + x.bias[:, :n], x)


@fused()
def cache_offset_in_the_vocabulary(x):
    n = 1000
    return sample(
        x.base[:, 0, :n] + x.bias[:, :n], x, logits_cache=x.logits_cache[..., 200 : n + 250]
    )


@fused()
def cache_read_afterwards(x):
    token = sample(x.base[:, 0] + x.bias, x)
    return token, x.logits_cache[:, 0] == 7


@fused()
def cache_read_before(x):
    before = x.logits_cache[:, 0] == 7
    return sample(x.base[:, 0] + x.bias, x), before


@fused()
def cache_cleared_before(x):
    x.logits_cache.zero_()
    return sample(x.base[:, 0] + x.bias, x)


@fused()
def cache_col_tensor(x):
    return sample(x.base[:, 0] + x.bias, x, cache_col=x.prev[0] % 3)


@fused()
def cache_col_for_each_row(x):
    return sample(x.base[:, 0] + x.bias, x, cache_col=x.prev % 4)  # column 3 does not exist


@fused()
def cache_col_int32(x):
    return sample(x.base[:, 0] + x.bias, x, cache_col=(x.prev % 3).int())


# Calls


@fused()
def by_keywords(x):
    block_max, block_argmax = gumbel_block_argmax(
        logits=x.base[:, 0] + x.bias,
        pos=x.pos[:, 0] - 1,
        seeds=x.seeds,
        temperature=x.temperature,
        idx_mapping=x.idx_mapping[:, 0],
        cache_col=0,
        logits_cache=x.logits_cache,
    )
    return choose(block_max, block_argmax)


@fused()
def registered_op_by_keywords(x):
    block_max, block_argmax = torch.ops.dspark.gumbel_block_argmax(
        pos=x.pos[:, 0],
        logits=x.base[:, 0] + x.bias,
        idx_mapping=x.idx_mapping[:, 0],
        temperature=x.temperature,
        seeds=x.seeds,
        use_fp64=True,
    )
    return choose(block_max, block_argmax)


@fused()
def every_flag(x):
    return sample(
        x.base[:, 0] + x.bias,
        x,
        is_drafting=False,
        pos_offset=7,
        apply_temperature=False,
        use_fp64=True,
    )


@fused(sites=2)
def two_samplers(x):
    first = sample(x.base[:, 0] + x.bias, x, 0)
    second = sample(x.base[:, 1] + x.other, x, 1)
    return first, second


@fused(sites=2)
def two_samplers_interleaved(x):
    one = block_op(x.base[:, 0] + x.bias, x, 0)
    two = block_op(x.base[:, 1] + x.other, x, 1)
    return choose(*two), choose(*one)


@fused(sites=2)
def bias_chosen_by_the_first_token(x):
    first = sample(x.base[:, 0] + x.bias, x, 0)
    bias = x.base[:, 2] * (first % 3).unsqueeze(-1)
    return sample(x.base[:, 1] + bias, x, 1)


# What follows


@fused()
def argmax_map(x):
    ids = sample(x.base[:, 0] + x.bias, x)
    return ids + x.d2t[ids]


@fused()
def argmax_map_into_column(x):
    ids = sample(x.base[:, 1] + x.bias, x, 1)
    x.draft_tokens[:, 1] = ids + x.d2t[ids]


@fused()
def next_embedding(x):
    token = sample(x.base[:, 0] + x.bias, x)
    return token, F.embedding(token, x.w1)


@fused()
def next_embedding_by_index(x):
    token = sample(x.base[:, 0] + x.bias, x)
    return x.w1[token], token


@fused()
def next_embedding_with_padding_idx(x):
    return F.embedding(sample(x.base[:, 0] + x.bias, x), x.w1, padding_idx=0)


@fused()
def next_embedding_through_a_map(x):
    ids = sample(x.base[:, 0] + x.bias, x)
    table = torch.cat([x.w1, x.w2, x.w1])
    return F.embedding(ids + x.d2t[ids], table)


@fused()
def next_embedding_of_two_tables(x):
    token = sample(x.base[:, 0] + x.bias, x)
    return F.embedding(token, x.w1), F.embedding(token, x.w2)


@fused()
def next_embedding_of_a_small_table(x):  # fewer rows than ids: not the sampler's to read
    token = sample(x.base[:, 0] + x.bias, x)
    return F.embedding(token // 2, x.w1[: x.w1.shape[0] // 2 + 1])


@fused()
def confidence_head_reads_the_embedding(x):
    token = sample(x.base[:, 0] + x.bias, x)
    embedding = F.embedding(token, x.w1)
    return embedding, embedding.float().amax(-1)


@fused()
def table_changed_after(x):
    token = sample(x.base[:, 0] + x.bias, x)
    embedding = F.embedding(token, x.w1)
    x.w1.mul_(2)
    return embedding


@fused()
def table_changed_before_the_lookup(x):
    token = sample(x.base[:, 0] + x.bias, x)
    x.w1.mul_(2)
    return F.embedding(token, x.w1)


@fused()
def base_changed_after(x):
    token = sample(x.base[:, 0] + x.bias, x)
    x.base.zero_()
    return token


@fused()
def seeds_advanced_after(x):
    token = sample(x.base[:, 0] + x.bias, x)
    x.seeds.add_(1)
    x.pos.add_(1)
    return token


@fused()
def temperature_changed_before(x):
    x.temperature.mul_(0.5)
    return sample(x.base[:, 0] + x.bias, x)


# Loops


@fused(sites=3)
def draft_loop(x):
    prev = x.prev
    for i in range(3):
        # Multiplied and summed: a GEMM may round otherwise when it is compiled.
        bias = F.embedding(prev % x.other.shape[0], x.other)
        prev = sample(x.base[:, i] + bias, x, i)
        x.draft_tokens[:, i] = prev
    return x.draft_tokens


@fused(sites=3)
def draft_loop_collected(x):
    prev, tokens = x.prev, []
    for i in range(3):
        bias = F.embedding(prev % x.other.shape[0], x.other)
        prev = sample(x.base[:, i] + bias, x, i)
        tokens.append(prev)
    return torch.stack(tokens, 1)


@fused(sites=3)
def draft_loop_with_reduced_vocabulary(x):
    prev = x.prev
    for i in range(3):
        bias = F.embedding(prev % x.other.shape[0], x.other)
        ids = sample(x.base[:, i] + bias, x, i)
        prev = ids + x.d2t[ids]
        x.draft_tokens[:, i] = prev
    return x.draft_tokens


# Strides, dtypes and memory that a rewrite could get wrong


@fused()
def base_expanded(x):
    return sample(x.base[:1, 0].expand(x.bias.shape) + x.bias, x)


@fused()
def the_same_tensor_twice(x):
    return sample(x.bias + x.bias, x)


@fused()
def column_of_transposed_draft_tokens(x):
    tokens = torch.full_like(x.draft_tokens.t(), -1)
    tokens.t()[:, 1] = sample(x.base[:, 0] + x.bias, x)
    return tokens


@fused()
def row_of_draft_tokens(x):
    tokens = torch.full_like(x.draft_tokens.t(), -1)
    tokens[1] = sample(x.base[:, 0] + x.bias, x)
    return tokens


@fused()
def every_other_row_of_draft_tokens(x):
    tokens = torch.cat([x.draft_tokens, x.draft_tokens])
    tokens[::2, 1] = sample(x.base[:, 0] + x.bias, x)
    return tokens


@fused()
def draft_tokens_by_index_copy(x):
    column = torch.tensor([1], device=x.base.device)
    token = sample(x.base[:, 0] + x.bias, x)
    return x.draft_tokens.index_copy(1, column, token[:, None])


@fused()
def draft_tokens_of_other_dtypes(x):
    token = sample(x.base[:, 0] + x.bias, x)
    columns = [torch.zeros_like(x.prev, dtype=t) for t in (torch.int8, torch.float, torch.bool)]
    return [column.copy_(token) for column in columns]


@fused()
def token_wrapped_to_int8(x):
    x.draft_tokens[:, 1] = sample(x.base[:, 0] + x.bias, x).to(torch.int8)


@fused()
def token_as_int32_kept(x):
    token = sample(x.base[:, 0] + x.bias, x).int()
    tokens = torch.zeros_like(x.draft_tokens, dtype=torch.int32)
    tokens[:, 1] = token
    return tokens, token, token + 1


@fused()
def token_in_three_buffers(x):
    token = sample(x.base[:, 0] + x.bias, x)
    x.prev.copy_(token)
    x.draft_tokens[:, 1] = token
    x.draft_tokens[:, 2] = token
    x.d2t[: token.shape[0]] = token


@fused()
def token_masked_into_column(x):
    token = sample(x.base[:, 0] + x.bias, x)
    x.draft_tokens[:, 0] = torch.where(x.idx_mapping[:, 0] >= 0, token, -1)


@fused()
def old_column_summed(x):
    token = sample(x.base[:, 0] + x.bias, x)
    column = x.draft_tokens[:, 0]
    total = column.sum()
    x.draft_tokens[:, 0] = token
    return total, column + 1


@fused(sites=2)
def positions_that_wrap(x):
    first = at_position(x, x.pos[:, 0].int() + 2147483647)
    return first, at_position(x, x.pos[:, 0] + (1 << 40), cache_col=1)


@fused(sites=2)
def offsets_at_the_limits(x):
    first = at_position(x, x.pos[:, 0] - 1, pos_offset=(1 << 31) - 1)
    return first, at_position(x, x.pos[:, 0] - 1, pos_offset=-(1 << 40), cache_col=1)


@fused(sites=2)
def positions_of_small_dtypes(x):  # wrap at 8 and 16 bit before they key the noise
    first = at_position(x, (x.pos[:, 0] % 250).to(torch.uint8) - 5)
    return first, at_position(x, x.pos[:, 0].to(torch.int16) + 32000, cache_col=1)


@fused()
def position_plus_a_size(x):
    return at_position(x, x.pos[:, 0] + x.pos.shape[0])


@fused(sites=2)
def column_chosen_by_the_token(x):
    token = sample(x.base[:, 0] + x.bias, x)
    return sample(x.base[:, 1] + x.bias, x, cache_col=token % 3)


@fused(sites=2)
def cached_logits_as_the_next_base(x):
    token = sample(x.base[:, 0] + x.bias, x)
    base = x.logits_cache[: x.bias.shape[0], 0]
    other = torch.zeros_like(x.logits_cache)
    return token, sample(base + x.bias, x, 1, logits_cache=other)


@fused()
def cache_transposed(x):
    cache = torch.zeros_like(x.logits_cache.transpose(0, 1).contiguous())
    return sample(x.base[:, 0] + x.bias, x, logits_cache=cache.transpose(0, 1)), cache


@fused()
def table_of_fewer_columns(x):
    return F.embedding(sample(x.base[:, 0] + x.bias, x), x.w1[:, :5])


@fused()
def table_transposed(x):
    table = x.w1.t().contiguous().t()
    return F.embedding(sample(x.base[:, 0] + x.bias, x), table)


@fused()
def table_in_the_cache(x):
    token = sample(x.base[:, 0] + x.bias, x)
    return F.embedding(token % 3, x.logits_cache[:3, 0])


@fused()
def table_is_where_the_token_is_written(x):
    token = sample(x.base[:, 0] + x.bias, x)
    table = torch.arange(x.d2t.shape[0] * 3, device=token.device).view(-1, 3)
    table[: token.shape[0], 1] = token
    return table[token], table


@fused()
def map_read_before_it_is_overwritten(x):
    token = sample(x.base[:, 0] + x.bias, x)
    read = x.d2t[token]
    x.d2t[: token.shape[0]] = token
    return read


@fused()
def next_embedding_of_a_column(x):
    block_max, block_argmax = block_op(x.base[:, 0] + x.bias, x)
    column = block_argmax.gather(-1, block_max.argmax(-1, keepdim=True))
    return F.embedding(column, x.w1)


@fused()
def next_embedding_by_index_select(x):
    return x.w1.index_select(0, sample(x.base[:, 0] + x.bias, x))
