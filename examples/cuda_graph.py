"""The draft step of a serving engine as one CUDA graph: inputs, backbone and Markov loop.

    python examples/cuda_graph.py

Serves five prompts in four rows, which join and finish on their own, by draft -> verify -> accept.
The step (serving_step.py) is compiled with ``backend="dspark"`` and captured once, by
`torch.cuda.graph` and by ``mode="reduce-overhead"``, and serves every batch. Each round's step is
held against the eager one from the same state: from the samplers' inputs (base logits and biases)
on, ids and cached logits have to be equal bit for bit, and what lies beyond the batch unchanged or
freshly padded. Exits with 1 if they are not. Without a GPU the compiled step runs without a graph.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import inductor_passes
from draft_model import load_pair
from quickstart import differences
from serving_engine import Engine, Request
from serving_step import (
    BOOL,
    ROWS,
    ServingStep,
)

Step = Callable[[], tuple[Tensor, list[Tensor]]]

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
