"""The acceptance script on simulated cards: python -m tests.simulated.acceptance [H100] [A100] [T4]

Without an option whole: its own models, all layers, every format and sample, eager steps of a real host, which takes a
minute or two of a core for each card. --layers 1 cuts models, formats and samples, and doubles no batch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from .host import SimulatedTime
from .native import why_not
from .scenario import Scenario
from .truth import A100, H100, T4, Truth
from .world import World, simulated

_SCRIPT = Path(__file__).parents[1] / "gpu" / "acceptance.py"

_CUT_FORMATS = ("none", "int8wo")

_UNCLOCKED = ("profiler.job.run.judge_folder", "profiler.report.page.write_reports")

# A decode step of Mistral-7B is about 1,400 launches; eager transformers takes 25 to 30 ms for it beside an H100 or an
# A100, and TinyLlama's 1,000 take some 35 ms on Colab's host beside a T4. An operator on the host's own small tensors
# costs as much Python and dispatch as one that is launched.
CARDS = {
    "H100": H100.but(launch_s=20e-6, host_operator_s=20e-6),
    "A100": A100.but(launch_s=20e-6, host_operator_s=20e-6),
    "T4": T4.but(launch_s=35e-6, host_operator_s=35e-6),
}


def scoreboard(truth: Truth, folder: Path, layers: int | None = None) -> dict[str, Any]:
    """What the script finds on this card, with `seconds` of its host's clock and `processor_s` that it took here.

    Judging and drawing take the simulated host no time: what they took here is `drawing_s`, and `in_time` says whether
    all of it together keeps the script's own limit.
    """
    began_s = time.process_time()
    asked = mock.patch.object(sys, "argv", ["acceptance.py", "--out", str(folder)])
    drawing: list[float] = []
    with contextlib.ExitStack() as stack:
        acceptance = stack.enter_context(on_card(truth, hurried=layers is not None))
        stack.enter_context(asked)
        for name in _UNCLOCKED:
            stack.enter_context(_timed(name, drawing))
        if layers:
            stack.enter_context(cut(acceptance, folder, layers))
        code = acceptance.main()
    found: dict[str, Any] = json.loads((folder / "scoreboard.json").read_text())
    return {
        **found,
        "code": code,
        "processor_s": time.process_time() - began_s,
        "drawing_s": sum(drawing),
        "in_time": found["seconds"] + sum(drawing) < acceptance.TIME_LIMIT_S,
    }


@contextlib.contextmanager
def _timed(name: str, seconds: list[float]) -> Iterator[None]:
    """Within, the seconds of a core that each call of this function takes are kept."""
    module, _, function = name.rpartition(".")
    whole = getattr(importlib.import_module(module), function)

    def call(*args: Any, **more: Any) -> Any:
        began_s = time.process_time()
        try:
            return whole(*args, **more)
        finally:
            seconds.append(time.process_time() - began_s)

    with mock.patch(name, call):
        yield


def _script() -> Any:
    known = importlib.util.spec_from_file_location("acceptance_on_a_simulated_card", _SCRIPT)
    assert known is not None
    assert known.loader is not None
    module = importlib.util.module_from_spec(known)
    sys.modules[known.name] = module
    known.loader.exec_module(module)
    return module


class _Neighbour:
    """The second process that the script starts on the card."""

    def __init__(self, world: World, *_: Any, **__: Any) -> None:
        self._card = world.card
        self._alone = world.card.truth
        self._card.truth = self._alone.but(other_processes=1)

    def kill(self) -> None:
        self._card.truth = self._alone

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def on_card(truth: Truth, *, hurried: bool = True) -> Iterator[Any]:
    """The script, its clock that of a simulated host; what it starts runs on the simulated card."""
    acceptance = _script()
    with (
        simulated(truth, hurried=hurried) as world,
        mock.patch.object(acceptance, "time", SimulatedTime(world.host)),
        mock.patch.object(acceptance, "subprocess", SimpleNamespace(Popen=partial(_Neighbour, world))),
        mock.patch.object(acceptance, "shutil", SimpleNamespace(which=lambda _name: None)),
    ):
        yield acceptance


@contextlib.contextmanager
def cut(acceptance: Any, folder: Path, layers: int) -> Iterator[None]:
    """All checks but the doubling's, with so many layers of each model, two formats, few tokens, no trials beside."""
    whole, run, shares = acceptance._bench, acceptance.Bench.run, acceptance._shares

    def short(*args: Any, **more: Any) -> Any:
        bench = whole(*args, **more)
        for name in ("model", "small"):
            setattr(bench, name, str(Scenario(getattr(bench, name), layers).folder(folder)))
        return bench

    def brief(bench: Any, name: str, model: str | None = None, **options: Any) -> Any:
        if model and not Path(model).exists():
            model = str(Scenario(model, layers).folder(folder))
        return run(bench, name, model, **{"new_tokens": 8, "budget_s": 2.0, **options})

    def formats(bench: Any) -> list[tuple[str, float]]:
        return [(name, share) for name, share in shares(bench) if name in _CUT_FORMATS]

    with (
        mock.patch.object(acceptance, "_bench", short),
        mock.patch.object(acceptance, "_shares", formats),
        mock.patch.object(acceptance, "CHECKS", tuple(c for c in acceptance.CHECKS if c is not acceptance.doubling)),
        mock.patch.object(acceptance.Bench, "run", brief),
        mock.patch.object(acceptance, "_INTERLEAVED", 2),
        mock.patch("profiler.report.page.write_reports"),
        mock.patch("profiler.job.measuring._LEVERS_LEAST_S", math.inf),
    ):
        yield


def _duration(name: str, found: dict[str, Any]) -> str:
    groups = ", ".join(f"{group} {seconds:.0f}" for group, seconds in found["took_s"].items())
    return (
        f"{name}: {found['seconds']:.0f} s of its host ({groups}) and {found['drawing_s']:.0f} s to judge and draw,"
        f" {'within' if found['in_time'] else 'BEYOND'} nine minutes; {found['processor_s']:.0f} s of a core here"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulated.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cards", nargs="*", default=list(CARDS))
    parser.add_argument("--layers", type=int)
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no card can be simulated here: {reason}.")
    failed = 0
    for name in asked.cards:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="roofscope-") as folder, mock.patch.dict(os.environ) as environment:
            environment["XDG_CACHE_HOME"] = folder
            found = scoreboard(CARDS[name], Path(folder), asked.layers)
        failed += found["failed"] + (not found["in_time"])
        print(_duration(name, found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
