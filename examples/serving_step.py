"""The draft step of a serving engine: draft inputs, a backbone over a paged pool, Markov loop.

`ServingStep` owns every buffer, so that all addresses are fixed, and nothing in it depends on how
many rows are live: compiled once and captured once, it serves every batch.

Shape letters: B live rows, Bm rows of the buffers, S request slots, N draft steps and queries a
row, Tm = Bm * N query tokens, Tc target tokens of a round at most, n columns of a block table, L
tokens in its blocks, H hidden size, F = H * number of target layers read, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dspark_ops
from draft_model import Draft
from draft_step import DraftStep
from target_model import rotary_angles

ROWS, SLOTS = 4, 6
BLOCK_SIZE, COLUMNS, BLOCKS = 16, 8, 25
MAX_MODEL_LEN = BLOCK_SIZE * COLUMNS
MAX_QUERY_LEN = 16  # target tokens of a row in a round: a longer prompt takes several
I32, I64, F32, BOOL = torch.int32, torch.int64, torch.float32, torch.bool


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
