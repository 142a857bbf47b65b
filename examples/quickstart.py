"""The main job in one page: a trained draft model, compiled with ``backend="dspark"``.

    python examples/quickstart.py

Continues two prompts, one greedy and one sampled, by draft -> verify -> accept. Then it shows what
the compiler did to one step and holds the compiled step against the eager one: from the sampler's
inputs (base logits and bias) on, ids and cached logits have to be equal bit for bit. Exits with 1
if they are not.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dspark_ops
import inductor_passes
from draft_model import load_pair
from draft_step import DraftStep
from generate import Generation, generate

PROMPTS = ('The "for" statement is used to', "A class definition")
TEMPERATURES = (0.0, 1.0)
NEW_TOKENS = 48


class RecordedStep(nn.Module):
    """The draft step, and beside its tokens what each of its samplers was given."""

    def __init__(self, step: DraftStep) -> None:
        super().__init__()
        self.step = step

    def forward(
        self,
        anchor: Tensor,
        context_hidden: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        pos: Tensor,
        logits_cache: Tensor,
        draft_tokens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """draft_tokens i64 [B, N], base logits [B, N, V], biases [B, N, V]."""
        base = self.step.draft.backbone(anchor[:, None], pos[:, :1] - 1, context_hidden)[:, 0]
        biases: list[Tensor] = []
        state = (idx_mapping, temperature, seeds, pos, logits_cache, draft_tokens)
        self.step.markov_loop(base, anchor, *state, biases=biases)
        return draft_tokens, base, torch.stack(biases, dim=1)


class Sampled:
    """A draft step for `generate` that keeps every call's sampler inputs and results."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step = step
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(self, *arguments: Tensor) -> Tensor:
        tokens, base, biases = self.step(*arguments)
        _, _, idx_mapping, temperature, seeds, pos, logits_cache, _ = arguments
        call = (base, biases, idx_mapping, temperature, seeds, pos, logits_cache, tokens)
        self.calls.append(tuple(x.clone() for x in call))
        return tokens


def differences(calls: Sequence[tuple[Tensor, ...]]) -> tuple[int, int, int, int]:
    """(ids, ids that differ, cached logits, cached logits whose bits differ) against eager."""
    ids = wrong_ids = logits = wrong_logits = 0
    for base, biases, idx_mapping, temperature, seeds, pos, logits_cache, tokens in calls:
        cache = torch.zeros_like(logits_cache)
        for i in range(base.shape[1]):
            block_max, block_argmax = dspark_ops.gumbel_block_argmax(
                base[:, i] + biases[:, i],
                idx_mapping[:, i],
                temperature,
                seeds,
                pos[:, i] - 1,
                logits_cache=cache,
                cache_col=i,
                is_drafting=True,
            )
            best = block_max.argmax(-1, keepdim=True)
            token = block_argmax.gather(-1, best).view(-1)
            wrong_ids += int((token != tokens[:, i]).sum())
        width = torch.int16 if cache.element_size() == 2 else torch.int32
        wrong_logits += int((cache.view(width) != logits_cache.view(width)).sum())
        ids += tokens.numel()
        logits += cache.numel()
    return ids, wrong_ids, logits, wrong_logits


def short(node: torch.fx.Node) -> str:
    """A node as a call of its op on the nodes that it reads."""
    op = node.args[0] if "auto_functionalized" in str(node.target) else node.target
    name = str(getattr(op, "__name__", op) if callable(op) and not hasattr(op, "_schema") else op)
    reads = ", ".join(x.name for x in node.all_input_nodes)
    return f"{node.name} = {name.removesuffix('.default')}({reads})"


