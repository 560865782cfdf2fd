"""A run on a simulated GPU executes lines of changes on the loaded model, and advises those that save time.

Default runs end within their budget, in simulated seconds.
"""

from pathlib import Path

import pytest

from profiler import effort
from profiler.facts.change_ids import ChangeId
from profiler.store.folder import Run, read_gathered, read_run

from .scenario import Scenario, command_line
from .truth import H100, H200, RTX_4090, T4, Truth
from .world import simulated

pytestmark = pytest.mark.slow
STATIC_LINE = 'model.generate(..., cache_implementation="static")'
SLOW_HOST = H100.but(launch_s=40e-6)
"""Each kernel costs the host 40 µs, so a step of about 180 kernels takes 7 ms, and its graph under 1 ms."""


def run_on(truth: Truth, dtype: str, folder: Path, **more: object) -> Run:
    """Return a run of four layers of Mistral-7B."""
    model = str(Scenario("mistral-7b-v0.3", 4, dtype).folder(folder))
    options = {"prompt_lens": "64,512", "batch_sizes": "1,8", "budget": 60, "fresh": True, **more}
    with simulated(truth) as world:
        start_s = world.host.now_s
        code = command_line("run", model, dtype=dtype, out=folder / "run", **options)
        assert world.host.now_s - start_s < 1.2 * float(str(options["budget"])), "by the clock of the simulated host"
    assert code == 0
    return read_run(folder / "run")


def test_a_minute_measures_the_graph_and_says_what_the_line_would_take(tmp_path: Path) -> None:
    run = run_on(SLOW_HOST, "bfloat16", tmp_path, budget=20)
    assert STATIC_LINE not in {item.line for item in run.document.advised}
    text = " ".join(run.answer)
    assert "Tried, but no line to copy: with one CUDA graph per step" in text
    assert STATIC_LINE in text
    trials = [trial for found in read_gathered(run.folder).trials.values() for trial in found]
    kept = [trial for trial in trials if trial.change not in (ChangeId.DTYPE, ChangeId.FORMAT)]
    assert kept
    assert all(trial.layers == trial.of_layers for trial in kept), "the loaded model is stepped, not a few layers"
    # Of four layers: 4 x 218.1 M weights and a head of 131 M. nf4 has 4 bits and a float32 per 64 weights.
    dense_bytes, nf4_bytes = 2 * (4 * 218.1e6 + 131e6), 4 * 218.1e6 * (0.5 + 4 / 64) + 2 * 131e6
    assert run.document.format_linears is not None
    linears = {(item.format, item.rows): item for item in run.document.format_linears.times}
    assert linears["bfloat16", 1].time.median_s == pytest.approx(dense_bytes / 3.0e12, rel=0.02), "no host's time"
    assert linears["nf4", 1].time.median_s == pytest.approx(nf4_bytes / 3.0e12, rel=0.05)
    assert all(item.graph for item in linears.values())


@pytest.mark.ci
def test_a_longer_run_compiles_and_advises_the_line(tmp_path: Path) -> None:
    """It compiles for at least 20 s. A new cache has its graph recorded again, which each call pays."""
    run = run_on(SLOW_HOST, "bfloat16", tmp_path, budget=200)
    first = run.document.advised[0]
    assert (first.change, first.line) == (ChangeId.COMPILED_STEP, STATIC_LINE)
    assert first.once_s >= 20
    assert first.tokens == first.same_tokens > 0
    assert first.step is not None
    assert first.step.after_s < 0.25 * first.step.before_s
    assert (first.pays_from_tokens or 0) > 1
    assert f"it pays from {first.pays_from_tokens} new tokens per prompt on" in " ".join(run.answer)


def test_a_new_length_costs_a_plan_and_the_switch_is_tried_at_new_lengths(tmp_path: Path) -> None:
    """37 ms of first use for each new KV length, as on an H200."""
    run = run_on(H200, "bfloat16", tmp_path)
    trials = [trial for found in read_gathered(run.folder).trials.values() for trial in found]
    [switch] = [trial for trial in trials if trial.change is ChangeId.WITHOUT_CUDNN and trial.key.phase == "decode"][:1]
    assert min(switch.before.layers_s) > 30e-3 > max(switch.after.layers_s)


def test_a_gpu_without_a_fused_kernel_for_grouped_heads_repeats_them(tmp_path: Path) -> None:
    """A T4's prefill of 8 x 512 writes its scores in the math kernel; with repeated heads it does not."""
    run = run_on(T4, "float16", tmp_path)
    [advice] = [item for item in run.document.advised if item.change is ChangeId.REPEATED_HEADS]
    assert "use_gqa_in_sdpa" in advice.line
    assert advice.prefill is not None
    assert advice.prefill.saves_s > advice.prefill.half_width_s


def test_4_bit_weights_on_a_t4_get_no_compiled_step(tmp_path: Path) -> None:
    """transformers does not compile a model of bitsandbytes: the same line gives an eager static cache."""
    run = run_on(T4.but(launch_s=50e-6), "float16", tmp_path, quant="nf4", batch_sizes="1,4")
    assert "Not tried: model.generate" not in " ".join(run.answer)
    assert "4 sequences a step: " in " ".join(run.answer)
    trials = [trial for found in read_gathered(run.folder).trials.values() for trial in found]
    static = [trial for trial in trials if trial.line == STATIC_LINE]
    assert {(trial.change, trial.once_s) for trial in static} == {(ChangeId.STATIC_CACHE, 0.0)}


_BUDGET_S = 60.0
_BESIDE = {"roofs", "dispatch", "replays"}


@pytest.mark.parametrize(
    ("truth", "quant", "rows"),
    [(T4, "none", 6), (T4, "nf4", 12), (RTX_4090, "none", 12), (H100, "none", 18), (H200, "none", 18)],
)
def test_every_row_is_measured_twice_within_the_budget(
    truth: Truth, quant: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of `roofscope run MODEL` with all layers, and trials; a row is the prefill or the decode of a cell."""
    monkeypatch.setattr(effort, "STANDARD", effort.Effort())  # a shortened run times the whole grid, however long
    folder = Scenario("mistral-7b-v0.3").folder(tmp_path)
    with simulated(truth):
        command_line("run", str(folder), quant=quant, out=tmp_path / "run", fresh=True)
    run = read_run(tmp_path / "run")
    assert len(run.measured) == len(run.results) >= rows
    assert min(row.repetitions or 0 for row in run.measured) >= 2
    stages = run.document.stage_s.items()
    parts = {name: seconds for name, seconds in stages if name not in ("starting", "loading")}
    assert parts.keys() >= _BESIDE
    assert sum(parts.values()) <= 1.1 * _BUDGET_S
    assert sum(parts[name] for name in _BESIDE) <= 0.3 * _BUDGET_S
    trials = [trial for found in read_gathered(run.folder).trials.values() for trial in found]
    assert any(trial.line for trial in trials), "it tries changes on the model"
