"""Changes planted in real runs: each is reported and moves its own term.

Times and budgets count only the CPU time of one thread, so other processes do not matter. Every run then has the same
repetitions on a machine of any speed and load.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hurry import with_effort
from small_models import small_model
from transformers import LlamaModel
from transformers.activations import ACT2FN

import profiler
from profiler import effort
from profiler.comparison.compare import Change, compare_sides
from profiler.comparison.side import read_side
from profiler.device.clock import CoreClock, time_calls
from profiler.device.machine import Machine
from profiler.facts.operators import REST
from profiler.store.folder import read_gathered

pytestmark = pytest.mark.slow

SPIN_S = 0.03
# More cores than any machine has. The clock of one thread sees no other process, so no process counts as busy.
NOBODY = 1e6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two layers, so wide that matmuls dominate a prefill and weights dominate a decode step."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "vocab_size": 512, "max_position_embeddings": 4096}
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    small_model("Llama", **sizes, num_attention_heads=12, num_key_value_heads=12).save_pretrained(folder)
    return folder


Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Profile the model on one core, each time into a new folder.

    Times, budgets and ceilings are the CPU time of one thread. A check of the machine before every round would take
    longer than the repetitions of such a small model.
    """
    requested: dict[str, Any] = {"prompt_lens": [64], "batch_sizes": [1], "new_tokens": 8, "budget_s": 2}
    shares = {**effort.STANDARD.shares, "ceilings": 2.0}
    brief = {"checks_kept_ceilings": False, "ceilings_again_s": 0.0, "drift_calls": 2, "drift_bursts": 2}

    def profiled(name: str, **options: Any) -> Path:
        out = tmp_path_factory.mktemp("runs") / name
        return profiler.profile(str(model), out=out, no_trials=True, **{**requested, **options}).folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("profiler.device.machine.clock_for", lambda _device: CoreClock())
        patch.setattr(Machine, "now_s", lambda _machine: time.thread_time())
        patch.setattr("profiler.roofs.measure.measure_host_pace", lambda *_: None)
        patch.setattr("profiler.comparison.compare.MOST_FOREIGN_CORES", NOBODY)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("roofs")))
        with_effort(patch, rounds=30, shares=shares, **brief)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield profiled
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(run: Run) -> Path:
    return run("base")


def changes(before: Path, after: Path) -> dict[str, Change]:
    return {change.phase: change for change in compare_sides(read_side(before), read_side(after)).changes}


def test_work_of_the_host_is_overhead(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def slow(self: LlamaModel, *args: Any, **named: Any) -> Any:
        end_s = time.thread_time() + SPIN_S
        while time.thread_time() < end_s:
            pass
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaModel, "forward", slow)
    assert read_side(base).settings["threads"] == "1"
    change = changes(base, run("slow host"))["decode"]
    assert (change.verdict, change.moved) == ("slower", "overhead_s")
    assert change.terms["overhead_s"] == pytest.approx(SPIN_S, rel=0.25)


def test_a_slower_matmul_is_a_kernel(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has four times the rows: the host's work is nearly the same, and so are the bytes of weights."""
    forward = torch.nn.Linear.forward

    def fourfold(self: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        return forward(self, rows.repeat(4, *[1] * (rows.dim() - 1)))[: len(rows)]

    monkeypatch.setattr(torch.nn.Linear, "forward", fourfold)
    change = changes(base, run("fourfold"))["prefill"]
    assert (change.verdict, change.moved) == ("slower", "kernel_s")


def test_a_slow_small_kernel_is_found_between_the_others(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation that is computed 120 times is not a matmul, not attention and not work of the host.

    Its time is found between matmuls and attention. It is also measured by itself, before and after the run, since
    this machine's speed may change in between.
    """
    activation = type(ACT2FN["silu"])
    forward = activation.forward
    rows, clock, more = torch.randn(1, 64, 3072), CoreClock(), 119

    def planted_s() -> float:
        return 2 * more * statistics.median(time_calls(lambda: forward(activation(), rows), clock, 400))

    def often(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(more if x.shape[-2] > 1 else 0):
            forward(self, x)
        return forward(self, x)

    before_s = planted_s()
    monkeypatch.setattr(activation, "forward", often)
    after = run("slow activation")
    change = changes(base, after)["prefill"]
    assert (change.verdict, change.moved) == ("slower", "kernel_s")
    low_s, high_s = sorted((before_s, planted_s()))
    assert 0.7 * low_s < small_kernels_s(after) - small_kernels_s(base) < 1.3 * high_s


def small_kernels_s(folder: Path) -> float:
    """Return the seconds of a prefill's kernels that are neither matmuls nor attention."""
    replays = read_gathered(folder).replays
    return next(found[REST].whole.median_s for key, found in replays.items() if key.phase == "prefill")


def test_a_cache_that_is_copied_is_redundant(run: Run) -> None:
    """transformers copies its growing cache at every step, but not the static cache."""
    deep = {"prompt_lens": (), "context_lens": [1536], "batch_sizes": [4], "budget_s": 5}
    static, eager = run("static", engine="static", **deep), run("eager", engine="eager", **deep)
    change = changes(static, eager)["decode"]
    assert max(change.terms, key=lambda term: change.terms[term]) == "redundant_s"
    if change.verdict == "inconclusive":
        pytest.skip(f"this machine is too noisy: a change of {change.change:.0%} is not sure of its sign")
    assert (change.verdict, change.moved) == ("slower", "redundant_s")


def test_a_busy_neighbour_is_noise_and_a_warning(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other processes counted again, no change is claimed if another process spins during a run."""
    monkeypatch.setattr("profiler.comparison.compare.MOST_FOREIGN_CORES", 0.15)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            busy = run("busy")
        finally:
            neighbour.kill()
    for change in changes(base, busy).values():
        assert change.verdict == "inconclusive"
        assert "cores busy" in change.because
