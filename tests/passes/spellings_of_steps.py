"""Spellings of calls, loops, what follows a token, and memory that could go wrong."""

import torch
import torch.nn.functional as F

from dspark_ops import gumbel_block_argmax

from .step import at_position, block_op, choose, fused, sample

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
def shifts_that_leave_64_bits(x):
    first = at_position(x, x.pos[:, 0] - 1, pos_offset=-(2**63))
    return first, at_position(x, x.pos[:, 0] + 2**62 + 2**62 + 2**62, cache_col=1)


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
