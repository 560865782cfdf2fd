"""`forecast --check`: cells are run here, compared with their forecast, and logged for later forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import profiler
from profiler.errors import RequestError
from profiler.forecast.check import check_forecast
from profiler.forecast.command import CheckedCell, ForecastRequest, append_checks, checks_line, read_checks
from profiler.run.options import Options

TINY_RUN = Path(__file__).parents[1] / "data" / "tiny_run"


@pytest.mark.slow
def test_a_forecast_is_run_and_its_errors_are_kept(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Any
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    run = profiler.profile(
        str(tiny_folder), prompt_lens=[8, 32], batch_sizes=[1, 2, 4], new_tokens=8, budget_s=1, no_levers=True,
        out=tmp_path / "run",
    )  # fmt: skip
    arguments = ("forecast", str(run.folder), "--batch-sizes", "2,8", "--prompt-lens", "16", "--check", "--budget", "1")
    outcome = roofscope(*arguments, "--format", "json")
    # The model was a local folder: run.json has its name, but not its path.
    assert outcome.code == 2
    assert "--model" in outcome.err
    outcome = roofscope(*arguments, "--model", str(tiny_folder), "--format", "json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)["check"]
    assert {(row["phase"], row["batch_size"]) for row in rows} == {
        (phase, batch) for phase in ("prefill", "decode") for batch in (2, 8)
    }
    for row in rows:
        assert row["error"] == pytest.approx(row["forecast_s"] / row["measured_s"] - 1)
        assert sum(row["terms"].values()) == pytest.approx(row["forecast_s"] - row["measured_s"], abs=1e-9)
    assert len(read_checks()) == 4
    shown = roofscope("forecast", str(run.folder), "--keep")
    assert "On this machine forecasts have been" in " ".join(shown.out.split())
    assert "of 4 checked cells" in " ".join(shown.out.split())
    page = (run.folder / "report.html").read_text()
    assert "What would happen" in page


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ("none", {"quant": "nf4", "double_quant": True, "compute_dtype": "float16"}),
        ("fp4", {"quant": "fp4", "double_quant": False, "compute_dtype": "auto"}),
    ],
)
def test_the_model_is_run_as_in_the_run(
    quant: str, expected: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, device, threads and the options of its format; another format has its own options."""
    document, threads = json.loads((TINY_RUN / "run.json").read_text()), torch.get_num_threads() + 1
    document["model"] |= {"quant": "nf4", "double_quant": True, "compute_dtype": "float16", "attention": "eager"}
    document["device"]["threads"] = threads
    (tmp_path / "run.json").write_text(json.dumps(document))
    asked: list[tuple[Options, int]] = []

    def prepare(options: Options) -> None:
        asked.append((options, torch.get_num_threads()))
        raise RequestError("only read.")

    monkeypatch.setattr("profiler.forecast.check.prepare", prepare)
    cell = SimpleNamespace(phase="prefill", batch_size=2, prompt_len=8, context_len=0, depth=8, fits=True)
    answer: Any = SimpleNamespace(cells=(cell,))
    with pytest.raises(RequestError, match="only read"):
        check_forecast(tmp_path, ForecastRequest(quant=quant), answer, 1.0, "tiny-llama")
    [(options, threads_then)] = asked
    assert {name: getattr(options, name) for name in expected} == expected
    assert (options.attn, options.device, threads_then) == ("eager", "cpu", threads)
    assert (options.prompt_lens, options.batch_sizes, options.context_lens) == ([8], [2], [])
    assert torch.get_num_threads() == threads - 1


def test_checks_of_other_machines_and_torn_lines_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert checks_line("a CPU", 2) == ()
    cells = [
        CheckedCell("a CPU", 2, "m", "decode 1 x 8", 1.1, 1.0, True, "2026-11-20"),
        CheckedCell("a CPU", 2, "m", "decode 2 x 8", 0.8, 1.0, False, "2026-11-20"),
        CheckedCell("a CPU", 4, "m", "decode 2 x 8", 9.0, 1.0, False, "2026-11-20"),
    ]
    append_checks(cells)
    with (tmp_path / "roofscope" / "checks.jsonl").open("a") as file:
        file.write("{torn")
    [line] = checks_line("a CPU", 2)
    assert "15.0 % off" in line
    assert "2 checked cells, 1 of them inside" in line
