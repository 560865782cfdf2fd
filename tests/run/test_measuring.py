"""What a run measures besides its cells: dispatch, rows in between, packed weights, caches, a cold start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hurry import with_effort
from machines import HOST
from plain_engine import PlainEngine
from raw_samples import read_records

import profiler
from profiler.counting.operators import Linear
from profiler.engines.base import DecodeState
from profiler.facts.dispatch import DispatchSamples
from profiler.facts.measurements import FirstCalls, FreshStart
from profiler.forecast.command import run_facts
from profiler.grid.cells import Cell, Grid
from profiler.judge import judge_run
from profiler.judge.cells import EngineDifference
from profiler.report import engines
from profiler.report.changes import packed_lines
from profiler.report.engines import break_even
from profiler.run import cold_start as cold
from profiler.run import measure
from profiler.run import setup as foundation
from profiler.run.cold_start import steps_after_idle

HELD_UP_S, UNDISTURBED_S = 10.0, 1e-6


@pytest.mark.slow
def test_dispatch_that_was_held_up_is_measured_again(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process slows the twin's first steps to ten seconds and ends before the cells are timed."""
    measured, seen = foundation.measure_dispatch, iter([HELD_UP_S, UNDISTURBED_S])

    def at_first_held_up(*arguments: Any) -> list[DispatchSamples]:
        step_s, in_time = (next(seen),) * 8, measured(*arguments[:5], 60.0, *arguments[6:])
        return [DispatchSamples(item.engine, item.phase, item.batch_size, step_s) for item in in_time]

    monkeypatch.setattr(foundation, "measure_dispatch", at_first_held_up)
    run = profile_tiny(batch_sizes=[1, 2])
    records = [record for record in read_records(run.folder) if record["kind"] == "dispatch"]
    assert [item["alone_s"][0] for item in records] == [HELD_UP_S] * 4 + [UNDISTURBED_S] * 4
    assert (run.cells["dispatch_s"] == UNDISTURBED_S).all()
    assert run.document.ceilings.dispatch_s == {
        "eager": {phase: {1: UNDISTURBED_S, 2: UNDISTURBED_S} for phase in ("prefill", "decode")}
    }


