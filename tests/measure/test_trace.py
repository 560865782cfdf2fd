"""Kernels, gaps, the parts of a step and of `generate`, unexplained time: by hand, and in a small real model."""

import contextlib
import csv
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from machines import HOST, FakeClock

import profiler
from profiler.device.machine import Machine
from profiler.grid.cells import Cell, CellKey
from profiler.judge.breakdown import TERMS
from profiler.judge.engine_differences import PART_NAMES
from profiler.measure.hooks_and_traces import TRACE, Interval, Pieces, activity, count_reads, kernel_name, trace_cell
from profiler.report import time_breakdown
from profiler.report.changes import generate_lines
from profiler.store.folder import read_run

KEY = CellKey("decode", Cell(1, 16, 8))


def test_intervals_add_up() -> None:
    """Two intervals overlap and one is inside another; a pause of 2 ms counts, one of half a microsecond does not."""
    found = activity(
        KEY,
        [
            Interval(0.0, 3e-3, "a"), Interval(2e-3, 4e-3, "b"), Interval(2.5e-3, 3e-3, "a"),
            Interval(6e-3, 7e-3, "b"), Interval(7e-3 + 0.5e-6, 8e-3, "c"),
        ],
    )  # fmt: skip
    assert [(each.name, each.calls, round(each.seconds * 1e3, 6)) for each in found.longest] == [
        ("a", 2, 3.5), ("b", 2, 3.0), ("c", 1, 0.9995)
    ]  # fmt: skip
    assert found.kernels == 5
    assert found.busy_s == pytest.approx(4e-3 + 2e-3 - 0.5e-6)
    assert (found.gaps, found.gap_s) == (1, pytest.approx(2e-3 + 0.5e-6))
    assert found.longest_s == pytest.approx(3e-3)
    assert found.busy_share == pytest.approx(6 / 8, rel=1e-3)
    assert found.median_s == pytest.approx(1e-3)
    assert activity(KEY, []).busy_share == 0.0


def test_a_named_range_on_the_card_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """`record_function` around two kernels of 1 ms and a pause of 2 ms is a user annotation of 4 ms on the device."""

    def event(start_us: float, end_us: float, *, annotation: bool) -> Any:
        return SimpleNamespace(
            name="triton_poi", device_type=torch.autograd.DeviceType.CUDA, cpu_parent=None,
            is_user_annotation=annotation, time_range=SimpleNamespace(start=start_us, end=end_us),
        )  # fmt: skip

    kernels = [event(start_us, start_us + 1000.0, annotation=False) for start_us in (0.0, 3000.0)]
    events = [*kernels, event(0.0, 4000.0, annotation=True)]
    profiler_of_torch = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(
        "profiler.measure.hooks_and_traces.recorded", lambda *, cuda: contextlib.nullcontext(profiler_of_torch)
    )
    subject: Any = SimpleNamespace(
        engines={"eager": SimpleNamespace(decode=lambda state: None)},
        start=lambda cell: lambda: None,
        machine=SimpleNamespace(is_cuda=True, clock=FakeClock()),
    )
    [decode] = trace_cell(subject, Cell(1, 0, 8, context_len=16), None)
    assert (decode.kernels, decode.busy_s, decode.gap_s) == (2, pytest.approx(2e-3), pytest.approx(2e-3))


@pytest.mark.ci
def test_a_step_has_the_operators_that_torch_dispatches(profile_tiny: Callable[..., profiler.Run]) -> None:
    """Two layers have 2 x 7 linears and a head; each is one operator among many more small ones."""
    traced = profile_tiny(prompt_lens=[16], batch_sizes=[1, 2], new_tokens=6, trace=True)
    assert len(traced.document.activity) == 4
    for item in traced.document.activity:
        assert 15 < item.kernels < 1000
        assert 0 < item.busy_share <= 1
        assert item.busy_s >= item.longest_s > 0
        assert sum(kernel.seconds for kernel in item.longest) <= item.busy_s * 1.001
    lines = [line for line in time_breakdown.activity_lines(traced) if "is not explained" not in line]
    assert len(lines) == 8, "a line each, and one with the longest operators"


