"""The draft step of a serving engine as one CUDA graph: inputs, backbone and Markov loop.

    python examples/cuda_graph.py

Serves five prompts in four rows, which join and finish on their own, by draft -> verify -> accept.
`ServingStep` owns every buffer, so that all addresses are fixed, and nothing in it depends on how
many rows are live: compiled with ``backend="dspark"`` it is captured once, by `torch.cuda.graph`
and by ``mode="reduce-overhead"``, and serves every batch. Each round's step is held against the
eager one from the same state: from the samplers' inputs (base logits and biases) on, ids and cached
logits have to be equal bit for bit, and what lies beyond the batch unchanged or freshly padded.
Exits with 1 if they are not. Without a GPU the compiled step runs without a graph.

Shape letters: B live rows, Bm rows of the buffers, S request slots, N draft steps and queries a
row, Tm = Bm * N query tokens, Tc target tokens of a round at most, n columns of a block table, L
tokens in its blocks, H hidden size, F = H * number of target layers read, V vocabulary.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dspark_ops
import inductor_passes
from draft_model import Draft, Pair, load_pair
from draft_step import DraftStep
from quickstart import differences
from target_model import rotary_angles
from verify import distribution, draw, verify

ROWS, SLOTS = 4, 6
BLOCK_SIZE, COLUMNS, BLOCKS = 16, 8, 25
MAX_MODEL_LEN = BLOCK_SIZE * COLUMNS
MAX_QUERY_LEN = 16  # target tokens of a row in a round: a longer prompt takes several
I32, I64, F32, BOOL = torch.int32, torch.int64, torch.float32, torch.bool

Step = Callable[[], tuple[Tensor, list[Tensor]]]


class ServingStep(nn.Module):
    """One draft step of up to Bm requests. All that it reads and writes are buffers of its own."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft, self.loop = draft, DraftStep(draft)
        config, dtype, device = draft.config, draft.lm_head.dtype, draft.lm_head.device
        self.num_steps = n = config.block_size
        self.head_size = config.hidden_size // config.num_attention_heads
        queries, targets = ROWS * n, ROWS * MAX_QUERY_LEN
        prepared = {
            # Of request slots.
            "temperature": (F32, (SLOTS,)),
            "seeds": (I64, (SLOTS,)),
            "last_sampled": (I64, (SLOTS,)),
            "next_prefill_tokens": (I64, (SLOTS,)),
            # Of the batch that the target has run.
            "idx_mapping": (I32, (ROWS,)),
            "block_table": (I32, (ROWS, COLUMNS)),
            "num_sampled": (I32, (ROWS,)),
            "num_rejected": (I32, (ROWS,)),
            "target_query_start_loc": (I32, (ROWS + 1,)),
            "target_positions": (I64, (targets,)),
            # Written from them in each step. Attention over ragged queries would read
            # query_start_loc too, and a mixture of experts is_padding.
            "input_ids": (I32, (queries,)),
            "positions": (I64, (queries,)),
            "is_padding": (BOOL, (queries,)),
            "query_slot_mapping": (I64, (queries,)),
            "query_start_loc": (I32, (ROWS + 1,)),
            "seq_lens": (I32, (ROWS,)),
            "context_positions": (I64, (targets,)),
            "context_slot_mapping": (I64, (targets,)),
            "sample_indices": (I64, (queries,)),
            "sample_pos": (I64, (queries,)),
            "sample_idx_mapping": (I64, (queries,)),
            "out_temperature": (F32, (SLOTS,)),
            "out_seeds": (I64, (SLOTS,)),
        }
        places = (BLOCKS * BLOCK_SIZE, 2, config.num_attention_heads, self.head_size)
        others = {
            "num_computed_tokens": (I32, (SLOTS,)),
            "target_is_padding": (BOOL, (targets,)),
            "target_seq_lens": (I32, (ROWS,)),
            "target_hidden": (dtype, (targets, draft.context_proj.in_features)),
            # Keys and values of each layer; block 0 is the null block and stays zero.
            **{f"pool_{i}": (dtype, places) for i in range(len(draft.layers))},
            # Results.
            "logits_cache": (dtype, (SLOTS, n, config.vocab_size)),
            "draft_tokens": (I64, (ROWS, n)),
        }
        self.prepared = tuple(prepared)
        for name, (kind, shape) in {**prepared, **others}.items():
            buffer = torch.zeros(shape, dtype=kind, device=device)
            self.register_buffer(name, buffer, persistent=False)

    def prepare_target(self, num_tokens: int) -> None:
        """Positions and padding of the target's next batch, of num_tokens tokens.

        Not in the captured step: num_tokens is a number of the host's, and a graph would keep the
        one it was captured with. There, give `prepare_positions` is_padding without num_tokens.
        """
        self.target_is_padding[:num_tokens].fill_(False)
        self.target_is_padding[num_tokens:].fill_(True)
        dspark_ops.prepare_positions(
            self.idx_mapping,
            self.target_query_start_loc,
            self.num_computed_tokens,
            self.target_positions,
            self.target_seq_lens,
        )

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """Draft N tokens for every live row: writes draft_tokens, logits_cache and the pools.

        Returns what the samplers were given: base logits [Bm, N, V] and N biases [Bm, V].
        """
        config = self.draft.config
        dspark_ops.prepare_dflash_inputs(
            # Each buffer has the name of its argument.
            **{name: getattr(self, name) for name in self.prepared},
            max_target_query_len=MAX_QUERY_LEN,
            mask_token_id=config.mask_token_id,
            block_size=BLOCK_SIZE,
            num_query_per_req=self.num_steps,
            num_steps=self.num_steps,
            max_model_len=MAX_MODEL_LEN,
            sample_from_anchor=config.sample_from_anchor,
        )
        base, biases = self.backbone(), []
        self.loop.markov_loop(
            base,
            self.input_ids.view(ROWS, -1)[:, 0],
            self.sample_idx_mapping.view(ROWS, -1),
            self.out_temperature,
            self.out_seeds,
            self.sample_pos.view(ROWS, -1),
            self.logits_cache,
            self.draft_tokens,
            biases=biases,
        )
        return base, biases

    def backbone(self) -> Tensor:
        """Base logits [Bm, N, V]: `Draft.backbone` with its memory in the pools."""
        draft, theta = self.draft, self.draft.config.rope_theta
        places = torch.cat((self.context_slot_mapping, self.query_slot_mapping))  # [Tc + Tm]
        positions = torch.cat((self.context_positions, self.positions)).unsqueeze(0)
        memory_angles = rotary_angles(positions, self.head_size, theta)
        angles = rotary_angles(self.positions.view(ROWS, -1), self.head_size, theta)
        # A row without tokens sees one place of the null block: a softmax over none is NaN.
        ends = self.seq_lens.clamp(min=1).view(-1, 1, 1, 1)
        mask = torch.arange(MAX_MODEL_LEN, device=ends.device) < ends  # [Bm, 1, 1, L]

        context = draft.context_norm(draft.context_proj(self.target_hidden))  # [Tc, H]
        x = F.embedding(self.input_ids, draft.lm_head).view(ROWS, self.num_steps, -1)
        for i, layer in enumerate(draft.layers):
            normed = layer.input_norm(x)
            memory = torch.cat((context, normed.flatten(0, 1))).unsqueeze(0)  # [1, Tc + Tm, H]
            pool = getattr(self, f"pool_{i}")
            write(pool, places, *layer.attention.keys_values(memory, memory_angles))
            x = x + layer.attention(normed, angles, read(pool, self.block_table), mask)
            x = x + layer.mlp(layer.mlp_norm(x))
        sampled = draft.norm(x).flatten(0, 1)[self.sample_indices]  # [Bm * N, H]
        return F.linear(sampled, draft.lm_head).view(ROWS, self.num_steps, -1)


