"""What surrounds the draft step in a serving engine, in short: requests, slots, blocks, rounds.

Requests join and finish on their own; a round verifies the tokens drafted before it and drafts
anew. Shape letters as in serving_step.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from draft_model import Pair
from serving_step import (
    BLOCK_SIZE,
    BLOCKS,
    COLUMNS,
    I64,
    MAX_MODEL_LEN,
    MAX_QUERY_LEN,
    ROWS,
    SLOTS,
    ServingStep,
)
from verify import distribution, draw, verify


@dataclass(frozen=True)
class Request:
    prompt: str
    temperature: float
    new_tokens: int
    # It joins in this round at the earliest, and beside so many others at most.
    from_round: int = 0
    beside: int = ROWS - 1


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