@pytest.mark.slow
def test_the_residual_is_named(profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """If norms sleep 20 ms in the model but not in its overhead model, they have the residual of a decode step.

    In a prefill the norms are replayed, so they are kernels and not a residual.
    """
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaRMSNorm.forward

    def sleepy(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        if self.weight.shape[0] == 64 and hidden_states.shape[0] == 3:  # the model's batch, not the overhead model's
            time.sleep(20e-3)
        return plain(self, hidden_states)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", sleepy)
    monkeypatch.setattr(
        "profiler.measure.overhead.overhead_model_by_itself", Mock(side_effect=RuntimeError("no overhead model today"))
    )
    run = profile_tiny(prompt_lens=[16], batch_sizes=[3], budget_s=4, no_trials=False)
    assert not (run.folder / TRACE).exists(), "no trace was requested"
    assert run.document.activity == ()
    found = {item.phase: item.unexplained_in_s for item in read_run(run.folder).document.evidence}
    name, excess_s = next(iter(found["decode"].items()))
    assert name == "norm", found["decode"]
    assert excess_s > 4 * 20e-3  # five norms in two layers
    [prefill] = run.cells[run.cells["phase"] == "prefill"].to_dict("records")
    assert prefill["kernel_s"] > 4 * 20e-3
    assert not found.get("prefill")
    assert all("norm (" in line for line in time_breakdown.activity_lines(run))


def test_parts_add_up_to_the_step() -> None:
    pieces = Pieces(Machine(HOST.device, clock=FakeClock(1e-3, 0.0, 2e-3)))
    pieces.start()
    pieces.enter("mlp")
    pieces.enter("mlp")
    assert pieces.finish() == {"between modules": 1e-3, "mlp": 2e-3}


KERNELS = list(csv.DictReader(Path(__file__).with_name("kernel_names.csv").read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row["name"])
def test_a_kernel_has_the_name_of_what_it_does(row: dict[str, str]) -> None:
    assert kernel_name(row["symbol"]) == row["name"]


_DELAY_S = 0.02


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_reads_of_values_are_counted(mode: Any) -> None:
    values = torch.arange(4)

    def read() -> None:
        values.sum().item()
        bool(values.max() == 0)
        float(values[0])
        values + values  # no read

    with mode():
        assert count_reads(read) == 3


@pytest.mark.slow
def test_the_overhead_of_generate(profile_tiny: Callable[..., profiler.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of the stopping criteria waits 20 ms; our own loop has no such check."""
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    check = StoppingCriteriaList.__call__

    def slowly(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(_DELAY_S)
        return check(self, *args, **named)

    monkeypatch.setattr(StoppingCriteriaList, "__call__", slowly)
    run = profile_tiny(batch_sizes=[2], new_tokens=5, engine="generate", budget_s=2)
    assert run.document.engine.names == ("eager", "generate")
    decode, once = sorted(run.document.generate, key=lambda item: item.phase)
    assert decode.tax_s > _DELAY_S / 2 < once.tax_s
    assert set(decode.parts_s) == set(PART_NAMES)
    assert sum(decode.parts_s.values()) == pytest.approx(decode.tax_s)
    assert max(decode.parts_s, key=lambda name: decode.parts_s[name]) == "stopping"
    assert decode.parts_s["stopping"] >= _DELAY_S
    assert decode.reads_a_token is not None
    assert decode.reads_a_token >= 1  # the read of whether all sequences are done
    [row] = [row for row in run.results if row.engine == "generate" and row.phase == "decode"]
    assert row.generate_s == decode.tax_s
    assert sum(getattr(row, term) for term in TERMS) == pytest.approx(row.latency_s, rel=1e-9)
    [own] = [row for row in run.results if row.engine == "eager" and row.phase == "decode"]
    assert own.generate_s == 0
    twice = replace(decode, repetitions=2, low_s=decode.tax_s / 2, high_s=2 * decode.tax_s)
    claimed = replace(run.document, generate=(twice,))
    [line] = generate_lines(replace(run, document=claimed))
    assert "stopping criteria 2" in line
