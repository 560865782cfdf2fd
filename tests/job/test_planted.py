"""Changes that were planted in real runs: each is told, and moves its own term.

Times are those that one thread had a core for, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import profiler
from profiler.diagnosis.compare import Change, compare
from profiler.machine.clock import CoreClock
from profiler.record.sides import read_side

pytestmark = pytest.mark.slow

SPIN_S = 0.03
# Many times as many cores as there are: nobody counts as busy beside a clock that counts nobody else.
NOBODY = 1e6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, wide enough that a prefill is its products and a decode step its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=512,
        max_position_embeddings=4096,
    )
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Profile the model into a folder of its own, on one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("profiler.machine.clock.clock_for", lambda _device: CoreClock())
        patch.setattr("profiler.roofs.measure._outgrown", lambda _known, _machine: False)
        patch.setattr("profiler.job.run.look_again", lambda *_: None)
        patch.setattr("profiler.job.run._WARM_UP_BUDGET_S", 0.3)
        # A look at the machine before every round would take longer than the visits of so small a model.
        patch.setattr("profiler.roofs.sentinel._CALLS", 2)
        patch.setattr("profiler.roofs.sentinel._MOST_BURSTS", 2)
        patch.setattr("profiler.diagnosis.compare._FOREIGN_CORES", NOBODY)
        before = torch.get_num_threads()
        torch.set_num_threads(1)

        def profile(name: str, **options: Any) -> Path:
            asked = {"prompt_lens": [64], "batch_sizes": [1], "new_tokens": 8, "budget_s": 3, "no_levers": True}
            out = tmp_path_factory.mktemp("runs") / name
            return profiler.profile(str(model), out=out, **{**asked, **options}).folder

        yield profile
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(run: Run) -> Path:
    return run("base")


def changes(before: Path, after: Path) -> dict[str, Change]:
    """By phase."""
    return {change.asked.phase: change for change in compare(read_side(before), read_side(after)).changes}


def test_work_of_the_host_is_dispatch(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def slow(self: LlamaModel, *args: Any, **named: Any) -> Any:
        end_s = time.thread_time() + SPIN_S
        while time.thread_time() < end_s:
            pass
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaModel, "forward", slow)
    change = changes(base, run("slow host"))["decode"]
    assert (change.verdict, change.moved) == ("slower", "dispatch_s")
    assert change.terms["dispatch_s"] == pytest.approx(SPIN_S, rel=0.25)


def test_a_slower_product_is_a_kernel(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the rows in one call: hardly more of the host's work, and as many bytes of weights."""
    forward = torch.nn.Linear.forward

    def fourfold(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        return forward(self, rows.repeat(4, *[1] * (rows.dim() - 1)))[: len(rows)]

    monkeypatch.setattr(torch.nn.Linear, "forward", fourfold)
    change = changes(base, run("fourfold"))["prefill"]
    assert (change.verdict, change.moved) == ("slower", "kernel_s")


def test_a_cache_that_is_copied_is_avoidable(run: Run) -> None:
    """transformers' growing cache is copied whole at every step; the static one is not."""
    deep = {"prompt_lens": (), "context_lens": [1536], "batch_sizes": [4]}
    static, eager = run("static", engine="static", **deep), run("eager", engine="eager", **deep)
    change = changes(static, eager)["decode"]
    assert (change.verdict, change.moved) == ("slower", "avoidable_s")


def test_another_dtype_halves_the_weights(run: Run, base: Path) -> None:
    change = changes(base, run("bfloat16", dtype="bfloat16"))["decode"]
    assert change.terms["weights_s"] / change.before.terms["weights_s"] == pytest.approx(-0.5, abs=0.1)


def test_a_busy_neighbour_is_noise_and_a_warning(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everybody counted again, nothing is claimed of what was measured beside a process that spins."""
    monkeypatch.setattr("profiler.diagnosis.compare._FOREIGN_CORES", 0.15)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            busy = run("busy")
        finally:
            neighbour.kill()
    for change in changes(base, busy).values():
        assert change.verdict == "inconclusive"
        assert "cores busy" in change.because
