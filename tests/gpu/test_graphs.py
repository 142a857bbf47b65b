"""Every op in a CUDA graph: recorded once for 8 rows, replayed with bigger and smaller batches.

Between replays all inputs are overwritten in place, as a server does, and outputs are poisoned.
What a replay leaves in *every* byte of every buffer is compared: for the samplers with the unfused
op on the live rows alone, for the others with the CPU implementation. So rows, slots and tokens
beyond the batch are seen to be unchanged, or freshly padded where the op's contract says so.
"""

import os
import subprocess
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_trees

import dspark_ops
import inductor_passes  # noqa: F401  registers the backend

from .cases import make_bias, make_cache, make_inputs, same_bits, unfused
from .test_capture import capture

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BF16 = torch.bfloat16
VOCAB, ROWS, STEPS = 1025, 8, 4
BATCHES = (5, 8, 2, 1, 7)  # a bigger one, a smaller one, one request, a bigger one again
POISON = {torch.bool: True, torch.bfloat16: 7.0, torch.float32: 7.0}

Results = dict[str, Tensor]


class Case(ABC):
    """An op on buffers of its own: ``fill`` them for a batch, ``run`` it, know what is right."""

    mutated: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.fill(ROWS, 0)

    @abstractmethod
    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        """Fresh contents of every input for ``rows`` live rows."""

    @abstractmethod
    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Call the op; what it returns."""

    @abstractmethod
    def wanted(self, rows: int) -> tuple[tuple[Tensor, ...], Results]:
        """Returns, and mutated buffers, of the batch that was filled in; from fresh poison."""

    def fill(self, rows: int, seed: int) -> None:
        for name, value in self.batch(rows, seed).items():
            if name in self.buffers:
                self.buffers[name].copy_(value)
            else:
                self.buffers[name] = value
        self.poison()

    def poison(self) -> None:
        for name in self.mutated:
            x = self.buffers[name]
            x.fill_(POISON.get(x.dtype, -9))

    def poisoned(self) -> dict[str, Tensor]:
        """The buffers, with copies of the mutated ones."""
        self.poison()
        return {n: x.clone() if n in self.mutated else x for n, x in self.buffers.items()}

    def check(self, rows: int, returned: tuple[Tensor, ...]) -> None:
        returned = tuple(x.clone() for x in returned)
        left = {name: self.buffers[name].clone() for name in self.mutated}
        wanted_returns, wanted_buffers = self.wanted(rows)
        for index, (x, y) in enumerate(zip(returned, wanted_returns, strict=True)):
            assert same_bits(x, y), (index, rows)
        for name in self.mutated:
            assert same_bits(left[name], wanted_buffers[name]), (name, rows)


class Sampler(Case):
    """gumbel_sample in each of its variants."""

    def __init__(self, embed: bool, cache: bool, draft: bool, use_fp64: bool = False) -> None:
        self.embed, self.cache, self.draft, self.use_fp64 = embed, cache, draft, use_fp64
        self.mutated = ("cache",) * cache + ("tokens",) * draft
        parts = ("_embed",) * embed + ("_cache",) * cache + ("_draft",) * draft
        self.op = getattr(torch.ops.dspark, "gumbel_sample" + "".join(parts)).default
        super().__init__()

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        inputs = make_inputs(ROWS, VOCAB, BF16, seed=seed, first_kind=seed)
        inputs.idx_mapping[rows:] = -1
        generator = torch.Generator("cuda").manual_seed(seed)
        return {
            "logits": inputs.logits,
            "idx_mapping": inputs.idx_mapping,
            "temperature": inputs.temperature,
            "seeds": inputs.seeds,
            "pos": inputs.pos,
            "bias": make_bias(ROWS, VOCAB, BF16, seed=seed),
            "weight": torch.randn(VOCAB, 24, device="cuda", generator=generator).to(BF16),
            "col": torch.tensor(seed % 3, device="cuda"),  # 2 is beyond the cache
            "cache": make_cache(ROWS + 1, VOCAB, BF16),
            "tokens": torch.full((ROWS + 2, 3), -9, dtype=torch.int32, device="cuda"),
        }

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        arguments: list[Any] = [
            buffers[name] for name in ("logits", "idx_mapping", "temperature", "seeds", "pos")
        ]
        if self.cache:
            arguments += [buffers["cache"], 0, buffers["col"]]
        if self.draft:
            arguments.append(buffers["tokens"][:ROWS, 1])
        if self.embed:
            arguments.append(buffers["weight"])
        out = self.op(*arguments, buffers["bias"], 3, True, True, self.use_fp64)
        return out if isinstance(out, tuple) else (out,)

    def wanted(self, rows: int) -> tuple[tuple[Tensor, ...], Results]:
        buffers = self.poisoned()
        total = buffers["logits"] + buffers["bias"]
        token = total.argmax(-1)
        live = make_inputs(1, VOCAB, BF16)
        live.logits, live.idx_mapping = total[:rows], buffers["idx_mapping"][:rows]
        live.pos, live.temperature = buffers["pos"][:rows], buffers["temperature"]
        live.seeds = buffers["seeds"]
        kwargs: dict[str, Any] = {}
        if self.cache:
            kwargs = {"logits_cache": buffers["cache"], "cache_col": buffers["col"]}
        flags = {"pos_offset": 3, "is_drafting": True, "use_fp64": self.use_fp64}
        token[:rows] = unfused(live, **kwargs, **flags)
        if self.draft:
            buffers["tokens"][:ROWS, 1] = token
        embedding = (buffers["weight"][token],) if self.embed else ()
        return (token, *embedding), buffers


class Blocks(Sampler):
    """gumbel_block_argmax, then gumbel_combine on what it returned."""

    def __init__(self) -> None:
        super().__init__(embed=False, cache=True, draft=False)

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        rows = [buffers[name] for name in ("idx_mapping", "temperature", "seeds", "pos")]
        blocks = dspark_ops.gumbel_block_argmax(
            buffers["logits"],
            *rows,
            logits_cache=buffers["cache"],
            cache_col=buffers["col"],
            pos_offset=3,
            is_drafting=True,
        )
        return (dspark_ops.gumbel_combine(*blocks),)

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        batch = super().batch(rows, seed)
        batch["bias"].zero_()
        # x + 0 is x but for -0.0, which the sum loses.
        batch["logits"] += batch["bias"]
        return batch


class Prepared(Case):
    """An op of integers: equal to its CPU implementation in every byte."""

    def wanted(self, rows: int) -> tuple[tuple[Tensor, ...], Results]:
        buffers = {name: x.cpu() for name, x in self.poisoned().items()}
        self.run(buffers)
        return (), {name: x.cuda() for name, x in buffers.items()}


class Positions(Prepared):
    """prepare_positions. A batch of fewer requests ends early; spans are prefills and decodes."""

    tokens = 96

    def __init__(self, padding: bool) -> None:
        self.padding = padding
        self.mutated = ("positions", "seq_lens") + ("is_padding",) * padding
        super().__init__()

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        spans = torch.randint(1, 11, (ROWS,), device="cuda", generator=generator)
        spans[rows:] = 0
        idx_mapping = torch.randperm(ROWS + 3, device="cuda", generator=generator)[:ROWS].int()
        idx_mapping[rows:] = -1
        return {
            "idx_mapping": idx_mapping,
            "query_start_loc": torch.nn.functional.pad(spans.cumsum(0), (1, 0)).int(),
            "num_computed_tokens": torch.randint(
                0, 900, (ROWS + 3,), device="cuda", generator=generator, dtype=torch.int32
            ),
            "positions": torch.zeros(self.tokens, dtype=torch.int64, device="cuda"),
            "seq_lens": torch.zeros(ROWS + 2, dtype=torch.int32, device="cuda"),
            "is_padding": torch.zeros(self.tokens, dtype=torch.bool, device="cuda"),
        }

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        arguments = dict(buffers)
        if not self.padding:
            arguments.pop("is_padding")
        dspark_ops.prepare_positions(**arguments)
        return ()


class DflashInputs(Prepared):
    """prepare_dflash_inputs: fewer live rows, rejected tokens, a table that ends too early."""

    def __init__(self, padding: bool, from_anchor: bool) -> None:
        self.padding, self.from_anchor = padding, from_anchor
        self.queries = STEPS if from_anchor else STEPS + 1
        self.mutated = (
            *("input_ids", "positions", "query_slot_mapping", "query_start_loc", "seq_lens"),
            *("context_positions", "context_slot_mapping", "sample_indices", "sample_pos"),
            *("sample_idx_mapping", "out_temperature", "out_seeds"),
            *("is_padding",) * padding,
        )
        super().__init__()

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        slots, span, capacity = ROWS + 3, 9, ROWS + 2

        def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.randint(low, high, shape, device="cuda", generator=generator, dtype=dtype)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, device="cuda", dtype=dtype)

        spans = ints(1, span, ROWS)
        spans[rows:] = 0
        start = torch.nn.functional.pad(spans.cumsum(0), (1, 0)).int()
        row = torch.arange(ROWS, device="cuda").repeat_interleave(spans)
        target_positions = zeros(ROWS * span, dtype=torch.int64)
        first = ints(0, 60, ROWS, dtype=torch.int64)
        token = torch.arange(len(row), device="cuda")
        target_positions[: len(row)] = first[row] + token - start[row]
        idx_mapping = torch.randperm(slots, device="cuda", generator=generator)[:ROWS].int()
        idx_mapping[rows:] = -1
        rejected = (torch.rand(ROWS, device="cuda", generator=generator) * spans).int()
        queries = capacity * self.queries + 5
        samples = capacity * STEPS
        return {
            "target_positions": target_positions,
            "target_query_start_loc": start,
            "idx_mapping": idx_mapping,
            "last_sampled": ints(0, 5000, slots, dtype=torch.int64),
            "next_prefill_tokens": ints(0, 5000, slots),
            "num_sampled": ints(0, 2, ROWS),
            "num_rejected": rejected.clamp(max=8),
            "temperature": torch.rand(slots, device="cuda", generator=generator),
            "seeds": ints(-9999, 9999, slots, dtype=torch.int64),
            "block_table": ints(0, 40, ROWS, 8),
            "input_ids": zeros(queries, dtype=torch.int32),
            "positions": zeros(queries, dtype=torch.int64),
            "is_padding": zeros(queries, dtype=torch.bool),
            "query_slot_mapping": zeros(queries, dtype=torch.int64),
            "query_start_loc": zeros(capacity + 1, dtype=torch.int32),
            "seq_lens": zeros(capacity, dtype=torch.int32),
            "context_positions": zeros(ROWS * span + 7, dtype=torch.int64),
            "context_slot_mapping": zeros(ROWS * span + 7, dtype=torch.int64),
            "sample_indices": zeros(samples, dtype=torch.int64),
            "sample_pos": zeros(samples, dtype=torch.int64),
            "sample_idx_mapping": zeros(samples, dtype=torch.int64),
            "out_temperature": zeros(slots, dtype=torch.float32),
            "out_seeds": zeros(slots, dtype=torch.int64),
        }

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        arguments: dict[str, Any] = dict(buffers)
        if not self.padding:
            arguments["is_padding"] = None
        dspark_ops.prepare_dflash_inputs(
            **arguments,
            max_target_query_len=9,
            mask_token_id=4095,
            block_size=8,
            num_query_per_req=self.queries,
            num_steps=STEPS,
            max_model_len=61,
            sample_from_anchor=self.from_anchor,
        )
        return ()


class Verification(Case):
    """rejection_sample: ragged drafts; a batch of fewer requests leaves rows without logits."""

    def __init__(self, method: str) -> None:
        self.method = method
        super().__init__()

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        slots, num_logits = ROWS + 3, ROWS * (STEPS + 1)

        def ints(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, device="cuda", generator=generator)

        counts = ints(STEPS + 1, ROWS) + 1
        counts[rows:] = 0
        idx_mapping = torch.randperm(slots, device="cuda", generator=generator)[:ROWS]
        idx_mapping[rows:] = -1
        logits = torch.randn(num_logits, VOCAB, device="cuda", generator=generator)
        temperature = torch.rand(slots, device="cuda", generator=generator) + 0.5
        temperature[::4] = 0.0
        cache = torch.randn(slots, STEPS, VOCAB + 3, device="cuda", generator=generator)
        return {
            "target_logits": logits,
            "draft_logits": cache.to(BF16),
            "draft_token_ids": ints(VOCAB, num_logits),
            "cu_num_logits": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            "pos": ints(99, num_logits),
            "idx_mapping": idx_mapping,
            "temperature": temperature,
            "seeds": ints(2**40, slots),
        }

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return dspark_ops.rejection_sample(**buffers, num_steps=STEPS, method=self.method)

    def wanted(self, rows: int) -> tuple[tuple[Tensor, ...], Results]:
        live = dict(self.buffers)
        live["idx_mapping"] = live["idx_mapping"][:rows].clone()
        live["cu_num_logits"] = live["cu_num_logits"][: rows + 1].clone()
        pads = (-1, 0, 0)
        wanted = []
        for x, pad in zip(self.run(live), pads, strict=True):
            rest = x.new_full((ROWS - rows, *x.shape[1:]), pad)
            wanted.append(torch.cat((x, rest)))
        return tuple(wanted), {}


class Filter(Case):
    """top_k_top_p_ on a copy of the logits, in a buffer with rows to spare; rows past the batch
    have no filter."""

    mutated = ("filtered",)

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        logits = make_inputs(ROWS, VOCAB, torch.float32, seed=seed, first_kind=seed).logits
        k = torch.randint(-1, 60, (ROWS,), device="cuda", generator=generator, dtype=torch.int32)
        p = torch.rand(ROWS, device="cuda", generator=generator) * 1.2
        k[rows:], p[rows:] = 0, 1.0
        return {
            "logits": logits,
            "k": k,
            "p": p,
            "filtered": torch.zeros(ROWS + 2, VOCAB + 3, device="cuda"),
        }

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        view = buffers["filtered"][:ROWS, :VOCAB]
        view.copy_(buffers["logits"])
        dspark_ops.top_k_top_p_(view, buffers["k"], buffers["p"])
        return ()

    def wanted(self, rows: int) -> tuple[tuple[Tensor, ...], Results]:
        buffers = {name: x.cpu() for name, x in self.poisoned().items()}
        self.run(buffers)
        filtered = buffers["filtered"].cuda()
        assert same_bits(filtered[rows:ROWS, :VOCAB], self.buffers["logits"][rows:])
        return (), {"filtered": filtered}


class FilterOfLogits(Filter):
    """top_k_top_p, which leaves its input as it is."""

    mutated = ()

    def run(self, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
        arguments = (buffers["logits"], buffers["k"], buffers["p"], -1e4)
        return (torch.ops.dspark.top_k_top_p(*arguments),)

    def wanted(self, rows: int) -> tuple[tuple[Tensor, ...], Results]:
        buffers = {name: x.cpu() for name, x in self.buffers.items()}
        return tuple(x.cuda() for x in self.run(buffers)), {}


CASES: dict[str, Callable[[], Case]] = {
    **{
        "gumbel_sample" + "_embed" * embed + "_cache" * cache + "_draft" * draft: (
            lambda e=bool(embed), c=bool(cache), d=bool(draft): Sampler(e, c, d)
        )
        for embed in (0, 1)
        for cache in (0, 1)
        for draft in (0, 1)
    },
    "gumbel_sample_fp64": lambda: Sampler(True, True, True, use_fp64=True),
    "gumbel_block_argmax_and_combine": Blocks,
    "prepare_positions": lambda: Positions(padding=False),
    "prepare_positions_padding": lambda: Positions(padding=True),
    "prepare_dflash_inputs": lambda: DflashInputs(padding=False, from_anchor=True),
    "prepare_dflash_inputs_padding": lambda: DflashInputs(padding=True, from_anchor=False),
    "rejection_sample": lambda: Verification("standard"),
    "rejection_sample_block": lambda: Verification("block"),
    "top_k_top_p_": Filter,
    "top_k_top_p": FilterOfLogits,
}


def test_every_op_has_a_case() -> None:
    names = {n.removeprefix("dspark::") for n in torch._C._dispatch_get_all_op_names()
             if n.startswith("dspark::")}  # fmt: skip
    covered = {*CASES, "gumbel_block_argmax", "gumbel_block_argmax_cache", "gumbel_combine"}
    assert names <= covered, names - covered


@pytest.mark.parametrize("name", CASES)
def test_replayed_with_other_batches(name: str) -> None:
    case = CASES[name]()
    graph, out = capture(lambda: case.run(case.buffers))
    for seed, rows in enumerate(BATCHES):
        case.fill(rows, seed + 1)
        graph.replay()
        case.check(rows, out)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # A cached graph of marked buffers is served, and not skipped, for buffers that are not.
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def static(case: Case) -> None:
    """What a user does who owns the buffers: torch skips graphs that write into other inputs."""
    for name in case.mutated:
        torch._dynamo.mark_static_address(case.buffers[name])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", CASES)
def test_reduce_overhead_with_other_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    static(case)
    recorded = count_recordings(monkeypatch)
    step = torch.compile(case.run, fullgraph=True, backend="dspark", mode="reduce-overhead")
    for seed, rows in enumerate((*BATCHES, *BATCHES)):
        case.fill(rows, seed + 1)
        torch.compiler.cudagraph_mark_step_begin()
        case.check(rows, step(case.buffers))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert len(recorded) == 1


def count_recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    recorded: list[Any] = []
    record = cudagraph_trees.CUDAGraphNode._record

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append(self)
        return record(self, *args, **kwargs)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "_record", recording)
    return recorded


@pytest.mark.usefixtures("fresh_compiler")
def test_unmarked_buffers_are_the_reason_for_a_skip() -> None:
    """The counter that the tests above hold at 0 is seen to move."""
    case = CASES["prepare_positions"]()
    step = torch.compile(case.run, fullgraph=True, backend="dspark", mode="reduce-overhead")
    for seed in range(3):
        case.fill(ROWS, seed)
        torch.compiler.cudagraph_mark_step_begin()
        case.check(ROWS, step(case.buffers))
    assert counters["inductor"]["cudagraph_skips"] > 0


@pytest.mark.usefixtures("fresh_compiler")
def test_b3_13_a_graph_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 1..64 padded to three sizes: three recordings, no memory in a second sweep."""
    recorded = count_recordings(monkeypatch)
    buckets = (4, 16, 64)
    inputs = make_inputs(64, VOCAB, BF16)
    cache = make_cache(65, VOCAB, BF16)
    torch._dynamo.mark_static_address(cache)

    def sample(logits: Tensor, idx_mapping: Tensor, pos: Tensor, cache: Tensor) -> Tensor:
        return dspark_ops.gumbel_sample(
            *(logits, idx_mapping, inputs.temperature, inputs.seeds, pos),
            logits_cache=cache,
            cache_col=1,
        )

    step = torch.compile(sample, fullgraph=True, backend="dspark", mode="reduce-overhead",
                         dynamic=False)  # fmt: skip
    views = {n: tuple(x[:n] for x in (inputs.logits, inputs.idx_mapping, inputs.pos))
             for n in buckets}  # fmt: skip
    reserved = []
    for _ in range(2):
        for rows in (*range(1, 65), *range(64, 0, -1)):
            bucket = next(n for n in buckets if n >= rows)
            inputs.idx_mapping.copy_(torch.arange(64))
            inputs.idx_mapping[rows:] = -1
            torch.compiler.cudagraph_mark_step_begin()
            token = step(*views[bucket], cache)
            assert token.shape == (bucket,)
        reserved.append(torch.cuda.memory_reserved())
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert len(recorded) == len(buckets)
    assert reserved[0] == reserved[1]


FIRST_CALL = """
    import sys
    import torch
    from tests.gpu.test_graphs import CASES, BATCHES
    case = CASES[sys.argv[1]]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(case.buffers)
    for seed, rows in enumerate(BATCHES):
        case.fill(rows, seed + 1)
        graph.replay()
        case.check(rows, out)
"""


@pytest.mark.parametrize(
    "name",
    [
        "gumbel_sample_embed_cache_draft",
        "gumbel_block_argmax_and_combine",
        "prepare_positions_padding",
        "prepare_dflash_inputs_padding",
        "rejection_sample_block",
        "top_k_top_p_",
    ],
)
def test_b3_14_first_call_under_capture(name: str, tmp_path: Path) -> None:
    """A fresh process, nothing compiled or loaded yet: the kernel is compiled while capturing."""
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIRST_CALL), name],
        cwd=root, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