@pytest.mark.slow
def test_dispatch_is_completed_for_the_cells_that_were_measured(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine no time is left for the second batch size before the cells are timed."""
    measured, budgets_s = foundation.measure_dispatch, iter([0.0, 60.0])

    def at_first_late(*arguments: Any) -> list[DispatchSamples]:
        return measured(*arguments[:5], next(budgets_s), *arguments[6:])

    monkeypatch.setattr(foundation, "measure_dispatch", at_first_late)
    run = profile_tiny(batch_sizes=[1, 2], budget_s=60)
    records = [record for record in read_records(run.folder) if record["kind"] == "dispatch"]
    decodes = [item["batch_size"] for item in records if item["phase"] == "decode"]
    assert decodes[:2] == [1, 2]
    assert (run.cells["dispatch_s"] > 0).all()


def test_a_run_is_judged_twice(profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the trials, for what they may save, and at the end. Medians and breakdowns do for all other parts."""
    judged, advise = list[int](), judge_run.advise_run

    def counted(broken: judge_run.BrokenDown) -> judge_run.Judgement:
        judged.append(len(broken.cells))
        return advise(broken)

    monkeypatch.setattr(judge_run, "advise_run", counted)
    monkeypatch.setattr(measure, "_LEVERS_LEAST_S", 0.0)
    monkeypatch.setattr(measure, "try_variants", lambda *_, **__: ())
    run = profile_tiny(batch_sizes=[1, 2], no_levers=False)
    assert judged == [len(run.results)] * 2


@pytest.mark.slow
def test_linears_are_replayed_at_rows_between_those_of_the_cells(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells have 1 and 4 sequences, and 8 and 32 rows of prompts: 2 and 16 are replayed and used for forecasts.

    Replays end after their samples, because other processes may use up the time of a short budget.
    """
    with_effort(monkeypatch, between_share=600.0)
    run = profile_tiny(batch_sizes=[1, 4])
    known = run_facts(run.folder)
    between = known.trained.measured.between
    assert between is not None
    assert between.demanded.steps.tokens.tolist() == [2, 16]
    sources = {column.operator: column.source for column in between.demanded.columns}
    linears = {name for name, source in sources.items() if isinstance(source, Linear) and source.rows != "last"}
    assert linears
    for name in linears:
        assert (between.seconds[name] > 0).all(), name
        assert len(known.trained.fitted.kernels.lines[name].log_sizes) == 6
    assert set(run.cells["batch_size"]) == {1, 4}


@pytest.mark.cpu
@pytest.mark.slow
def test_a_run_of_packed_weights_times_them_against_dense_ones(profile_tiny: Callable[..., profiler.Run]) -> None:
    run = profile_tiny(quant="nf4", budget_s=40, no_levers=False)
    found = run.document.packed_batches
    assert found is not None
    assert (found.format, found.dense_dtype) == ("nf4", run.model.dtype)
    assert [item.batch for item in found.times] == [1, 2, 4, 8, 16, 32, 64, 128, 256][: len(found.times)]
    assert len(found.times) >= 6, "a busy machine has no time for the largest"
    assert all(item.packed_s > 0 and item.dense_s > 0 and len(item.ratios) == 3 for item in found.times)
    [line] = packed_lines(run)
    assert line in " ".join((run.folder / "report.md").read_text().split())


@pytest.mark.cpu
@pytest.mark.slow
def test_a_quantised_cache_next_to_a_growing_one(profile_tiny: Callable[..., profiler.Run]) -> None:
    """Two layers with 64 cached elements per token: 1 byte each instead of 4, for 22 old tokens and a new one."""
    sizes = {"prompt_lens": [16], "context_lens": [64], "new_tokens": 12}
    run = profile_tiny(**sizes, cache="dynamic,fp8", budget_s=5)
    assert run.document.engine.names == ("eager", "fp8-cache")
    assert {(row.engine, row.status) for row in run.results} >= {("eager", "ok"), ("fp8-cache", "ok")}
    assert "--engine eager,fp8-cache" in run.document.command
    rows = {(row.engine, row.key.cell.prompt_len): row for row in run.results if row.phase == "decode"}
    saved_bytes = rows["eager", 16].model_bytes - rows["fp8-cache", 16].model_bytes
    assert saved_bytes == 2 * 64 * (4 - 1) * (22 + 1)
    assert rows["fp8-cache", 16].executed_bytes > rows["eager", 16].executed_bytes


@pytest.mark.slow
def test_the_report_names_the_cache(profile_tiny: Callable[..., profiler.Run]) -> None:
    run = profile_tiny(prompt_lens=[8], new_tokens=4, cache="quantized")
    assert "quantised, converted at every step: fp8, 8 bits" in (run.folder / "report.md").read_text()


_DELAY_S = 0.02


def test_requests_until_a_compilation_is_paid_for() -> None:
    """Compiling pays off after 42 requests.

    It takes 20 s, and 1.5 s more for the first request, against 0.5 s more without it. Each request then saves 0.5 s.
    """
    own, compiled = FirstCalls(0.0, 2.5, 2.0), FirstCalls(20.0, 3.0, 1.5)
    assert break_even(own, compiled) == pytest.approx((21.5 - 0.5) / 0.5)
    assert break_even(own, FirstCalls(20.0, 3.0, 2.0)) is None
    assert break_even(own, FirstCalls(0.0, 1.5, 1.5)) == 0


@pytest.mark.parametrize(
    ("bounds_s", "second_s", "text"),
    [
        ((0.1, 0.3), 1.5, "above 42 requests"),
        ((-0.1, 0.3), 1.5, "not known"),
        ((0.1, 0.3), 2.1, "not known"),  # the only later answer in a fresh process was slow
        ((-0.3, -0.1), 2.1, "never pays off"),
        ((-0.3, 0.1), 2.1, "not known"),
    ],
)
def test_what_lies_within_noise_pays_for_nothing(bounds_s: tuple[float, float], second_s: float, text: str) -> None:
    difference = EngineDifference("decode", 1, 64, 68, 8, "compile", "eager", 0.0, *bounds_s)
    calls = {"eager": FirstCalls(0.0, 2.5, 2.0), "compile": FirstCalls(20.0, 1.5 + second_s, second_s)}
    document = SimpleNamespace(
        fresh_starts=[FreshStart("drawn", 2.0, 1.0, 10**9, calls)],
        after_silence=[],
        asked=Grid((64,), (1,), 8, engines=("eager", "compile")),
        engine=SimpleNamespace(differences=[difference]),
    )
    *_, line = engines.cold(SimpleNamespace(document=document)).blocks[0].lines  # type: ignore[arg-type]
    assert text in line


class Sleepy(PlainEngine):
    """An engine whose first step after idle time takes 20 ms longer."""

    rested = False

    def decode(self, state: DecodeState) -> DecodeState:
        if self.rested:
            time.sleep(_DELAY_S)
        self.rested = False
        return state


def test_the_first_step_after_a_silence_is_told_apart() -> None:
    engine: Any = Sleepy()

    def wait(seconds: float) -> None:
        engine.rested = seconds > 0

    found = {item.silence_s: item for item in steps_after_idle(engine, Cell(1, 16, 4), HOST, wait=wait)}
    assert list(found) == [0.0, 1.0, 5.0, 30.0]
    for silence_s, item in found.items():
        first = min(steps[0] for steps in item.steps_s)
        later = min(step for steps in item.steps_s for step in steps[1:])
        assert later < _DELAY_S / 2
        assert first >= _DELAY_S if silence_s else first < _DELAY_S / 2


@pytest.mark.parametrize(("gone", "links"), [(True, ["disk", "page cache"]), (False, ["page cache"])])
def test_weights_come_from_the_disk_only_where_the_cache_has_let_them_go(
    gone: bool, links: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(b"kept")
    request = SimpleNamespace(weights="checkpoint", source=SimpleNamespace(path=tmp_path))
    monkeypatch.setattr(cold, "forget", lambda files: files == [tmp_path / "weights"] and gone)
    monkeypatch.setattr(cold, "start_fresh", lambda _prepared, link: link)
    assert list(cold.fresh_starts(SimpleNamespace(request=request), HOST, 4)) == links  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_tells_its_cold_start(
    tiny_folder: Path, profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_effort(monkeypatch, idle_pauses=((0.0, 2), (0.1, 1)))
    # One fresh process is enough. By default, one reads the weights from the disk and one from the page cache.
    forgotten: list[list[Path]] = []
    monkeypatch.setattr("profiler.run.cold_start.forget", lambda files: forgotten.append(files) is None)
    monkeypatch.setattr("profiler.run.cold_start.FROM_FILES", ("disk",))
    run = profile_tiny(cold=True, engine="eager,static", new_tokens=4)
    starts = run.document.fresh_starts
    assert [start.link for start in starts] == ["disk"]
    assert [set(files) for files in forgotten] == [set(tiny_folder.iterdir())]
    for start in starts:
        assert list(start.engines) == ["eager", "static"]
        assert start.load_bytes == run.model.storage_bytes
        # Importing torch takes a second; the second request to a tiny model takes almost no time.
        assert 0 < start.engines["eager"].second_s < start.launch_s
    assert [item.silence_s for item in run.document.after_silence] == [0.0, 0.1]
    first, *_, silence, pays = engines.cold(profiler.read_run(run.folder)).blocks[0].lines
    assert "a fresh process: imports" in first
    assert "its weights from the disk" in first
    assert "after an idle time of 0 s:" in silence
    assert "static" in pays
    assert "pays off" in pays
