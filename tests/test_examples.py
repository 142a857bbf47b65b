"""The shipped pair is good, also when it is served; its layout is the published one, its script
trains from nothing."""

import dataclasses
import importlib
import json
import lzma
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads spin while they wait: where processes share the cores, small ops take ten times as
    long in two threads as in one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_the_draft_is_good_and_its_bias_matters() -> None:
    pair = example("draft_model").load_pair(EXAMPLES / "pair")
    results = example("evaluate_pair").evaluate(pair, rounds=256)
    draft, without_bias, bigram = (result.accepted for result in results.values())
    assert draft >= 1.5 * bigram
    assert draft + 1 >= 1.5 * (bigram + 1)
    assert without_bias < draft


def test_the_checkpoint_has_the_published_layout() -> None:
    config = json.loads((EXAMPLES / "pair/draft/config.json").read_text())
    for key in (
        "block_size",
        "markov_rank",
        "markov_head_type",
        "draft_vocab_size",
        "mask_token_id",
        "sample_from_anchor",
    ):
        assert key in config
    assert config["draft_vocab_size"] > 1024
    files = [path for path in (EXAMPLES / "pair").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000


def test_a_changed_corpus_is_refused(tmp_path: Path) -> None:
    record = json.loads((EXAMPLES / "pair/corpus.json").read_text())
    data = lzma.decompress((EXAMPLES / "pair" / record["file"]).read_bytes())
    (tmp_path / record["file"]).write_bytes(lzma.compress(data.replace(b"the", b"thy", 1)))
    (tmp_path / "corpus.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=record["sha256"]):
        example("corpus").read_corpus(tmp_path)


def test_training_from_nothing_writes_a_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "train_pair.py", "--quick", "--threads", "1", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=EXAMPLES, capture_output=True, timeout=600)
    pair = example("draft_model").load_pair(tmp_path)
    assert pair.draft.markov_w1.shape[0] == 4096


def test_verification_keeps_the_targets_distribution() -> None:
    verify = example("verify")
    torch.manual_seed(0)
    rows, steps, vocab = 40_000, 2, 5
    target_logits = torch.randn(1, steps + 1, vocab).expand(rows, -1, -1)
    draft_logits = torch.randn(1, steps, vocab).expand(rows, -1, -1)
    temperature = torch.full((rows,), 0.8)
    q = verify.distribution(draft_logits, temperature)
    tokens = torch.multinomial(q.flatten(0, 1), 1).view(rows, steps)
    verdict = verify.verify(target_logits, draft_logits, tokens, temperature)
    expected = verify.distribution(target_logits[:1], temperature[:1])[0, 0] * rows
    counts = torch.bincount(verdict.tokens[:, 0], minlength=vocab)
    # chi-square, 4 degrees of freedom: 1e-6 of false alarms.
    assert float(((counts - expected) ** 2 / expected).sum()) < 33.4
    greedy = verify.verify(target_logits[:4], draft_logits[:4], tokens[:4], torch.zeros(4))
    best = target_logits[0].argmax(-1)
    for row in range(4):
        count = 0
        while count < steps and tokens[row, count] == best[count]:
            count += 1
        assert int(greedy.num_accepted[row]) == count
        assert greedy.tokens[row].tolist() == [*best[: count + 1].tolist(), *[-1] * (steps - count)]


@pytest.mark.usefixtures("one_thread")
def test_the_whole_step_serves_every_batch(capsys: pytest.CaptureFixture[str]) -> None:
    example("cuda_graph").main()
    printed = capsys.readouterr().out.splitlines()
    live_rows = printed[1].split()
    assert {"1", "2", "3", "4"} == set(live_rows)
    assert printed[-1] == "ids equal, cache bits equal, nothing written beyond the batch"


@pytest.mark.usefixtures("one_thread")
def test_serving_drafts_as_well_as_generating() -> None:
    """Greedy: the same text, and in every round as many accepted tokens, from the paged pool."""
    cuda_graph, generate = example("cuda_graph"), example("generate").generate
    pair = example("draft_model").load_pair(EXAMPLES / "pair")
    requests = [dataclasses.replace(x, temperature=0.0) for x in cuda_graph.REQUESTS]
    step = example("serving_step").ServingStep(pair.draft)
    engine = example("serving_engine").Engine(pair, step, requests)
    engine.serve(step.prepare_target, step)
    draft_step = example("draft_step").DraftStep(pair.draft)
    for x in engine.all:
        alone = generate(pair, [x.request.prompt], x.request.new_tokens, 0.0, draft_step)
        assert (x.text, x.accepted) == (alone.texts[0], alone.accepted[0])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("buffer", "index"),
    [
        ("logits_cache", (5, 0, 0)),
        ("logits_cache", (0, 0, 0)),
        ("draft_tokens", (0, 6)),
        ("draft_tokens", (3, 0)),
        ("sample_idx_mapping", (7,)),
        ("is_padding", (7,)),
        ("out_seeds", (0,)),
        ("seeds", (5,)),
        ("pool_1", (0, 0, 0, 0)),
        ("pool_0", slice(None)),
    ],
)
def test_the_comparison_notices(buffer: str, index: tuple[int, ...] | slice) -> None:
    """One row is live, of slot 5. An emptied pool shows in the backbone's logits alone."""
    cuda_graph = example("cuda_graph")
    pair = example("draft_model").load_pair(EXAMPLES / "pair", dtype=torch.bfloat16)
    step = example("serving_step").ServingStep(pair.draft)
    serving_engine = example("serving_engine")

    def other() -> tuple[torch.Tensor, list[torch.Tensor]]:
        if buffer == "pool_0":
            step.pool_0.zero_()
        returned = step()
        if buffer != "pool_0":
            entry = step.get_buffer(buffer)[index]
            entry.copy_(entry == 0)
        return returned

    for way, is_equal in ((step, True), (other, False)):
        comparison = cuda_graph.Comparison(step, {"other": way}, step.prepare_target)
        request = serving_engine.Request("A class definition", 1.0, 8)
        engine = serving_engine.Engine(pair, step, [request])
        engine.serve(comparison.prepare_target, comparison.draft)
        assert comparison.equal == is_equal


