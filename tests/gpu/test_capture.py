"""Captured ops: inputs overwritten in place, replayed, compared with eager on the new inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dspark_ops

from ..ops.cases import Inputs
from ..ops.test_statistics import assert_follows
from .cases import make_bias, make_cache, make_inputs, same_bits, unfused

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BF16 = torch.bfloat16
VOCAB = 3001


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm ``step`` up on a side stream and capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def overwrite(inputs: Inputs, other: Inputs) -> None:
    for x, y in zip(inputs.args, other.args, strict=True):
        x.copy_(y)


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_sample_follows_its_inputs(rows: int, use_fp64: bool) -> None:
    """Everything at once, in buffers larger than the batch."""
    padded = rows + 3
    inputs = make_inputs(rows, VOCAB, BF16, seed=0)
    bias = make_bias(padded, VOCAB, BF16)
    cache = make_cache(rows + 1, VOCAB, BF16)
    tokens = torch.full((padded, 3), -9, dtype=torch.int32, device="cuda")
    column = torch.tensor(0, device="cuda")

    def step() -> Tensor:
        return dspark_ops.gumbel_sample(
            *inputs.args,
            bias=bias[:rows],
            logits_cache=cache,
            cache_col=column,
            draft_tokens=tokens[:rows, 1],
            is_drafting=True,
            use_fp64=use_fp64,
        )

    graph, out = capture(step)
    for seed in range(1, 6):
        overwrite(inputs, make_inputs(rows, VOCAB, BF16, seed=seed, first_kind=seed))
        bias.copy_(make_bias(padded, VOCAB, BF16, seed=seed))
        column.fill_(seed % 3)  # 2 is beyond the cache
        cache.fill_(7.0)
        tokens.fill_(-9)
        graph.replay()
        wanted_cache = make_cache(rows + 1, VOCAB, BF16)
        wanted = unfused(
            inputs,
            bias[:rows],
            logits_cache=wanted_cache,
            cache_col=column,
            is_drafting=True,
            use_fp64=use_fp64,
        )
        assert torch.equal(out, wanted)
        assert same_bits(cache, wanted_cache)
        assert torch.equal(tokens[:rows, 1].long(), wanted)
        assert (tokens[rows:] == -9).all()
        assert (tokens[:, [0, 2]] == -9).all()


def test_block_argmax_and_combine_follow_their_inputs() -> None:
    rows = 5
    inputs = make_inputs(rows, VOCAB, BF16, seed=0)
    cache = make_cache(rows + 1, VOCAB, BF16)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        blocks = dspark_ops.gumbel_block_argmax(*inputs.args, logits_cache=cache, cache_col=1)
        return *blocks, dspark_ops.gumbel_combine(*blocks)

    graph, out = capture(step)
    for seed in range(1, 6):
        overwrite(inputs, make_inputs(rows, VOCAB, BF16, seed=seed, first_kind=seed))
        cache.fill_(7.0)
        graph.replay()
        captured, captured_cache = [x.clone() for x in out], cache.clone()
        cache.fill_(7.0)
        for x, y in zip(captured, step(), strict=True):
            assert same_bits(x, y)
        assert same_bits(captured_cache, cache)


def test_loop_of_steps_follows_its_inputs() -> None:
    """Steps that feed on each other, as a draft loop does: each reads the token before it."""
    rows, steps = 4, 5
    inputs = make_inputs(rows, VOCAB, BF16, seed=0)
    table = make_bias(VOCAB, VOCAB, BF16, seed=3)
    cache = make_cache(rows + 1, VOCAB, BF16, cols=steps)
    tokens = torch.full((rows, steps), -9, device="cuda")

    def loop() -> None:
        previous = torch.zeros(rows, dtype=torch.int64, device="cuda")
        for i in range(steps):
            previous = dspark_ops.gumbel_sample(
                *inputs.args,
                bias=table[previous],
                logits_cache=cache,
                cache_col=i,
                draft_tokens=tokens[:, i],
                pos_offset=i,
                is_drafting=True,
            )

    graph, _ = capture(loop)
    for seed in range(1, 4):
        overwrite(inputs, make_inputs(rows, VOCAB, BF16, seed=seed))
        for x in (cache, tokens):
            x.fill_(-9)
        graph.replay()
        replayed = tokens.clone(), cache.clone()
        for x in (cache, tokens):
            x.fill_(-9)
        loop()
        assert torch.equal(replayed[0], tokens)
        assert same_bits(replayed[1], cache)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


def small_step(slots: list[int], num_slots: int) -> tuple[Inputs, Tensor, Tensor]:
    rows = len(slots)
    inputs = make_inputs(rows, VOCAB, BF16, seed=2)
    inputs.idx_mapping = torch.tensor(slots, dtype=torch.int32, device="cuda")
    inputs.temperature = torch.full((num_slots,), 0.8, device="cuda")
    inputs.seeds = torch.arange(num_slots, device="cuda")
    cache = torch.full((num_slots, 1, VOCAB), 7.0, dtype=BF16, device="cuda")
    tokens = torch.full((rows + 2,), -9, device="cuda")
    return inputs, cache, tokens


@pytest.mark.parametrize("padding", [-1, -5, 4, 2**30])
def test_b3_01_padded_rows_write_no_cache(padding: int) -> None:
    """Captured for 4 rows, replayed with 2 live ones: slots 2 and 3 keep their 7.0."""
    inputs, cache, tokens = small_step([0, 1, 2, 3], 4)
    graph, out = capture(
        lambda: dspark_ops.gumbel_sample(
            *inputs.args, logits_cache=cache, cache_col=0, draft_tokens=tokens[:4]
        )
    )
    inputs.idx_mapping[2:] = padding
    cache.fill_(7.0)
    tokens.fill_(-9)
    graph.replay()
    assert same_bits(cache[:2, 0], inputs.logits[:2])
    assert (cache[2:] == 7.0).all()
    # Inert rows have a greedy id, which lands in the column as the eager write does.
    assert torch.equal(out[2:], inputs.logits[2:].argmax(-1))
    assert torch.equal(tokens[:4], out)
    assert (tokens[4:] == -9).all()


def test_b3_02_permuted_slots() -> None:
    """Row r's cached logits are row r's, at each step, wherever its slot is."""
    inputs, _, tokens = small_step([2, 0, 3, 1], 4)
    cache = torch.full((4, 3, VOCAB), 7.0, dtype=BF16, device="cuda")
    rows_by_step = [make_bias(4, VOCAB, BF16, seed=20 + i) for i in range(3)]
    straight = None
    for slots in ([0, 1, 2, 3], [2, 0, 3, 1]):
        inputs.idx_mapping.copy_(torch.tensor(slots))
        index = torch.tensor(slots, device="cuda")
        inputs.seeds[index] = torch.arange(4, device="cuda") + 50
        drawn = []
        for i, logits in enumerate(rows_by_step):
            inputs.logits = logits
            drawn.append(
                dspark_ops.gumbel_sample(
                    *inputs.args, logits_cache=cache, cache_col=i, draft_tokens=tokens[:4]
                )
            )
            assert same_bits(cache[index, i], logits)
        if straight is not None:
            assert torch.equal(torch.stack(drawn), straight)
        straight = torch.stack(drawn)


def test_b3_16_phantom_row() -> None:
    """A padding row of NaN with slot 2^30: the live rows equal an unpadded eager run's."""
    inputs, cache, tokens = small_step([0, 1, 2, 0], 4)
    graph, out = capture(
        lambda: dspark_ops.gumbel_sample(
            *inputs.args, logits_cache=cache, cache_col=0, draft_tokens=tokens[:4]
        )
    )
    inputs.idx_mapping[3] = 2**30
    inputs.logits[3] = float("nan")
    cache.fill_(7.0)
    graph.replay()
    live = (inputs.logits[:3], inputs.idx_mapping[:3], inputs.temperature, inputs.seeds)
    eager_cache = torch.full_like(cache, 7.0)
    eager = dspark_ops.gumbel_sample(*live, inputs.pos[:3], logits_cache=eager_cache, cache_col=0)
    assert torch.equal(out[:3], eager)
    assert out[3] == 0
    assert same_bits(cache, eager_cache)


def test_b3_11_1000_replays_with_other_seeds_and_positions() -> None:
    """No generator: new keys give new draws (chi-square at 1e-6), equal keys equal tokens."""
    rows, vocab = 64, 16
    inputs, _, _ = small_step([0] * rows, 1)
    inputs.logits = torch.zeros(rows, vocab, device="cuda")
    inputs.pos = torch.arange(rows, device="cuda")
    graph, out = capture(lambda: dspark_ops.gumbel_sample(*inputs.args))
    drawn = []
    for replay in range(1000):
        inputs.pos += rows
        if replay % 100 == 0:
            inputs.seeds += 1
        graph.replay()
        drawn.append(out.clone())
    ids = torch.cat(drawn).cpu()
    assert_follows(ids, torch.full((vocab,), 1 / vocab))
    assert_follows(ids[:-1:2] * vocab + ids[1::2], torch.full((vocab**2,), 1 / vocab**2))
    graph.replay()
    assert torch.equal(out, drawn[-1])
    assert torch.equal(out, dspark_ops.gumbel_sample(*inputs.args))
