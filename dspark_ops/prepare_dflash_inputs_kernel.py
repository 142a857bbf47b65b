"""The kernel of prepare_dflash_inputs: a flat grid of programs that each write one kind of block.

Every program that meets a live row counts the live rows itself, from one wide load. What it reads
through its rows is bounded by the metadata alone and so does not wait for that count, which only
decides what is stored: the longest chain of loads is start_loc, target position, block table. The
row of a context token is searched between those of its block's first and last token, so that a
block inside one row, however long, searches nothing.
"""

from dspark_ops._triton import tl, triton


@triton.jit
def first_dead_row(idx_mapping_ptr, offs_b, num_rows, num_slots, stride_idx_b):
    """The lowest of ``offs_b`` below ``num_rows`` whose slot is none, else ``num_rows``."""
    mask_b = offs_b < num_rows
    slot = tl.load(idx_mapping_ptr + offs_b.to(tl.int64) * stride_idx_b, mask=mask_b, other=0)
    slot = slot.to(tl.int64)
    is_dead = mask_b & ((slot < 0) | (slot >= num_slots))
    return tl.min(tl.where(is_dead, offs_b, num_rows), axis=0)


@triton.jit
def count_live_rows(idx_mapping_ptr, num_rows, num_slots, stride_idx_b, BLOCK_B: tl.constexpr):
    num_live = num_rows
    for first in range(0, num_rows, BLOCK_B):
        offs_b = first + tl.arange(0, BLOCK_B)
        dead = first_dead_row(idx_mapping_ptr, offs_b, num_rows, num_slots, stride_idx_b)
        num_live = tl.minimum(num_live, dead)
    return num_live


@triton.jit
def last_valid_position(
    rows,
    mask_b,
    target_positions_ptr,
    target_start_ptr,
    num_rejected_ptr,
    num_targets,
    stride_rejected_b,
):
    """Position of each row's last target token that was not rejected; 0 if that is no token."""
    end = tl.load(target_start_ptr + 1 + rows, mask=mask_b, other=0).to(tl.int64)
    rejected_ptrs = num_rejected_ptr + rows.to(tl.int64) * stride_rejected_b
    token = end - tl.load(rejected_ptrs, mask=mask_b, other=0) - 1
    is_token = (token >= 0) & (token < num_targets)
    return tl.load(target_positions_ptr + token, mask=is_token, other=0)


@triton.jit
def slot_of(
    position,
    rows,
    mask_b,
    block_table_ptr,
    num_table_cols,
    stride_table_b,
    stride_table_c,
    max_model_len,
    cp_rank,
    PAGE_SIZE: tl.constexpr,
    CP_SIZE: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
):
    """Slot (int64) of ``position`` in the cache of its row, -1 where this rank has none."""
    is_cached = mask_b & (position >= 0) & (position < max_model_len)
    position = tl.where(is_cached, position, 0).to(tl.int32)
    column = position // (PAGE_SIZE * CP_SIZE)
    is_cached &= column < num_table_cols
    entry = rows.to(tl.int64) * stride_table_b + column.to(tl.int64) * stride_table_c
    block = tl.load(block_table_ptr + entry, mask=is_cached, other=0)
    offset = position % (PAGE_SIZE * CP_SIZE)
    is_here = offset // CP_INTERLEAVE % CP_SIZE == cp_rank
    local = offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
    return tl.where((block > 0) & is_here, block.to(tl.int64) * PAGE_SIZE + local, -1)