def print_graphs(step: DraftStep, arguments: tuple[Tensor, ...]) -> None:
    """Compile a loop of one step and print its graph around the passes."""

    def one_step(base: Tensor, *rest: Tensor) -> Tensor:
        return step.markov_loop(base, *rest)

    ours = inductor_passes.options()["post_grad_custom_pre_pass"]

    def show(graph: torch.fx.Graph) -> None:
        for title, run in (("before", lambda _: None), ("after", ours)):
            run(graph)
            print(f"\nthe sampler's graph {title}:")
            for node in graph.nodes:
                if node.op == "call_function":
                    print(f"    {short(node)}")

    options = {"post_grad_custom_pre_pass": show}
    torch.compile(one_step, fullgraph=True, options=options)(*arguments)


def print_gpu_times(step: DraftStep, arguments: tuple[Tensor, ...]) -> None:
    """Kernels and time of one loop: eager, stock Inductor, and this package."""
    sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
    from timing import kernels, replay_us

    cache, steps = arguments[6], arguments[0].shape[1]
    loops = {
        "eager, unfused": step.markov_loop,
        "stock Inductor": torch.compile(step.markov_loop, fullgraph=True),
        "backend='dspark'": torch.compile(step.markov_loop, fullgraph=True, backend="dspark"),
    }
    results, times = {}, {}
    for name, loop in loops.items():
        loop(*arguments)
        results[name] = cache.clone()
        times[name] = replay_us(lambda loop=loop: loop(*arguments))  # type: ignore[misc]
    print(f"\none loop of {steps} steps on {torch.cuda.get_device_name()}, CUDA-graph replay:")
    for name, loop in loops.items():
        count = len(kernels(lambda loop=loop: loop(*arguments)))  # type: ignore[misc]
        print(f"    {name:17s} {times[name]:7.1f} us, {count / steps:.1f} kernels a step")
    changed = (results["stock Inductor"][:, 0] != results["eager, unfused"][:, 0]).float().mean()
    print(
        f"    logits of the first step that stock Inductor's addmm rounds otherwise: {changed:.2%}"
    )


def print_text(result: Generation) -> None:
    for prompt, temperature, text in zip(PROMPTS, TEMPERATURES, result.texts, strict=True):
        print(f"\n[temperature {temperature}] {prompt}{text}")
    accepted = [count for row in result.accepted for count in row]
    print(
        f"\naccepted length: {sum(accepted) / len(accepted):.2f} drafted tokens a round, "
        f"{len(accepted)} rounds"
    )


@torch.no_grad()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair = load_pair(Path(__file__).parent / "pair", device, torch.bfloat16)
    step = DraftStep(pair.draft)
    print("compiling the draft step with backend='dspark' ...", flush=True)
    sampled = Sampled(torch.compile(RecordedStep(step), backend="dspark", fullgraph=True))
    print_text(generate(pair, PROMPTS, NEW_TOKENS, TEMPERATURES, sampled))

    ids, wrong_ids, logits, wrong_logits = differences(sampled.calls)
    # What follows writes into these tensors.
    base, _, idx_mapping, temperature, seeds, pos, logits_cache, tokens = sampled.calls[0]
    anchor = torch.zeros(len(base), dtype=torch.int64, device=device)
    loop = (base, anchor, idx_mapping, temperature, seeds, pos, logits_cache, tokens)
    print_graphs(step, (base[:, :1], *loop[1:]))
    print("\nexplain(markov_loop):")
    report = inductor_passes.explain(step.markov_loop, *loop)
    if device == "cuda":
        print_gpu_times(step, loop)

    print(f"\ncompiled against eager: {ids} ids, {wrong_ids} differ; ", end="")
    print(f"{logits} cached logits, {wrong_logits} differ")
    fused = sum(site.fused for site in report.sites if site.pass_name == "sampler_fusion")
    if wrong_ids or wrong_logits or fused != base.shape[1]:
        print(f"NOT EQUAL, or {base.shape[1] - fused} of {base.shape[1]} samplers not fused")
        sys.exit(1)
    print("ids equal, cache bits equal")


if __name__ == "__main__":
    main()
