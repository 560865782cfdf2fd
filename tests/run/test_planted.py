"""Changes planted in real runs: each is reported and moves its own term.

Times and budgets count only the CPU time of one thread, so other processes do not matter. Every run then has the same
repetitions on a machine of any speed and load.

    python test_planted.py MODEL RUNS THREADS...

profiles the model with each number of threads, in one folder per number.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hurry import hurry, with_effort
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
from profiler.store.folder import read_facts, read_gathered, read_run

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


def on_one_clock(patch: pytest.MonkeyPatch) -> None:
    """Measure times, budgets and ceilings by the CPU time of one thread, and shorten the checks."""
    patch.setattr("profiler.device.clock.clock_for", lambda _device: CoreClock())
    patch.setattr(Machine, "now_s", lambda _machine: time.thread_time())
    patch.setattr("profiler.roofs.measure.measure_host_pace", lambda *_: None)
    # A check of the machine before every round would take longer than the repetitions of such a small model.
    shares = {**effort.STANDARD.shares, "ceilings": 2.0}
    with_effort(
        patch, rounds=30, checks_kept_ceilings=False, ceilings_again_s=0.0, drift_calls=2, drift_bursts=2, shares=shares
    )
    patch.setattr("profiler.comparison.compare.MOST_FOREIGN_CORES", NOBODY)


def profile(model: Path, out: Path, **options: Any) -> Path:
    defaults = {"prompt_lens": [64], "batch_sizes": [1], "new_tokens": 8, "budget_s": 2, "no_trials": True}
    return profiler.profile(str(model), out=out, **{**defaults, **options}).folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Profile the model on one core, each time into a new folder."""
    with pytest.MonkeyPatch.context() as patch:
        on_one_clock(patch)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("roofs")))
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield lambda name, **options: profile(model, tmp_path_factory.mktemp("runs") / name, **options)
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
    replays = read_gathered(folder, read_run(folder).document).replays
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


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="emulated matmuls take longer than the weights")
def test_another_dtype_halves_the_weights(run: Run, base: Path) -> None:
    """Runs are compared at one bandwidth: their ceilings are of different minutes, and a cache may hold half of it."""
    other = run("bfloat16", dtype="bfloat16")
    change = changes(base, other)["decode"]
    before, after = (bandwidth(folder) for folder in (base, other))
    moved = change.after.terms["weights_s"] * after - change.before.terms["weights_s"] * before
    assert moved / (change.before.terms["weights_s"] * before) == pytest.approx(-0.5, abs=0.1)


def bandwidth(folder: Path) -> float:
    """Return the memory ceiling of a decode step, in bytes/s."""
    run = read_run(folder)
    [read] = run.cells[run.cells["phase"] == "decode"]["model_bytes"]
    facts = read_facts(folder, run.document, read_gathered(folder, run.document))
    return facts.ceilings.memory_bytes_per_s_for(read)


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


def test_a_ceiling_that_fell_is_named(model: Path, tmp_path: Path) -> None:
    """With half the threads both ceilings fall, the report names the setting, and a prefill spends more on arithmetic.

    Waiting threads sleep (OMP_WAIT_POLICY), so the CPU time of the first thread covers only its share of the work.
    It does not depend on whether the second thread has a core.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "XDG_CACHE_HOME": str(tmp_path / "roofs")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(profiler.__file__).parents[1]), *sys.path])
    subprocess.run([sys.executable, __file__, model, tmp_path, "2", "1"], env=environment, timeout=300, check=True)
    found = compare_sides(read_side(tmp_path / "2 threads"), read_side(tmp_path / "1 threads"))
    assert "threads 2 -> 1" in [item.words for item in found.differences if item.weight == "explains"]
    fell = {shift.resource: shift for shift in found.shifts}["compute"]
    if fell.roof_ratio is None or min(fell.roof_ratio, fell.ratio) < 1.3:
        pytest.skip(
            f"two threads multiply {fell.ratio:.2f} times as fast as one here (the ceilings: {fell.roof_ratio})"
        )
    assert {change.machine for change in found.changes} == {0.0}, (
        "a change that a setting explains is not machine drift and is not divided out"
    )
    prefill = next(change for change in found.changes if change.phase == "prefill")
    if prefill.difference.log_high - prefill.difference.log_low > 0.15:
        pytest.skip(f"this machine is too noisy: prefill takes {prefill.change:.0%} longer, or none")
    assert prefill.change > 0.25
    assert max(prefill.terms, key=lambda term: prefill.terms[term]) in ("compute_s", "kernel_s")
    assert prefill.terms["compute_s"] > 0.25 * prefill.before.terms["compute_s"]


def main(model: str, runs: str, *threads: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        on_one_clock(patch)
        for count in threads:
            torch.set_num_threads(int(count))
            options = {"prompt_lens": [256], "new_tokens": 4, "budget_s": 2.5}
            profile(Path(model), Path(runs) / f"{count} threads", **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
