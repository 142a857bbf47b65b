"""Random batches of a server, for all ops: any size, strides, addresses and optional arguments.

Only what decides what is compiled is random. Tensors are views of one piece of memory for each name
and dtype, which keeps whatever the calls before left there.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import dspark_ops

I32, I64, F32 = torch.int32, torch.int64, torch.float32
NUM_SLOTS = 8


class Batches:
    """``warmed`` are the arguments of ``warmup``, every dtype a tuple."""

    def __init__(self, device: str, warmed: dict[str, Any], max_rows: int) -> None:
        self.device = device
        self.warmed = warmed
        self.max_rows = max_rows
        self.memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self.dice = random.Random(0)
        self.health = dspark_ops.health(device)
        self.calls: list[Callable[[], None]] = [
            self.prepare_positions,
            self.gumbel_block_argmax,
            self.gumbel_combine,
            self.gumbel_sample,
            self.rejection_sample,
            self.top_k_top_p,
        ]
        if warmed.get("block_size"):
            self.calls.append(self.prepare_dflash_inputs)
        if warmed.get("markov_rank"):
            self.calls.append(self.gumbel_sample_embed)

    def serve(self, seed: int) -> None:
        """One batch: every op once."""
        self.dice = random.Random(seed)
        self.num_rows = self.one_of(0, 1, 1, 2, 3, self.dice.randint(4, self.max_rows))
        self.vocab = self.one_of(*self.warmed["vocab_size"])
        with self.health if self.chance(0.2) else nullcontext():
            for call in self.calls:
                call()

    # Dice

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def one_of(self, *values: Any) -> Any:
        return self.dice.choice(values)

    def dtype(self, name: str) -> torch.dtype:
        return self.one_of(*self.warmed[name])

    def use_fp64(self) -> bool:
        return self.warmed["use_fp64"] and self.chance(0.5)

    # Tensors

    def view(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
    ) -> Tensor:
        extent = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True)) + 1
        memory = self.memory.get((name, dtype))
        if memory is None or memory.numel() < offset + extent:
            memory = torch.zeros(2 * (offset + extent), dtype=dtype, device=self.device)
            self.memory[name, dtype] = memory
        return memory.as_strided(shape, strides, offset)

    def rows(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """[..., V]: as they come, in wider or interleaved rows, at any address, or 16-divisible."""
        width = shape[-1]
        form = self.dice.randrange(5)
        if form == 1:
            width += self.dice.randrange(20)
        elif form == 2:
            width *= self.dice.randint(2, 3)
        elif form >= 3:
            width = -(-width // 16) * 16
        strides = [1]
        for size in shape[:0:-1]:
            strides.append(width if len(strides) == 1 else strides[-1] * size)
        strides.reverse()
        if shape[0] == 1 and self.chance(0.2):
            strides[0] = self.one_of(0, 1, 3)
        offset = self.one_of(0, 0, 16, self.dice.randrange(20))
        return self.view(name, dtype, shape, tuple(strides), offset)

    def ints(self, name: str, dtype: torch.dtype, size: int, strided: bool = True) -> Tensor:
        stride = self.one_of(1, 1, 2, 3, 7, 16) if strided else 1
        return self.view(name, dtype, (size,), (stride,), self.dice.randrange(9))

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """0-d or [B]."""
        return self.ints(name, dtype, self.num_rows) if self.chance(0.5) else self.zero(name, dtype)

    def zero(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.view(name, dtype, (), (), self.dice.randrange(9))

    def state(self) -> tuple[Tensor, Tensor]:
        return (
            self.ints("temperature", F32, NUM_SLOTS, strided=False),
            self.ints("seeds", I64, NUM_SLOTS, strided=False),
        )

    # Ops

    def sampler(self, with_bias: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        is_target = self.chance(0.2)
        dtype = self.dtype("target_dtype" if is_target else "dtype")
        logits = self.rows("logits", dtype, self.num_rows, self.vocab)
        idx_mapping = self.ints("idx_mapping", self.dtype("index_dtype"), self.num_rows)
        pos = self.ints("pos", self.dtype("pos_dtype"), self.num_rows)
        kwargs: dict[str, Any] = {
            "pos_offset": self.one_of(0, -1, 5, 16, 2**40),
            "is_drafting": self.chance(0.5),
            "apply_temperature": self.chance(0.5),
            "use_fp64": self.use_fp64(),
        }
        if with_bias and not is_target and self.chance(0.7):
            bias_dtype = self.dtype("dtype")
            first = self.one_of(self.num_rows, 1)
            bias = self.rows("bias", bias_dtype, first, self.vocab)
            kwargs["bias"] = bias[0] if first == 1 and self.chance(0.5) else bias
            dtype = torch.promote_types(dtype, bias_dtype)
        if not is_target and self.chance(0.6):
            columns = self.dice.randint(1, 4)
            kwargs["logits_cache"] = self.rows("cache", dtype, NUM_SLOTS, columns, self.vocab)
            kwargs["cache_col"] = self.one_of(0, 1, 16, 2**31 - 1)
            if self.warmed["cache_col_dtype"] and self.chance(0.5):
                kwargs["cache_col"] = self.column("cols", self.dtype("cache_col_dtype"))
        return (logits, idx_mapping, *self.state(), pos), kwargs

    def gumbel_block_argmax(self) -> None:
        args, kwargs = self.sampler(with_bias=False)
        dspark_ops.gumbel_block_argmax(*args, **kwargs)

    def gumbel_combine(self) -> None:
        blocks = self.dice.randint(1, 300)
        dtype = torch.float64 if self.use_fp64() else F32
        block_max = self.rows("block_max", dtype, self.num_rows, blocks)
        dspark_ops.gumbel_combine(block_max, self.rows("block_argmax", I64, self.num_rows, blocks))

    def draft_tokens(self) -> Tensor:
        return self.ints("draft_tokens", self.dtype("id_dtype"), self.num_rows)

    def gumbel_sample(self) -> None:
        args, kwargs = self.sampler(with_bias=True)
        if self.chance(0.6):
            kwargs["draft_tokens"] = self.draft_tokens()
        dspark_ops.gumbel_sample(*args, **kwargs)

    def gumbel_sample_embed(self) -> None:
        """As compiled code calls it."""
        args, kwargs = self.sampler(with_bias=True)
        name = "gumbel_sample_embed"
        cache = kwargs.pop("logits_cache", None)
        column = kwargs.pop("cache_col", None)
        written: tuple[Any, ...] = ()
        if cache is not None:
            name += "_cache"
            is_tensor = isinstance(column, Tensor)
            written = (cache, 0 if is_tensor else column, column if is_tensor else None)
        if self.chance(0.6):
            name += "_draft"
            written = (*written, self.draft_tokens())
        shape = (self.vocab, self.warmed["markov_rank"])
        weight = self.rows("weight", self.dtype("dtype"), *shape)
        getattr(torch.ops.dspark, name).default(*args, *written, weight, **kwargs)

    def rejection_sample(self) -> None:
        steps = self.dice.randint(0, self.warmed["num_steps"])
        drafts = [self.dice.randint(0, steps) for _ in range(self.num_rows)]
        num_logits = sum(drafts) + len(drafts)
        target = self.rows("target", self.dtype("target_dtype"), num_logits, self.vocab)
        draft = None
        if self.chance(0.6):
            sums = (
                torch.promote_types(self.dtype("dtype"), self.dtype("dtype")),
                self.dtype("dtype"),
            )
            shape = (NUM_SLOTS, max(steps, 1), self.vocab)
            draft = self.rows("draft", self.one_of(*sums), *shape)
        starts = self.ints("starts", I32, self.num_rows + 1)
        ends = [sum(drafts[:row]) + row for row in range(self.num_rows + 1)]
        starts.copy_(torch.tensor(ends, dtype=I32))
        dspark_ops.rejection_sample(
            target,
            draft,
            self.ints("ids", self.dtype("id_dtype"), num_logits),
            starts,
            self.ints("target_pos", self.dtype("pos_dtype"), num_logits),
            self.ints("idx_mapping", self.dtype("index_dtype"), self.num_rows),
            *self.state(),
            num_steps=steps,
            method=self.one_of("standard", "block"),
            use_fp64=self.use_fp64(),
        )

    def top_k_top_p(self) -> None:
        logits = self.rows("filtered", F32, self.num_rows, self.vocab)
        k = self.ints("k", I32, self.num_rows) if self.chance(0.6) else None
        p = self.ints("p", F32, self.num_rows) if self.chance(0.6) else None
        if self.chance(0.3):
            torch.ops.dspark.top_k_top_p.default(logits, k, p, -1e9)
        elif self.num_rows < 2 or logits.stride(0) >= self.vocab:
            dspark_ops.top_k_top_p_(logits, k, p, mask_value=self.one_of(-1e9, float("-inf")))

    def prepare_positions(self) -> None:
        is_padding = None
        num_tokens = None
        if self.chance(0.5):
            is_padding = self.ints("is_padding", torch.bool, self.dice.randint(0, 3000))
            num_tokens = self.one_of(None, 0, 1, 16, 17, 2**40)
        dspark_ops.prepare_positions(
            self.ints("idx_mapping", self.dtype("index_dtype"), self.num_rows),
            self.ints("query_starts", I32, self.num_rows + 1),
            self.ints("num_computed", I32, NUM_SLOTS),
            self.ints("positions", I64, self.dice.randint(0, 3000)),
            self.ints("seq_lens", I32, self.num_rows + self.dice.randint(0, 50)),
            is_padding=is_padding,
            num_tokens=num_tokens,
        )

    def prepare_dflash_inputs(self) -> None:
        steps = self.warmed["num_steps"]
        queries = steps if self.warmed["sample_from_anchor"] else steps + 1
        buffer_rows = self.num_rows + self.dice.randint(0, 20)
        num_tokens = buffer_rows * queries + self.dice.randint(0, 40)
        num_context, num_samples = self.dice.randint(0, 500), buffer_rows * steps
        columns = self.dice.randint(0, 9)
        strides = (self.dice.randint(0, 40), self.dice.randint(1, 3))
        table = self.view("table", I32, (self.num_rows, columns), strides, self.dice.randrange(9))

        def flat(name: str, dtype: torch.dtype, size: int) -> Tensor:
            return self.ints(f"dflash_{name}", dtype, size, strided=False)

        dspark_ops.prepare_dflash_inputs(
            idx_mapping=self.ints("idx_mapping", self.dtype("index_dtype"), self.num_rows),
            target_query_start_loc=flat("starts", I32, self.num_rows + 1),
            target_positions=flat("targets", I64, self.dice.randint(0, 500)),
            num_sampled=self.ints("num_sampled", I32, self.num_rows),
            num_rejected=self.ints("num_rejected", I32, self.num_rows),
            last_sampled=flat("last", I64, NUM_SLOTS),
            next_prefill_tokens=flat("next", self.dtype("id_dtype"), NUM_SLOTS),
            temperature=flat("temperature", F32, NUM_SLOTS),
            seeds=flat("seeds", I64, NUM_SLOTS),
            block_table=table,
            input_ids=flat("input_ids", I32, num_tokens),
            positions=flat("positions", I64, num_tokens),
            query_slot_mapping=flat("query_slots", I64, num_tokens),
            query_start_loc=flat("query_starts", I32, buffer_rows + 1),
            seq_lens=flat("seq_lens", I32, buffer_rows),
            context_positions=flat("context", I64, num_context),
            context_slot_mapping=flat("context_slots", I64, num_context),
            sample_indices=flat("sample_indices", I64, num_samples),
            sample_pos=flat("sample_pos", I64, num_samples),
            sample_idx_mapping=flat("sample_idx", I64, num_samples),
            out_temperature=flat("out_temperature", F32, NUM_SLOTS),
            out_seeds=flat("out_seeds", I64, NUM_SLOTS),
            is_padding=flat("is_padding", torch.bool, num_tokens) if self.chance(0.5) else None,
            max_target_query_len=self.one_of(0, 1, 16, 1000),
            mask_token_id=self.one_of(0, 1, 16, 151000),
            max_model_len=self.one_of(1, 16, 1000, 4096),
            block_size=self.warmed["block_size"],
            num_query_per_req=queries,
            num_steps=steps,
            sample_from_anchor=self.warmed["sample_from_anchor"],
            cp_rank=self.dice.randrange(self.warmed["cp_size"]),
            cp_size=self.warmed["cp_size"],
            cp_interleave=self.warmed["cp_interleave"],
        )
