"""A real vLLM in this process: its tokens, its times and a full cache, and a run next to the eager engine."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from greedy import random_prompt, tokens_of_generate
from machines import HOST
from small_models import small_model
from subjects import subject_of
from transformers import CpmAntConfig, LlamaForCausalLM

import profiler
from profiler.counting.memory_need import cache_bytes
from profiler.counting.walk import walk
from profiler.engines.vllm import VllmEngine
from profiler.errors import NoFreeMemoryError, RequestError
from profiler.facts.repetitions import Gap, Repetition
from profiler.grid.cells import Cell, Grid
from profiler.judge.breakdown import TERMS
from profiler.loading.load import load
from profiler.loading.prompts import Prompts
from profiler.measure.sweep import RepetitionContext, repetition
from profiler.run.options import Options
from profiler.run.validate import prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: .ci/vllm runs these"),
]

VOCAB = 256
BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with heads as wide as vLLM's CPU kernels require."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    path = tmp_path_factory.mktemp("models") / "tiny"
    small_model("Llama", **sizes, tie_word_embeddings=True).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> VllmEngine:
    """vLLM with that model's weights and room for 40 blocks, one of which always stays empty.

    A second vLLM in the process ends this one, so the tests that make another come last.
    """
    prepared = prepare(Options(model=str(folder), engine="vllm", device="cpu"))
    loaded = load(prepared.request, prepared.config)
    block_bytes = int(cache_bytes(walk(loaded.module), 1, BLOCK))
    return VllmEngine(loaded, HOST, Grid((500,), (16,), 100), 40 * block_bytes)


@pytest.mark.parametrize(("batch", "length", "new_tokens"), [(3, 40, 24), (9, 500, 4)])
def test_its_greedy_tokens_are_those_of_transformers(
    batch: int, length: int, new_tokens: int, engine: VllmEngine, folder: Path
) -> None:
    """Also with 4500 prompt tokens, more than vLLM's 4096 per iteration: they are processed in chunks."""
    ids, marks = random_prompt(batch, length), list[int]()
    tokens = engine.call(ids, new_tokens, lambda: marks.append(0))
    assert len(marks) == 2
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokens.tolist() == tokens_of_generate(model, ids, new_tokens).tolist()


def test_a_prefill_and_its_steps_add_up_to_one_call(engine: VllmEngine) -> None:
    """8 x 500 tokens and 11 steps, next to one uncached call. Others may disturb some comparisons, not twenty."""
    ids, ratios = random_prompt(8, 500), list[float]()
    for _ in range(20):
        marks: list[float] = []
        engine.call(ids, 12, lambda marks=marks: marks.append(HOST.now_s()))  # type: ignore[misc]
        prefill_s, steps_s = engine.times(ids, 12)
        ratios.append((prefill_s + 11 * sum(steps_s) / len(steps_s)) / (marks[1] - marks[0]))
        if abs(ratios[-1] - 1) < 0.1:
            return
    pytest.fail(f"the sum is {ratios} of the call")


def test_a_full_cache_gives_no_number_and_does_not_affect_the_next_cell(engine: VllmEngine) -> None:
    """Ten prompts of 500 tokens need 40 blocks, and 39 are usable: not all of them can be stepped together."""
    with pytest.raises(NoFreeMemoryError, match="iterations for 79 steps of 10 sequences"):
        engine.times(random_prompt(10, 500), 80)
    gap = repetition(engine, Cell(10, 500, 80, engine="vllm"), 0, RepetitionContext(HOST, Prompts(VOCAB)))
    assert isinstance(gap, Gap)
    assert gap.status == "oom"
    timed = repetition(engine, Cell(3, 40, 24, engine="vllm"), 0, RepetitionContext(HOST, Prompts(VOCAB)))
    assert isinstance(timed, Repetition)
    assert timed.decode_s[0] == timed.decode_s[1]
    assert timed.energy_j is None


def test_a_run_with_vllm_and_eager(folder: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    run = profiler.profile(
        str(folder), prompt_lens=[16], batch_sizes=[1, 2], new_tokens=8, engine="eager,vllm", weights="random",
        budget_s=2, no_trials=True, out=tmp_path / "run",
    )  # fmt: skip
    table = csv.DictReader((run.folder / "cells.csv").read_text().splitlines())
    rows = {(row["engine"], row["phase"], row["batch_size"]): row for row in table}
    assert len(rows) == 8
    for (name, _, _), row in rows.items():
        assert row["status"] == "ok"
        assert sum(float(row[term]) for term in TERMS) == pytest.approx(float(row["latency_s"]))
        if name == "vllm":
            assert float(row["engine_s"]) > 0
            assert [float(row[term]) for term in ("kernel_s", "dequantise_s", "overhead_s", "link_s")] == [0.0] * 4
        else:
            assert float(row["engine_s"]) == 0
    for phase in ("prefill", "decode"):
        for counted in ("model_flops", "model_bytes"):
            assert rows["eager", phase, "2"][counted] == rows["vllm", phase, "2"][counted]
    owned = json.loads((run.folder / "run.json").read_text())["engine"]["owned"]["vllm"]
    assert owned["load_s"] > 0
    assert owned["cache_bytes"] > 0
    assert owned["weight_bytes"] == run.model.storage_bytes
    differences = run.document.engine.differences
    assert len(differences) == 4
    for item in differences:
        before, after = (
            rows[name, item.phase, str(item.batch_size)]["latency_s"] for name in (item.against, item.engine)
        )
        assert not item.terms or sum(item.terms.values()) == pytest.approx(float(after) - float(before))
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1, "vLLM's worker has not kept torch's threads"
    torch.set_num_threads(threads)


def test_a_model_that_vllm_does_not_know_is_refused_in_one_line(tmp_path: Path) -> None:
    names = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "architectures": ["CpmAntForCausalLM"]}
    CpmAntConfig(**names).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="--engine vllm: vLLM cannot run this model here: ") as caught:
        subject_of(str(tmp_path), engine="vllm", weights="random")
    assert "\n" not in str(caught.value)