@triton.jit(
    do_not_specialize=["num_rows", "num_buffer_rows", "num_slots", "num_targets", "num_tokens"]
    + ["num_context_tokens", "num_table_cols", "num_row_programs", "num_sample_programs"]
    + ["num_query_programs", "mask_token_id", "max_model_len", "cp_rank", "stride_idx_b"]
    + ["stride_sampled_b", "stride_rejected_b", "stride_table_b", "stride_table_c"],
    do_not_specialize_on_alignment=["input_ids_ptr", "positions_ptr", "is_padding_ptr"]
    + ["query_slot_mapping_ptr", "query_start_loc_ptr", "seq_lens_ptr", "context_positions_ptr"]
    + ["context_slot_mapping_ptr", "sample_indices_ptr", "sample_pos_ptr"]
    + ["sample_idx_mapping_ptr", "out_temperature_ptr", "out_seeds_ptr", "idx_mapping_ptr"]
    + ["target_start_ptr", "target_positions_ptr", "num_sampled_ptr", "num_rejected_ptr"]
    + ["last_sampled_ptr", "next_prefill_ptr", "temperature_ptr", "seeds_ptr"]
    + ["block_table_ptr"],
)
def _prepare_dflash_inputs_kernel(
    input_ids_ptr,
    positions_ptr,
    is_padding_ptr,
    query_slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    context_positions_ptr,
    context_slot_mapping_ptr,
    sample_indices_ptr,
    sample_pos_ptr,
    sample_idx_mapping_ptr,
    out_temperature_ptr,
    out_seeds_ptr,
    idx_mapping_ptr,
    target_start_ptr,
    target_positions_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    last_sampled_ptr,
    next_prefill_ptr,
    temperature_ptr,
    seeds_ptr,
    block_table_ptr,
    num_rows,
    num_buffer_rows,
    num_slots,
    num_targets,
    num_tokens,
    num_context_tokens,
    num_table_cols,
    num_row_programs,
    num_sample_programs,
    num_query_programs,
    mask_token_id,
    max_model_len,
    cp_rank,
    stride_idx_b,
    stride_sampled_b,
    stride_rejected_b,
    stride_table_b,
    stride_table_c,
    HAS_PADDING: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    NUM_SAMPLES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CP_SIZE: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    block = tl.program_id(0)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if block < num_row_programs:
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_b = rows < num_rows
        slot_ptrs = idx_mapping_ptr + rows.to(tl.int64) * stride_idx_b
        slot = tl.load(slot_ptrs, mask=mask_b, other=0).to(tl.int64)
        last = last_valid_position(
            rows,
            mask_b,
            target_positions_ptr,
            target_start_ptr,
            num_rejected_ptr,
            num_targets,
            stride_rejected_b,
        )
        has_slot = mask_b & (slot >= 0) & (slot < num_slots)
        temperature = tl.load(temperature_ptr + slot, mask=has_slot, other=0.0)
        seed = tl.load(seeds_ptr + slot, mask=has_slot, other=0)
        num_live = count_live_rows(idx_mapping_ptr, num_rows, num_slots, stride_idx_b, BLOCK_B)
        is_live = rows < num_live
        start = tl.minimum(rows, num_live) * NUM_QUERIES
        tl.store(query_start_loc_ptr + rows, start, mask=rows <= num_buffer_rows)
        seq_len = tl.where(is_live, tl.minimum(last + 1 + NUM_QUERIES, max_model_len), 0)
        tl.store(seq_lens_ptr + rows, seq_len.to(tl.int32), mask=rows < num_buffer_rows)
        tl.store(out_temperature_ptr + slot, temperature, mask=is_live)
        tl.store(out_seeds_ptr + slot, seed, mask=is_live)

    elif block < num_row_programs + num_sample_programs:
        first = (block - num_row_programs) * BLOCK_T
        samples = first + tl.arange(0, BLOCK_T)
        query = tl.zeros((BLOCK_T,), tl.int64)
        sample_pos = query
        sample_slot = query - 1
        if first < num_rows * NUM_SAMPLES:
            rows = samples // NUM_SAMPLES
            step = samples % NUM_SAMPLES
            mask_b = rows < num_rows
            slot_ptrs = idx_mapping_ptr + rows.to(tl.int64) * stride_idx_b
            slot = tl.load(slot_ptrs, mask=mask_b, other=0).to(tl.int64)
            last = last_valid_position(
                rows,
                mask_b,
                target_positions_ptr,
                target_start_ptr,
                num_rejected_ptr,
                num_targets,
                stride_rejected_b,
            )
            num_live = count_live_rows(idx_mapping_ptr, num_rows, num_slots, stride_idx_b, BLOCK_B)
            is_live = rows < num_live
            # Query ``step`` samples the position after its own; where the anchor is skipped query
            # ``step + 1`` samples its own.
            step_query = rows * NUM_QUERIES + step + (NUM_QUERIES - NUM_SAMPLES)
            query = tl.where(is_live, step_query.to(tl.int64), query)
            sample_pos = tl.where(is_live, last + 2 + step, sample_pos)
            sample_slot = tl.where(is_live, slot, sample_slot)
        mask_e = samples < num_buffer_rows * NUM_SAMPLES
        tl.store(sample_indices_ptr + samples, query, mask=mask_e)
        tl.store(sample_pos_ptr + samples, sample_pos, mask=mask_e)
        tl.store(sample_idx_mapping_ptr + samples, sample_slot, mask=mask_e)

    elif block < num_row_programs + num_sample_programs + num_query_programs:
        first = (block - num_row_programs - num_sample_programs) * BLOCK_T
        tokens = first + tl.arange(0, BLOCK_T)
        token_id = tl.zeros((BLOCK_T,), tl.int32)
        position = tl.zeros((BLOCK_T,), tl.int64)
        cache_slot = position - 1
        is_live = position < 0
        if first < num_rows * NUM_QUERIES:
            rows = tokens // NUM_QUERIES
            step = tokens % NUM_QUERIES
            mask_b = rows < num_rows
            slot_ptrs = idx_mapping_ptr + rows.to(tl.int64) * stride_idx_b
            slot = tl.load(slot_ptrs, mask=mask_b, other=0).to(tl.int64)
            sampled_ptrs = num_sampled_ptr + rows.to(tl.int64) * stride_sampled_b
            has_sample = tl.load(sampled_ptrs, mask=mask_b, other=0) > 0
            last = last_valid_position(
                rows,
                mask_b,
                target_positions_ptr,
                target_start_ptr,
                num_rejected_ptr,
                num_targets,
                stride_rejected_b,
            )
            is_first = (step == 0) & mask_b & (slot >= 0) & (slot < num_slots)
            sampled = tl.load(last_sampled_ptr + slot, mask=is_first & has_sample, other=0)
            prefill = tl.load(next_prefill_ptr + slot, mask=is_first & ~has_sample, other=0)
            first_id = tl.where(has_sample, sampled.to(tl.int32), prefill.to(tl.int32))
            query_position = last + 1 + step
            query_slot = slot_of(
                query_position,
                rows,
                mask_b,
                block_table_ptr,
                num_table_cols,
                stride_table_b,
                stride_table_c,
                max_model_len,
                cp_rank,
                PAGE_SIZE,
                CP_SIZE,
                CP_INTERLEAVE,
            )
            num_live = count_live_rows(idx_mapping_ptr, num_rows, num_slots, stride_idx_b, BLOCK_B)
            is_live = rows < num_live
            token_id = tl.where(is_live, tl.where(step == 0, first_id, mask_token_id), token_id)
            query_position = tl.minimum(query_position, max_model_len - 1)
            position = tl.where(is_live, query_position, position)
            cache_slot = tl.where(is_live, query_slot, cache_slot)
        mask_t = tokens < num_tokens
        tl.store(input_ids_ptr + tokens, token_id, mask=mask_t)
        tl.store(positions_ptr + tokens, position, mask=mask_t)
        tl.store(query_slot_mapping_ptr + tokens, cache_slot, mask=mask_t)
        if HAS_PADDING:
            tl.store(is_padding_ptr + tokens, ~is_live, mask=mask_t)

    else:
        first = (block - num_row_programs - num_sample_programs - num_query_programs) * BLOCK_T
        tokens = first + tl.arange(0, BLOCK_T)
        position = tl.zeros((BLOCK_T,), tl.int64)
        cache_slot = position - 1
        num_live = tl.full((), 0, tl.int32)
        low_row = num_live
        high_row = num_live
        target = position
        is_target = (tokens < num_targets) & (tokens < num_context_tokens)
        if first < num_targets:
            target = tl.load(target_positions_ptr + tokens, mask=is_target, other=0)
            num_live = num_rows
            for first_row in range(0, num_rows, BLOCK_B):
                offs_b = first_row + tl.arange(0, BLOCK_B)
                end = tl.load(target_start_ptr + 1 + offs_b, mask=offs_b < num_rows, other=0)
                dead = first_dead_row(idx_mapping_ptr, offs_b, num_rows, num_slots, stride_idx_b)
                num_live = tl.minimum(num_live, dead)
                # Rows that end before the first token, and before the last, counted in one word.
                ended = (end <= first).to(tl.int32) + ((end < first + BLOCK_T).to(tl.int32) << 16)
                counts = tl.sum(tl.where(offs_b < num_live, ended, 0), axis=0)
                low_row += counts & 0xFFFF
                high_row += counts >> 16
        if low_row < num_live:
            low = low_row + tl.zeros((BLOCK_T,), tl.int32)
            high = high_row + tl.zeros((BLOCK_T,), tl.int32)
            num_unknown = high_row - low_row
            while num_unknown > 0:
                middle = (low + high) // 2
                is_open = low < high
                end = tl.load(target_start_ptr + 1 + middle, mask=is_open, other=0)
                is_later = end <= tokens
                low = tl.where(is_open & is_later, middle + 1, low)
                high = tl.where(is_later, high, middle)
                num_unknown = num_unknown // 2
            mask_b = low < num_live
            start = tl.load(target_start_ptr)
            end = tl.load(target_start_ptr + 1 + low, mask=mask_b, other=0).to(tl.int64)
            rejected_ptrs = num_rejected_ptr + low.to(tl.int64) * stride_rejected_b
            rejected = tl.load(rejected_ptrs, mask=mask_b, other=0)
            target_slot = slot_of(
                target,
                low,
                mask_b,
                block_table_ptr,
                num_table_cols,
                stride_table_b,
                stride_table_c,
                max_model_len,
                cp_rank,
                PAGE_SIZE,
                CP_SIZE,
                CP_INTERLEAVE,
            )
            is_valid = mask_b & is_target & (tokens >= start) & (tokens < end - rejected)
            position = tl.where(is_valid, target, position)
            cache_slot = tl.where(is_valid, target_slot, cache_slot)
        mask_t = tokens < num_context_tokens
        tl.store(context_positions_ptr + tokens, position, mask=mask_t)
        tl.store(context_slot_mapping_ptr + tokens, cache_slot, mask=mask_t)
