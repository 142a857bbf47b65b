"""The caches of Inductor and AOTAutograd: hit where nothing changed, never stale where it did.

Each case is compiled in two fresh processes that share a cache directory.
"""

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


def run(cache: Path, options: str = "{}", path: tuple[Path, ...] = (CHECKOUT,), step: str = STEP):
    """What a fresh process does with the caches, and the uuid of its passes."""
    *outcome, uuid = run_fresh(step.replace("OPTIONS", options), cache=cache, path=path)
    return outcome, uuid


def test_second_process_is_served_from_the_cache(tmp_path: Path) -> None:
    first, uuid = run(tmp_path)
    assert first == MISS
    second, same_uuid = run(tmp_path)
    assert second == ["aot hit fx hit fused 0", "True"]
    assert same_uuid == uuid


def test_graph_cache_alone(tmp_path: Path) -> None:
    without_aot = STEP.replace("import sys, torch", "import torch, torch._functorch.config as c\n")
    without_aot = without_aot.replace(
        "\ndef step", "\nc.enable_autograd_cache = False\ndef step", 1
    )
    assert run(tmp_path, step=without_aot)[0] == MISS
    assert run(tmp_path, step=without_aot)[0] == ["aot miss fx hit fused 0", "True"]


def test_changed_option_misses(tmp_path: Path) -> None:
    _, uuid = run(tmp_path)
    outcome, other_uuid = run(tmp_path, "{'dspark.numerics': 'lossless'}")
    assert outcome == MISS
    assert other_uuid != uuid
    assert run(tmp_path, "{'dspark.sampler_fusion': False}")[0] == [
        "aot miss fx miss fused 0",
        "False",
    ]


@pytest.mark.parametrize(
    "changed", ["inductor_passes/storage.py", "dspark_ops/gumbel_sample.py", "dspark_ops/rows.py"]
)
def test_changed_source_misses(tmp_path: Path, changed: str) -> None:
    import shutil

    copy = tmp_path / "copy"
    for package in ("dspark_ops", "inductor_passes"):
        shutil.copytree(CHECKOUT / package, copy / package)
    _, uuid = run(tmp_path / "cache", path=(copy,))
    source = copy / changed
    source.write_text(source.read_text() + "\n# changed\n")
    outcome, other_uuid = run(tmp_path / "cache", path=(copy,))
    assert outcome == MISS
    assert other_uuid != uuid


def test_uuid_follows_the_schemas_and_tags() -> None:
    """Of every op that is there when the passes are imported."""

    def uuid(define: str) -> str:
        code = f"""
import torch, dspark_ops
from dspark_ops._library import LIBRARY
{define}
import inductor_passes
print(inductor_passes.options()["post_grad_custom_pre_pass"].uuid())
"""
        (printed,) = run_fresh(code)
        return printed

    op = 'LIBRARY.define("another_op(Tensor x) -> Tensor"'
    uuids = [
        uuid(""),
        uuid(op + ")"),
        uuid(op.replace("x)", "(a!) x)") + ")"),
        uuid(op + ", tags=(torch.Tag.pt2_compliant_tag,))"),
    ]
    assert len(set(uuids)) == len(uuids)
    assert uuid("") == uuids[0]
