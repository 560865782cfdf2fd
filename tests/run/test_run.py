"""The files and figures of the main job, and what it measures besides its cells: overhead, replays, caches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hurry import with_effort
from raw_samples import read_records

import profiler
from profiler.counting.operators import Linear
from profiler.effort import STANDARD
from profiler.errors import OutOfTimeError
from profiler.facts.overhead import OverheadSamples
from profiler.forecast.command import run_facts
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CELL_COLUMNS
from profiler.judge.regimes import Regime
from profiler.report.changes import linears
from profiler.run import setup as foundation

pytestmark = pytest.mark.slow


def test_a_run_of_a_real_model_has_all_files_and_its_figures_hold_together(gguf_file: Path, tmp_path: Path) -> None:
    run = profiler.profile(
        str(gguf_file), prompt_lens=[64, 128], batch_sizes=[1, 2], new_tokens=16, no_trials=True, out=tmp_path / "run"
    )
    names = {path.name for path in run.folder.iterdir()}
    assert names == {
        "run.json", "samples.jsonl", "cells.csv", "operators.csv", "config.json", "report.html",
    }  # fmt: skip
    cells = run.cells
    assert tuple(cells.columns) == CELL_COLUMNS
    assert len(cells) == 2 * 2 * 2
    assert (cells["status"] == "ok").all()
    assert cells[list(TERMS)].sum(axis=1).to_numpy() == pytest.approx(cells["latency_s"].to_numpy(), rel=1e-9)
    assert (cells["latency_low_s"] <= cells["latency_s"]).all()
    assert (cells["latency_s"] <= cells["latency_high_s"]).all()
    tokens = cells["batch_size"] * cells["prompt_len"].where(cells["phase"] == "prefill", 1)
    assert (cells["tokens_per_s"] * cells["latency_s"]).to_numpy() == pytest.approx(tokens.to_numpy(float))
    assert (cells["flops_per_s"] * cells["latency_s"]).to_numpy() == pytest.approx(cells["model_flops"].to_numpy(float))
    assert (cells["executed_bytes"] >= cells["model_bytes"]).all()
    assert set(cells["regime"]) <= set(get_args(Regime)) - {"link-bound"}, "no weight here crosses a link"
    assert cells["mfu"].isna().all(), "a CPU has no datasheet here"
    assert (cells["peak_memory_bytes"] > 4 * 134_515_008).all()


HELD_UP_S, UNDISTURBED_S = 10.0, 1e-6


@pytest.mark.parametrize(("first_s", "most"), [(HELD_UP_S, 2), (UNDISTURBED_S, 1)], ids=["slow", "incomplete"])
def test_overhead_that_was_held_up_is_measured_again(
    first_s: float, most: int, profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process slows the overhead model's first steps to ten seconds, or leaves no time for a batch size.

    It ends before the cells are timed.
    """
    measured, planted = foundation.measure_overhead, iter([(first_s, most), (UNDISTURBED_S, 2)])

    def at_first_held_up(*arguments: Any, **named: Any) -> list[OverheadSamples]:
        (step_s, largest), in_time = next(planted), measured(*arguments[:5], 60.0, *arguments[6:], **named)
        found = [OverheadSamples(item.engine, item.phase, item.batch_size, (step_s,) * 8) for item in in_time]
        return [item for item in found if item.phase == "prefill" or item.batch_size <= largest]

    monkeypatch.setattr(foundation, "measure_overhead", at_first_held_up)
    run = profile_tiny(batch_sizes=[1, 2], budget_s=60)
    records = [record for record in read_records(run.folder) if record["kind"] == "dispatch"]
    times_s = [item["alone_s"][0] for item in records]
    assert (times_s[:3], times_s[-1]) == ([first_s] * 3, UNDISTURBED_S)
    assert [item["batch_size"] for item in records if item["phase"] == "decode"][:2] == [1, 2]
    assert (run.cells["overhead_s"] == UNDISTURBED_S).all()
    assert run.document.ceilings.overhead_s == {
        "eager": {phase: {1: UNDISTURBED_S, 2: UNDISTURBED_S} for phase in ("prefill", "decode")}
    }


@pytest.mark.parametrize("most", [2, 1], ids=["again", "completed"])
def test_overhead_that_fails_later_is_missing_only_where_nothing_was_measured(
    most: int, profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first measurement has decode steps of at most `most` sequences; the steps of a second one do not end."""
    measured, failed = foundation.measure_overhead, list[bool]()

    def once(*arguments: Any, **named: Any) -> list[OverheadSamples]:
        if failed:
            with arguments[6]():
                raise OutOfTimeError("its steps did not end")
            return []
        failed.append(True)
        in_time = measured(*arguments[:5], 60.0, *arguments[6:], **named)
        found = [OverheadSamples(item.engine, item.phase, item.batch_size, (HELD_UP_S,) * 8) for item in in_time]
        return [item for item in found if item.phase == "prefill" or item.batch_size <= most]

    monkeypatch.setattr(foundation, "measure_overhead", once)
    run = profile_tiny(batch_sizes=[1, 2])
    assert failed
    assert [part.what for part in run.document.missing] == ["the CPU overhead of batch 2"][: 2 - most]
    assert not run.document.failed  # the budget cut it: all cells are measured, and the exit code is 0
    assert run.document.ceilings.overhead_s["eager"]["decode"] == dict.fromkeys(range(1, most + 1), HELD_UP_S)


def test_linears_are_replayed_at_rows_between_those_of_the_cells(
    profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells have 1 and 4 sequences, and 8 and 32 rows of prompts: 2 and 16 are replayed and used for forecasts.

    Replays end after their samples, because other processes may use up the time of a short budget.
    """
    with_effort(monkeypatch, shares=STANDARD.shares | {"replays between cells": 600.0})
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
def test_a_run_times_the_linears_of_every_format(profile_tiny: Callable[..., profiler.Run]) -> None:
    run = profile_tiny(quant="nf4", budget_s=60, no_trials=False)
    found = run.document.format_linears
    assert found is not None
    assert [item.format for item in found.times][:2] == ["nf4", "bfloat16"]
    assert {item.rows for item in found.times} <= {1, 8, 64}
    assert all(item.time.median_s > 0 and not item.graph for item in found.times), "a CPU has no graph"
    assert found.times[0].kernel in ("bitsandbytes::gemv_4bit", "bitsandbytes::dequantize_4bit"), "by the CPU's units"
    [table, lines] = linears(run)
    assert [row[0] for row in table.rows] == list(dict.fromkeys(item.format for item in found.times))
    assert len(lines.lines) <= 3, "a format that saves nothing has a line"
