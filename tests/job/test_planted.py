"""Changes that were planted in real runs: each is told, and moves its own term."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import profiler
from profiler.diagnosis.compare import Change, Comparison
from profiler.job.comparing import compared

pytestmark = [pytest.mark.slow, pytest.mark.timing]

SLEEP_S = 0.004


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, whose steps are many in a few seconds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        max_position_embeddings=4096,
    )
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Profile the model into a folder of its own."""

    def profile(name: str, threads: int = 1, **options: Any) -> Path:
        out = tmp_path_factory.mktemp("runs") / name
        asked = {"prompt_lens": [32], "batch_sizes": [1, 4], "new_tokens": 16, "budget_s": 12, **options}
        before = torch.get_num_threads()
        # Threads that wait for each other suffer most from whatever else runs.
        torch.set_num_threads(threads)
        try:
            return profiler.profile(str(model), out=out, **asked).folder
        finally:
            torch.set_num_threads(before)

    return profile


@pytest.fixture(scope="module")
def base(run: Run) -> Path:
    return run("base")


def decodes(comparison: Comparison) -> list[Change]:
    return [change for change in comparison.changes if change.asked.phase == "decode"]


def test_a_sleep_in_the_host_is_dispatch(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def sleepy(self: LlamaModel, *args: Any, **named: Any) -> Any:
        time.sleep(SLEEP_S)
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaModel, "forward", sleepy)
    for change in decodes(compared(base, run("sleepy"))):
        assert (change.verdict, change.moved) == ("slower", "dispatch_s")
        assert change.terms["dispatch_s"] == pytest.approx(SLEEP_S, rel=0.5)


def test_a_slower_product_is_a_kernel(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = torch.nn.Linear.forward

    def thrice(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        forward(self, rows)
        forward(self, rows)
        return forward(self, rows)

    monkeypatch.setattr(torch.nn.Linear, "forward", thrice)
    comparison = compared(base, run("thrice"))
    assert {change.verdict for change in comparison.changes} == {"slower"}
    # A decode of so small a model is mostly calls, which come thrice as well.
    assert {change.moved for change in comparison.changes if change.asked.phase == "prefill"} == {"kernel_s"}


def test_a_cache_that_is_copied_is_avoidable(run: Run) -> None:
    """transformers' growing cache is copied whole at every step; the static one is not."""
    deep = {"prompt_lens": (), "context_lens": [1536], "batch_sizes": [8]}
    [change] = compared(run("static", engine="static", **deep), run("eager", engine="eager", **deep)).changes
    assert change.terms["avoidable_s"] > 0
    assert (change.verdict, change.moved) == ("slower", "avoidable_s")


def _spin() -> None:
    while True:
        pass


@pytest.fixture
def neighbours() -> Iterator[None]:
    """A process on every core that does nothing but keep it busy."""
    spinning = [
        multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)
    ]
    for process in spinning:
        process.start()
    yield
    for process in spinning:
        process.terminate()


def test_a_busy_neighbour_is_noise_and_a_warning(run: Run, base: Path, neighbours: None) -> None:
    comparison = compared(base, run("busy"))
    assert {change.verdict for change in comparison.changes} == {"inconclusive"}
    assert all("cores busy" in change.because for change in comparison.changes)


def test_threads_that_were_halved_are_named_and_lower_the_roof(run: Run, base: Path) -> None:
    if torch.get_num_threads() < 2:
        pytest.skip("a single thread cannot be halved")
    comparison = compared(run("whole", threads=2), base)
    assert comparison.differences[0].words == "threads 2 -> 1"
    prefills = [change for change in comparison.changes if change.asked.phase == "prefill"]
    assert {change.verdict for change in prefills} == {"slower"}
    assert all(change.machine == 0 for change in comparison.changes)
    assert {change.moved for change in prefills} <= {"compute_s", "kernel_s"}


def test_another_dtype_halves_the_weights(run: Run, base: Path) -> None:
    comparison = compared(base, run("bfloat16", dtype="bfloat16"))
    assert comparison.differences[0].words == "precision float32 -> bfloat16"
    for change in decodes(comparison):
        assert change.terms["weights_s"] / change.before.terms["weights_s"] == pytest.approx(-0.5, abs=0.1)