def write(pool: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [1, heads, T, D] at places i64 [T]; -1 is nowhere."""
    entries = torch.stack((keys[0], values[0])).permute(2, 0, 1, 3)  # [T, 2, heads, D]
    # Nowhere is the null block, where a zero is written over a zero.
    pool[places.clamp(min=0)] = torch.where((places >= 0).view(-1, 1, 1, 1), entries, 0)


def read(pool: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [Bm, heads, L, D] of the blocks of each row, i32 [Bm, n]."""
    blocks = pool.unflatten(0, (-1, BLOCK_SIZE))[block_table]
    keys, values = blocks.flatten(1, 2).transpose(1, 3).unbind(2)
    return keys, values


@dataclass(frozen=True)
class Request:
    prompt: str
    temperature: float
    new_tokens: int
    # It joins in this round at the earliest, and beside so many others at most.
    from_round: int = 0
    beside: int = ROWS - 1


REQUESTS = (
    Request('The "for" statement is used to', 0.0, 28),
    Request("A class definition", 1.0, 24),
    Request('The "try" statement specifies exception handlers', 0.7, 24),
    Request(
        "An object is a container if it contains references to other objects. Examples of "
        "containers are tuples, lists and dictionaries. The value of an",
        temperature=0.0,
        new_tokens=64,
        from_round=3,
    ),
    Request('The "while" statement', 1.0, 20, from_round=12, beside=1),
)


@dataclass
class Served:
    """A request on its way through the engine."""

    request: Request
    seed: int
    ids: list[int]  # of the prompt
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens that the target has verified, and the draft has read
    sampled: bool = False  # whether the next token is known, and N are drafted behind it
    accepted: list[int] = field(default_factory=list)  # drafted tokens that stood, by round
    text: str = ""  # the prompt excluded

    @property
    def num_new(self) -> int:
        return self.computed + self.sampled - len(self.ids)


@dataclass(frozen=True)
class Batch:
    """The target's tokens of a round: of each live row those at positions first to end - 1."""

    num_tokens: int
    slot: Tensor  # i64 [B]
    first: Tensor  # i64 [B]
    end: Tensor  # i64 [B]
    drafted: Tensor  # bool [B]: one known token and the N drafted behind it
    unfinished: Tensor  # bool [B]: of a prompt that goes on behind them


class Engine:
    """What surrounds the step in a serving engine, in short: slots, blocks, target, acceptance.

    The target keeps no KV cache, as in generate.py. The host looks at results between steps only.
    """

    def __init__(
        self, pair: Pair, step: ServingStep, requests: Sequence[Request], seed: int = 0
    ) -> None:
        self.target, self.step = pair.target, step
        self.layer_ids = pair.draft.config.target_layer_ids
        self.tokenizer = Tokenizer.from_file(str(pair.folder / "tokenizer.json"))
        self.text = torch.zeros(SLOTS, MAX_MODEL_LEN, dtype=I64, device=step.positions.device)
        self.generator = torch.Generator(self.text.device).manual_seed(seed)
        self.all = [
            Served(request, seed + i, self.tokenizer.encode(request.prompt).ids)
            for i, request in enumerate(requests)
        ]
        for x in self.all:
            if not x.ids:
                raise ValueError("every prompt needs at least one token")
            if self.num_blocks(x) > min(COLUMNS, BLOCKS - 1):
                raise ValueError(
                    f"prompt, new_tokens and {2 * step.num_steps} drafted ones must fit into "
                    f"MAX_MODEL_LEN = {MAX_MODEL_LEN}; got {len(x.ids)} and "
                    f"{x.request.new_tokens} for {x.request.prompt!r}"
                )
        self.waiting, self.running = list(self.all), list[Served]()
        self.free_slots, self.free_blocks = list(range(SLOTS)), list(range(1, BLOCKS))
        random.Random(seed).shuffle(self.free_blocks)
        self.live_rows: list[int] = []  # by round

    def num_blocks(self, x: Served) -> int:
        # Its last round may accept N tokens too many, and drafts N behind them.
        return -(-(len(x.ids) + x.request.new_tokens + 2 * self.step.num_steps) // BLOCK_SIZE)

    @torch.no_grad()
    def serve(self, prepare_target: Callable[[int], Any], draft: Callable[[], Any]) -> None:
        """Run until every request has its tokens; prints the number of live rows of each round."""
        while self.waiting or self.running:
            self.admit()
            self.live_rows.append(len(self.running))
            print(len(self.running), end=" ", flush=True)
            batch = self.schedule()
            prepare_target(batch.num_tokens)
            valid_end, accepted = self.accept(batch, self.run_target(batch))
            draft()
            self.keep_drafts(batch, valid_end)
            for x, end, count in zip(
                list(self.running), valid_end.tolist(), accepted.tolist(), strict=True
            ):
                if x.sampled:
                    x.accepted.append(count)
                x.computed, x.sampled = end, end >= len(x.ids)
                if x.num_new >= x.request.new_tokens:
                    self.release(x)
        print()

    def admit(self) -> None:
        while self.waiting and len(self.running) < ROWS:
            x = self.waiting[0]
            early = len(self.live_rows) < x.request.from_round
            if self.running and (early or len(self.running) > x.request.beside):
                return
            if self.num_blocks(x) > len(self.free_blocks):
                return
            x.slot = self.free_slots.pop()
            x.blocks = [self.free_blocks.pop() for _ in range(self.num_blocks(x))]
            self.text[x.slot, : len(x.ids)] = self.on_device(x.ids)
            self.step.temperature[x.slot] = x.request.temperature
            self.step.seeds[x.slot] = x.seed
            self.step.num_computed_tokens[x.slot] = 0
            self.running.append(self.waiting.pop(0))

    def release(self, x: Served) -> None:
        new_ids = self.text[x.slot, len(x.ids) : len(x.ids) + x.request.new_tokens]
        x.text = self.tokenizer.decode(new_ids.tolist())
        self.running.remove(x)
        self.free_slots.append(x.slot)
        self.free_blocks.extend(x.blocks)

    def on_device(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self.text.device)

    def schedule(self) -> Batch:
        """The next batch; what it leaves of the rows behind the live ones is their idx_mapping."""
        step, running, live = self.step, self.running, len(self.running)
        ends = [
            x.computed + step.num_steps + 1
            if x.sampled
            else min(len(x.ids), x.computed + MAX_QUERY_LEN)
            for x in running
        ]
        spans = [end - x.computed for x, end in zip(running, ends, strict=True)]
        starts = [0, *accumulate(spans), *[sum(spans)] * (ROWS - live)]
        slot = self.on_device([x.slot for x in running])
        step.idx_mapping.fill_(-1)
        step.idx_mapping[:live] = slot
        step.target_query_start_loc.copy_(self.on_device(starts))
        tables = [x.blocks + [0] * (COLUMNS - len(x.blocks)) for x in running]
        step.block_table[:live] = self.on_device(tables)
        return Batch(
            num_tokens=sum(spans),
            slot=slot,
            first=self.on_device([x.computed for x in running]),
            end=self.on_device(ends),
            drafted=self.on_device([x.sampled for x in running]),
            unfinished=self.on_device(
                [end < len(x.ids) for x, end in zip(running, ends, strict=True)]
            ),
        )

    def run_target(self, batch: Batch) -> Tensor:
        """Logits [B, L, V] of every row's text; target_hidden gets the batch's hidden states."""
        step = self.step
        logits, hidden = self.target(self.text[batch.slot], self.layer_ids)
        rows = torch.arange(len(batch.slot), device=hidden.device)
        row = rows.repeat_interleave(batch.end - batch.first)
        step.target_hidden[: len(row)] = hidden[row, step.target_positions[: len(row)]]
        step.target_hidden.masked_fill_(step.target_is_padding[:, None], 0)
        return logits

    def accept(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Verify what was drafted, draw where nothing was. The position behind each row's valid
        tokens, where the target's own stands, and the drafted tokens that stood, both i64 [B]."""
        step, text, slot, live = self.step, self.text, batch.slot, len(batch.slot)
        row, steps = torch.arange(live, device=slot.device), step.draft_tokens.shape[1] + 1
        temperature = step.temperature[slot]
        last = logits[row, batch.end - 1, None]
        own = draw(distribution(last, temperature)[:, 0], self.generator)
        at = batch.first[:, None] + torch.arange(steps, device=slot.device)
        at = at.clamp(max=MAX_MODEL_LEN - 1)  # where nothing was drafted, nobody reads it
        drafts = text[slot[:, None], at[:, 1:]]
        verdict = verify(
            logits[row[:, None], at], step.logits_cache[slot], drafts, temperature, self.generator
        )
        accepted = torch.where(batch.drafted, verdict.num_accepted, 0)
        own = torch.where(batch.drafted, verdict.tokens[row, verdict.num_accepted], own)
        valid_end = torch.where(batch.drafted, batch.first + accepted + 1, batch.end)

        step.num_sampled[:live] = torch.where(batch.unfinished, 0, accepted + 1).int()
        step.num_rejected[:live] = (batch.end - valid_end).int()
        step.next_prefill_tokens[slot] = text[slot, valid_end]
        step.last_sampled[slot] = own
        step.num_computed_tokens[slot] = valid_end.int()
        text[slot, valid_end] = torch.where(batch.unfinished, text[slot, valid_end], own)
        return valid_end, accepted

    def keep_drafts(self, batch: Batch, valid_end: Tensor) -> None:
        """Write the drafted tokens into the text, behind the target's own."""
        drafts = self.step.draft_tokens[: len(batch.slot)]
        steps = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        behind = (batch.slot[:, None], valid_end[:, None] + steps)
        self.text[behind] = torch.where(batch.unfinished[:, None], self.text[behind], drafts)


# What `prepare_dflash_inputs` leaves beyond the batch, by buffer.
PADDING = {
    **{"input_ids": 0, "positions": 0, "is_padding": True, "query_slot_mapping": -1},
    **{"seq_lens": 0, "context_positions": 0, "context_slot_mapping": -1},
    **{"sample_indices": 0, "sample_pos": 0, "sample_idx_mapping": -1},
}
# Of base logits, compiled against eager, relative to the largest. Eager rounds to bf16 after each
# op, Inductor where it stores: 0.005 on a CPU. The pool of one layer emptied gives 0.1 to 0.3.
BASE_TOLERANCE = 0.05


def different(state: dict[str, Tensor], other: dict[str, Tensor]) -> int:
    """Entries whose bits differ, in the buffers of state."""
    count = 0
    for name, x in state.items():
        y = other[name]
        if x.is_floating_point():
            width = torch.int16 if x.element_size() == 2 else torch.int32
            x, y = x.view(width), y.view(width)
        count += int((x != y).sum())
    return count


class Comparison:
    """Runs each step in several ways from the same state, and counts what is not as it must be."""

    def __init__(
        self, step: ServingStep, ways: dict[str, Step], prepare_target: Callable[[int], None]
    ) -> None:
        """ways: other ways to run step, the later ones with the first one's bits from end to end.
        prepare_target: another way to run step.prepare_target."""
        self.step, self.ways, self.other_prepare_target = step, ways, prepare_target
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in ways}
        self.wrong_target_inputs = 0
        self.base_error = 0.0  # the largest, relative to the largest eager base logit

    @property
    def equal(self) -> bool:
        wrong = sum(n for c in self.counts.values() for key, n in c.items() if "wrong" in key)
        return wrong + self.wrong_target_inputs == 0 and self.base_error < BASE_TOLERANCE

    def state(self, stale: Sequence[str] = ()) -> dict[str, Tensor]:
        """A copy of all buffers, with other contents in those that the next call has to write."""
        state = {name: x.clone() for name, x in self.step.named_buffers(recurse=False)}
        for name in stale:
            if state[name].dtype == BOOL:
                state[name].logical_not_()
            else:
                state[name].fill_(3)
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, x in state.items():
            getattr(self.step, name).copy_(x)

    def prepare_target(self, num_tokens: int) -> None:
        before = self.state(stale=("target_positions", "target_is_padding", "target_seq_lens"))
        self.restore(before)
        self.step.prepare_target(num_tokens)
        eager = self.state()
        self.restore(before)
        self.other_prepare_target(num_tokens)
        self.wrong_target_inputs += different(self.state(), eager)

    def draft(self) -> None:
        """The draft step of an engine; what the last of the ways leaves is what it gets."""
        before = self.state(stale=(*PADDING, "query_start_loc", "draft_tokens"))
        before["logits_cache"].zero_()
        eager = self.run(self.step, before)
        first: dict[str, Tensor] = {}
        for name, way in self.ways.items():
            after = self.run(way, before)
            self.counts[name] += self.compare(before, eager, after)
            if first:
                self.counts[name]["wrong bits"] += different(after, first)
            first = first or after

    def run(self, way: Step, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """All buffers after the step, and what it returned."""
        self.restore(before)
        base, biases = way()
        return {**self.state(), "base": base.clone(), "biases": torch.stack(biases, dim=1)}

    def compare(
        self, before: dict[str, Tensor], eager: dict[str, Tensor], after: dict[str, Tensor]
    ) -> Counter[str]:
        error = (after["base"].float() - eager["base"].float()).abs().max()
        self.base_error = max(self.base_error, float(error / eager["base"].abs().max()))
        ids, wrong_ids, logits, wrong_logits = differences(
            [
                (
                    after["base"],
                    after["biases"],
                    after["sample_idx_mapping"].view(ROWS, -1),
                    after["out_temperature"],
                    after["out_seeds"],
                    after["sample_pos"].view(ROWS, -1),
                    after["logits_cache"],
                    after["draft_tokens"],
                )
            ]
        )
        # The rest of the state has nothing of the backbone's rounding in it but the pools.
        sampled = ("logits_cache", "draft_tokens", "base", "biases")
        rest = {k: x for k, x in after.items() if k not in sampled and not k.startswith("pool_")}
        return Counter(
            {
                "ids": ids,
                "wrong ids": wrong_ids,
                "logits": logits,
                "wrong logits": wrong_logits,
                "wrong inputs": different(rest, eager),
                "wrong beyond": self.wrong_beyond_the_batch(before, after),
            }
        )

    def wrong_beyond_the_batch(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> int:
        """Entries behind the live rows that are not padding, and slots and places of no live row
        that are not as before."""
        slots = after["idx_mapping"][after["idx_mapping"] >= 0].long()
        num_tokens, wrong = int(after["target_query_start_loc"][-1]), 0
        for name, padding in PADDING.items():
            x = after[name]
            end = num_tokens if name.startswith("context") else x.numel() // ROWS * len(slots)
            wrong += int((x[end:] != padding).sum())
        places = torch.cat((after["context_slot_mapping"], after["query_slot_mapping"]))
        places = places[places >= 0]
        for name, x in after.items():
            live = places if name.startswith("pool_") else slots
            if name.startswith("pool_") or name in ("out_temperature", "out_seeds", "logits_cache"):
                rest = torch.ones(len(x), dtype=BOOL, device=x.device)
                rest[live] = False
                wrong += different({name: x[rest]}, {name: before[name][rest]})
        return wrong


class Captured:
    """A step as one CUDA graph, captured in the first call and replayed in every one."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        self.returned = self.step()

    def __call__(self) -> tuple[Tensor, list[Tensor]]:
        if self.graph is None:
            from timing import capture

            # It runs the step a few times first, which from one state leaves the same each time.
            self.graph = capture(self.run)
        self.graph.replay()
        return self.returned


def gpu_ways(step: ServingStep, compiled: Step) -> dict[str, Step]:
    reduced = torch.compile(step, fullgraph=True, backend="dspark", mode="reduce-overhead")

    def reduce_overhead() -> tuple[Tensor, list[Tensor]]:
        torch.compiler.cudagraph_mark_step_begin()
        return reduced()

    return {"captured": Captured(compiled), "reduce-overhead": reduce_overhead}


def print_gpu_times(ways: dict[str, Step]) -> None:
    """Host time, GPU time and kernels of one step: eager, compiled, and as a graph."""
    from timing import host_us, kernels, replay_us

    host_times = host_us(ways, calls=20, rounds=10)
    gpu_times = {name: replay_us(ways[name]) for name in ("eager", "compiled")}
    counts = {name: len(kernels(ways[name])) for name in gpu_times}
    print(f"\none step of {ROWS} rows on {torch.cuda.get_device_name()}; it takes the longer time:")
    print("                    host us    GPU us  kernels")
    for name, host_time in host_times.items():
        like = "eager" if name == "eager" else "compiled"
        print(f"    {name:15s} {host_time:7.1f}  {gpu_times[like]:8.1f}  {counts[like]:7d}")


def print_verdict(comparison: Comparison) -> None:
    for name, c in comparison.counts.items():
        print(
            f"{name} against eager: {c['ids']} ids, {c['wrong ids']} differ; {c['logits']} cached "
            f"logits, {c['wrong logits']} differ; {c['wrong inputs']} prepared inputs differ; "
            f"{c['wrong beyond']} entries beyond the batch changed"
        )
        if name != "compiled":
            print(f"    against compiled, from end to end: {c['wrong bits']} entries differ")
    print(
        f"target inputs: {comparison.wrong_target_inputs} differ; base logits: within "
        f"{comparison.base_error:.1%} of eager's, whose backbone rounds otherwise"
    )


@torch.no_grad()
def main() -> None:
    on_gpu = torch.cuda.is_available()
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    pair = load_pair(Path(__file__).parent / "pair", "cuda" if on_gpu else "cpu", torch.bfloat16)
    step = ServingStep(pair.draft)
    skips = counters["inductor"]["cudagraph_skips"]
    ways: dict[str, Step] = {"compiled": torch.compile(step, fullgraph=True, backend="dspark")}
    if on_gpu:
        ways |= gpu_ways(step, ways["compiled"])
    # One compilation for every number of tokens.
    prepare_target = torch.compile(
        step.prepare_target, fullgraph=True, backend="dspark", dynamic=True
    )
    comparison = Comparison(step, ways, prepare_target)
    engine = Engine(pair, step, REQUESTS)
    print("compiling the step with backend='dspark' in the first round; live rows by round:")
    engine.serve(comparison.prepare_target, comparison.draft)
    for x in engine.all:
        print(f"\n[temperature {x.request.temperature}] {x.request.prompt}{x.text}")
    accepted = [count for x in engine.all for count in x.accepted]
    print(
        f"\naccepted length: {sum(accepted) / len(accepted):.2f} drafted tokens a round of a row, "
        f"{len(engine.live_rows)} rounds"
    )

    print("\nexplain(step):")
    sites = inductor_passes.explain(step).sites
    print("\nexplain(step.prepare_target, num_tokens):")
    sites += inductor_passes.explain(step.prepare_target, 24).sites
    fused = Counter(site.pass_name for site in sites if site.fused)
    skips = counters["inductor"]["cudagraph_skips"] - skips
    correct = comparison.equal and skips == 0
    if on_gpu and correct:
        print_gpu_times({"eager": step, **ways})
    print()
    print_verdict(comparison)
    if on_gpu:
        print(f"CUDA graphs skipped under reduce-overhead: {skips}")
    else:
        print(
            "on a GPU: the same for the step captured by torch.cuda.graph and by reduce-overhead, "
            "and the times of both against compiled and eager"
        )
    wanted = {"sampler_fusion": step.num_steps, "padding_fusion": 1}
    if not correct or fused != wanted:
        print(f"NOT EQUAL, a graph skipped, or not all fused: {dict(fused)} of {wanted}")
        sys.exit(1)
    print("ids equal, cache bits equal, nothing written beyond the batch")


if __name__ == "__main__":
    main()
