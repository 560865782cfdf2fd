"""The acceptance script on simulated cards: python -m tests.simulated.acceptance [--whole] [CARD ...]"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from .guard import why_not
from .host import SimulatedTime
from .scenario import Scenario
from .truth import A100, H100, T4, Truth
from .world import World, simulated

_SCRIPT = Path(__file__).parents[1] / "gpu" / "acceptance.py"

CARDS = {
    "H100": H100.but(launch_s=20e-6),
    "A100": A100.but(launch_s=20e-6),
    "T4": T4.but(launch_s=35e-6),
}


def script() -> ModuleType:
    known = importlib.util.spec_from_file_location("acceptance_on_a_simulated_card", _SCRIPT)
    assert known is not None and known.loader is not None
    module = importlib.util.module_from_spec(known)
    sys.modules[known.name] = module
    known.loader.exec_module(module)
    return module


class Neighbour:
    """A second process on the card."""

    def __init__(self, world: World) -> None:
        self._card = world.card
        self._before = world.card.truth

    def started(self, *_: Any, **__: Any) -> Neighbour:
        self._card.truth = self._before.but(other_processes=1)
        return self

    def kill(self) -> None:
        self._card.truth = self._before

    def wait(self) -> None:
        pass


def scoreboard(truth: Truth, folder: Path, layers: int | None) -> dict[str, Any]:
    acceptance = script()
    began_s = time.process_time()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(simulated(truth))
        stack.enter_context(mock.patch.object(acceptance, "time", SimulatedTime(world.host)))
        neighbour = Neighbour(world)
        stack.enter_context(mock.patch.object(acceptance.subprocess, "Popen", neighbour.started))
        stack.enter_context(mock.patch.object(sys, "argv", ["acceptance.py", "--out", str(folder)]))
        if layers is not None:
            whole = acceptance._bench

            def shortened(*args: Any, **more: Any) -> Any:
                bench = whole(*args, **more)
                bench.model = str(Scenario(bench.model, layers).folder(folder))
                bench.small = str(Scenario(bench.small, layers).folder(folder))
                return bench

            stack.enter_context(mock.patch.object(acceptance, "_bench", shortened))
        code = acceptance.main()
    found: dict[str, Any] = json.loads((folder / "scoreboard.json").read_text())
    return {**found, "code": code, "processor_s": time.process_time() - began_s}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.acceptance", description=__doc__)
    parser.add_argument("cards", nargs="*", default=list(CARDS))
    parser.add_argument("--layers", type=int)
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no card can be simulated here: {reason}.")
    for name in asked.cards:
        with tempfile.TemporaryDirectory(prefix="roofscope-acceptance-") as folder:
            kept_nowhere = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder})
            with kept_nowhere:
                found = scoreboard(CARDS[name], Path(folder), asked.layers)
        print(name, found["passed"], found["failed"], found["not_run"], found["seconds"], found["processor_s"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
