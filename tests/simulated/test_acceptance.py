"""The acceptance script on simulated GPUs: it passes on a sound one, and a fault of each group fails its own check.

No kernel is traced, and no memory controller counts: the card's log is compared in the other tests of this folder.
"""

from __future__ import annotations

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

from .host import SimulatedTime
from .scenario import Scenario
from .truth import H100, T4, Truth
from .world import simulated

sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # the script and its claims

pytestmark = pytest.mark.slow

Planted = contextlib.AbstractContextManager[Any]
# On the host of an H100, eager transformers takes 25 to 30 ms for a decode step of Mistral-7B, about 1,400 launches. An
# operator on the host's own small tensors costs the same Python and overhead as a launch.
CARD = H100.but(launch_s=20e-6, host_operator_s=20e-6, plan_s=36e-3)


@contextlib.contextmanager
def on_card(folder: Path, *truths: Truth) -> Iterator[Any]:
    """Yield the script as a module, on simulated cards and on the clock of a simulated host.

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
        with mock.patch("profiler.loading.source.preset_names", return_value=("gpt2",)):
            return fits(*args, **more)

    def neighbour(*_: Any) -> Any:
        """Stand in for the second process that the script starts on the card."""
        world.card.truth = world.card.truth.but(other_processes=1)
        return mock.Mock()

    gc.freeze()  # each attempt ends with a collection, which would scan all of torch and transformers every time
    try:
        with (
            simulated(*truths) as world,
            mock.patch("claims.machine.time", SimulatedTime(world.host)),
            mock.patch("claims.machine.subprocess", mock.Mock(Popen=neighbour)),
            mock.patch.object(acceptance, "_bench", short),
            mock.patch.object(Bench, "run", brief),
            mock.patch("claims.times._INTERLEAVED", 2),
            mock.patch("profiler.checks.doctor.preset_fits", of_one_preset),
            mock.patch("profiler.report.write.write_reports"),
            mock.patch("profiler.run.measure._TRIALS_LEAST_S", math.inf),
        ):
            yield acceptance
    finally:
        gc.unfreeze()


def changed(name: str, change: Callable[..., Any]) -> Callable[[], Planted]:
    """Apply `change` to the results and the arguments of a function or a method, within the context."""

    def plant() -> Planted:
        right = pkgutil.resolve_name(name)
        return mock.patch(name, lambda *args, **more: change(right(*args, **more), *args))

    return plant


def other_tokens(tokens: Any, engine: Any, *_: Any) -> Any:
    return torch.full(tokens.shape, 7) if engine.name == "graph" else tokens


def faster(cell: Any) -> Any:
    return replace(cell, low_s=cell.low_s / 4, high_s=cell.high_s / 4) if cell.batch_size == 8 else cell


FAULTS: dict[str, tuple[str, str, str, Callable[[], Planted]]] = {
    "a ceiling halved": (
        "roofs", "bfloat16 product", "bfloat16 product measured twice",
        changed("claims.ceilings.measure_gemm", lambda ceiling, *_: replace(ceiling, per_s=ceiling.per_s / 2)),
    ),
    "other tokens": (
        "tokens", "tokens: graph = eager", "tokens: graph = eager",
        changed("claims.tokens.greedy_tokens", other_tokens),
    ),
    "counters twice as high": (
        "counters", "counters of a known stream", "counters / bytes of a known stream",
        changed("profiler.device.telemetry._gpm_values", lambda values, *_: [2 * value for value in values]),
    ),
    "a faster step of more sequences": (
        "time", "forecasts grow with the batch", "forecasts grow with the batch",
        changed("claims.times.forecast_run", lambda found, *_: replace(found, cells=tuple(map(faster, found.cells)))),
    ),
    "half the peak": (
        "doubling", "doubling", "predicted / measured peak memory",
        changed("profiler.measure.subject.Subject.predicted_peak", lambda nbytes, *_: nbytes // 2),
    ),
}  # fmt: skip
"""Each with its group, the attempt that is made with and without it, and the check that must fail."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name == "other tokens")) for name in FAULTS]
)
def test_a_planted_fault_fails_its_check(name: str, tmp_path: Path) -> None:
    group, attempt, check, plant = FAULTS[name]
    results = []
    for number, planted in enumerate((contextlib.nullcontext, plant)):
        with on_card(tmp_path / str(number), CARD) as acceptance, planted():
            bench = acceptance._bench(tmp_path / str(number), dry_run=False)
            [made] = [each for each in acceptance.groups()[group](bench) if each.name == attempt]
            results.append({found.name: found.passed for found in acceptance.checks(bench, [made])})
    sound, broken = results
    assert False not in sound.values()
    assert broken[check] is False


def test_the_script_runs_to_its_end_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is on the clock of the simulated host, whose launches take as long as those of Colab's T4."""
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