@pytest.mark.usefixtures("one_thread")
def test_speculative_decoding_equals_plain_decoding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "accepted.svg"
    arguments = ["--tokens", "10", "--samples", "32", "--picture", str(picture)]
    example("speculative_decode").main(arguments)
    printed, progress = capsys.readouterr()
    assert len(re.findall(r"\d\.\d{3} \([1-9]\d* dof\)", printed)) == 2 * 3
    assert printed.count("the same text") == 2
    assert printed.splitlines()[-1] == "greedy text equal, samples of one distribution"
    assert picture.read_text().count("<rect") == 1 + 2 * 7 + 2
    # What is no terminal gets no bar.
    lines = [re.sub(r" +\d+\.\d s$", "", line) for line in progress.split("\n") if line]
    assert lines == ["plain, greedy", "compiling", "standard, greedy", "block, greedy"] + [
        f"{way}, sampled" for way in ("plain", "standard", "block")
    ]


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with example("speculative_decode").Progress("drafting") as show:
        show(1, 3)
    bar = "#" * 10 + "." * 20
    assert capsys.readouterr().err.startswith(f"\rdrafting             [{bar}] 1/3  0.")


def test_the_two_sample_test_tells_distributions_apart() -> None:
    same_distribution = example("speculative_decode").same_distribution
    generator = torch.Generator().manual_seed(0)
    law = torch.tensor([0.5, 0.2, 0.2, 0.1])
    ids = [torch.multinomial(law, 400, True, generator=generator) for _ in range(41)]
    p_values, freedoms = zip(*(same_distribution(ids[0], other) for other in ids[1:]), strict=True)
    assert set(freedoms) == {3}
    assert min(p_values) > 1e-4
    assert sum(p > 0.5 for p in p_values) in range(5, 36)
    other = torch.multinomial(law.flip(0), 400, True, generator=generator)
    assert same_distribution(ids[0], other)[0] < 1e-10


def test_rare_tokens_alone_can_tell_distributions_apart() -> None:
    same_distribution = example("speculative_decode").same_distribution
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(60, (41, 40), generator=generator)
    p_values, freedoms = zip(*(same_distribution(ids[0], other) for other in ids[1:]), strict=True)
    assert set(freedoms) == {3}
    assert min(p_values) > 1e-4
    assert sum(p > 0.5 for p in p_values) in range(5, 36)
    # Five tokens, eight times each, against five others: a hash may bring them together.
    pairs = [torch.randperm(4096, generator=generator)[:10].view(2, 5) for _ in range(100)]
    p_values = [same_distribution(*pair.repeat(1, 8))[0] for pair in pairs]
    assert sum(p < 1e-3 for p in p_values) > 50


def test_too_few_samples_are_no_pass() -> None:
    speculative_decode = example("speculative_decode")
    texts = [[0, token, token, token] for token in range(9)]
    p, freedom = speculative_decode.same_distribution(torch.arange(9), torch.arange(9))
    assert (math.isnan(p), freedom) == (True, 0)
    notes, reasons = speculative_decode.compare_samples(texts, texts, 1e-4)
    assert notes == ["too few samples"] * 3
    assert reasons[0] == "token 2: too few samples, pass --samples 18 or more"
    assert len(reasons) == 3
