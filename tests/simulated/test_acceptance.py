"""The acceptance script on a simulated GPU: it passes on a sound one within its time, and planted faults fail in it.

No kernel is traced, and no memory controller counts: the card's log is compared in the other tests of this folder.
"""

import contextlib
import gc
import importlib
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from profiler.checks import doctor
from profiler.loading.source import presets

from .host import SimulatedTime
from .scenario import Scenario
from .truth import T4, Truth
from .world import simulated

sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # the script and its claims

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def on_card(folder: Path, truth: Truth) -> Iterator[Any]:
    """Yield the script as a module, on a simulated card and on the clock of a simulated host.

    Each model has one layer. There are few tokens, no changes and no pages, and doctor checks one preset.
    """
    acceptance = importlib.reload(importlib.import_module("acceptance"))  # its time begins at its import
    from claims.bench import Bench

    whole, run, fits = acceptance._bench, Bench.run, doctor.preset_fits

    def short(*args: Any, **more: Any) -> Any:
        bench = whole(*args, **more)
        for name in ("model", "small"):
            setattr(bench, name, str(Scenario(getattr(bench, name), 1).folder(folder)))
        return bench

    def brief(bench: Any, name: str, model: str | None = None, **options: Any) -> Any:
        if model and not Path(model).exists():
            model = str(Scenario(model, 1).folder(folder))
        return run(bench, name, model, **{"new_tokens": 8, "budget_s": 2.0, **options})

    def of_one_preset(*args: Any, **more: Any) -> Any:
        with mock.patch("profiler.loading.source.presets", return_value={"gpt2": presets()["gpt2"]}):
            return fits(*args, **more)

    def neighbour(*_: Any) -> Any:
        """Stand in for the second process that the script starts on the card."""
        world.card.truth = world.card.truth.but(other_processes=1)
        return mock.Mock()

    with (
        simulated(truth) as world,
        mock.patch("claims.machine.time", SimulatedTime(world.host)),
        mock.patch("claims.machine.subprocess", mock.Mock(Popen=neighbour)),
        mock.patch.object(acceptance, "_bench", short),
        mock.patch.object(Bench, "run", brief),
        mock.patch("claims.times._INTERLEAVED", 2),
        mock.patch("profiler.checks.doctor.preset_fits", of_one_preset),
        mock.patch("profiler.report.html.write_report"),
        mock.patch("profiler.run.measure._TRIALS_LEAST_S", math.inf),
    ):
        gc.freeze()  # each attempt ends with a collection, which would scan all of torch and transformers every time
        try:
            yield acceptance
        finally:
            gc.unfreeze()


def test_the_script_runs_to_its_end_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of the simulated host take as long as those of Colab's T4."""
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--out", str(out)])
    with on_card(tmp_path, T4.but(launch_s=35e-6, host_operator_s=35e-6)) as acceptance:
        code = acceptance.main()
    found = json.loads((out / "scoreboard.json").read_text())
    assert [check for check in found["checks"] if check["passed"] is False] == []
    assert code == 0
    assert found["passed"] > 50
    assert found["imports_s"] + sum(found["took_s"].values()) == pytest.approx(found["seconds"], rel=0.01)
    assert found["seconds"] < 60 * found["minutes"]


def halved(ceiling: Any, *_: Any) -> Any:
    return replace(ceiling, per_s=ceiling.per_s / 2)


def other_tokens(tokens: Any, engine: Any, *_: Any) -> Any:
    return torch.full(tokens.shape, 7) if engine.name == "graph" else tokens


@pytest.mark.parametrize(
    ("group", "attempt", "check", "function", "fault"),
    [
        ("ceilings", "float16 matmul", "float16 matmul measured twice", "claims.ceilings.measure_gemm", halved),
        ("tokens", "tokens: graph = eager", "tokens: graph = eager", "claims.tokens.greedy_tokens", other_tokens),
    ],
)
def test_a_planted_fault_fails_its_check(
    group: str, attempt: str, check: str, function: str, fault: Callable[..., Any], tmp_path: Path
) -> None:
    """The test above is of the same checks without a fault."""
    right = pkgutil.resolve_name(function)
    with (
        on_card(tmp_path, T4) as acceptance,
        mock.patch(function, lambda *args, **more: fault(right(*args, **more), *args)),
    ):
        bench = acceptance._bench(tmp_path, dry_run=False)
        attempts = [each for each in acceptance.groups()[group](bench) if each.name == attempt]
        assert {found.name: found.passed for found in acceptance.checks(bench, attempts)}[check] is False
