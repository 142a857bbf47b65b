"""Spellings of what a step reads and writes: draft tokens, positions, the cache."""

import torch

from .step import at_position, block_op, fused, sample

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
