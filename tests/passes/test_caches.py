"""The caches of Inductor and AOTAutograd: hit where nothing changed, never stale where it did.

Each case is compiled in two fresh processes that share a cache directory.
"""

import shutil
from pathlib import Path

import pytest

from .fresh_process import CHECKOUT, run_fresh

STEP = """
import sys, torch
import dspark_ops, inductor_passes
from torch._dynamo.utils import counters

def step(logits, bias, idx_mapping, temperature, seeds, pos, cache):
    block_max, block_argmax = dspark_ops.gumbel_block_argmax(
        logits + bias, idx_mapping, temperature, seeds, pos - 1, logits_cache=cache, cache_col=0
    )
    return block_argmax.gather(-1, block_max.argmax(-1, keepdim=True)).view(-1)

torch.manual_seed(0)
x = [
    torch.randn(2, 5), torch.randn(2, 5), torch.tensor([0, 1]), torch.ones(2), torch.arange(2),
    torch.tensor([4, 5]), torch.zeros(2, 1, 5),
]
expected = step(*x[:-1], torch.zeros(2, 1, 5))
got = torch.compile(step, backend="dspark", options=OPTIONS)(*x)
assert torch.equal(got, expected)
aot, fx = counters["aot_autograd"], counters["inductor"]
print(
    "aot", "hit" if aot["autograd_cache_hit"] else "miss",
    "fx", "hit" if fx["fxgraph_cache_hit"] else "miss",
    "fused", counters["dspark"]["sampler_fusion.fused"],
)
report = str(inductor_passes.report())
print("served from a cache" in report)
print(inductor_passes.options(OPTIONS)["post_grad_custom_pre_pass"].uuid())
"""
MISS = ["aot miss fx miss fused 1", "False"]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A copy of both, so that nothing but the test changes their sources."""
    copy = tmp_path / "packages"
    for package in ("dspark_ops", "inductor_passes"):
        shutil.copytree(CHECKOUT / package, copy / package)
    return copy


def run(packages: Path, options: str = "{}", step: str = STEP) -> tuple[list[str], str]:
    """What a fresh process does with the caches, and the uuid of its passes."""
    cache = packages.parent / "cache"
    *outcome, uuid = run_fresh(step.replace("OPTIONS", options), cache=cache, path=(packages,))
    return outcome, uuid


def test_second_process_is_served_from_the_cache(packages: Path) -> None:
    first, uuid = run(packages)
    assert first == MISS
    second, same_uuid = run(packages)
    assert second == ["aot hit fx hit fused 0", "True"]
    assert same_uuid == uuid


def test_graph_cache_alone(packages: Path) -> None:
    without_aot = STEP.replace("import sys, torch", "import torch, torch._functorch.config as c\n")
    without_aot = without_aot.replace(
        "\ndef step", "\nc.enable_autograd_cache = False\ndef step", 1
    )
    assert run(packages, step=without_aot)[0] == MISS
    assert run(packages, step=without_aot)[0] == ["aot miss fx hit fused 0", "True"]


def test_changed_option_or_source_misses(packages: Path) -> None:
    _, uuid = run(packages)
    outcome, of_option = run(packages, "{'dspark.numerics': 'lossless'}")
    assert outcome == MISS
    source = packages / "dspark_ops" / "rows.py"
    source.write_text(source.read_text() + "\n# changed\n")
    outcome, of_source = run(packages)
    assert outcome == MISS
    assert len({uuid, of_option, of_source}) == 3


def test_uuid_follows_sources_and_schemas(packages: Path) -> None:
    """Every source file; schema and tags of every op that is there when passes are imported."""

    def uuid(define: str = "") -> str:
        code = f"""
import torch, dspark_ops
from dspark_ops._library import LIBRARY
{define}
import inductor_passes
print(inductor_passes.options()["post_grad_custom_pre_pass"].uuid())
"""
        (printed,) = run_fresh(code, path=(packages,))
        return printed

    op = 'LIBRARY.define("another_op(Tensor x) -> Tensor"'
    uuids = [uuid(), uuid(op + ")"), uuid(op + ", tags=(torch.Tag.pt2_compliant_tag,))")]
    for changed in ("inductor_passes/storage.py", "dspark_ops/gumbel_sample.py"):
        source = packages / changed
        source.write_text(source.read_text() + "\n# changed\n")
        uuids.append(uuid())
    assert len(set(uuids)) == len(uuids)
