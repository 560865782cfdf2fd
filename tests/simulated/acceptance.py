"""The acceptance script on simulated cards: python -m tests.simulated.acceptance [H100] [A100] [L4] [T4] [RTX-4090]

Without options it runs everything: its own models, all layers, every format and sample, and eager steps with a real
host's times. That takes a few minutes of one core per card. --without bitsandbytes,torchao hides optional packages;
--only selects groups; --layers 1 cuts models and samples, and doubles no batch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from profiler.checks import doctor

from .host import SimulatedTime
from .native import why_not
from .scenario import Scenario
from .tools import Neighbour, kineto, ncu, without_packages
from .truth import A100, H100, L4, RTX_4090, T4, Truth
from .world import World, simulated

_SCRIPT = Path(__file__).parents[1] / "gpu" / "acceptance.py"
_UNCLOCKED = ("profiler.run.pipeline.judge_folder", "profiler.report.write.write_reports")

# A decode step of Mistral-7B is about 1,400 launches. On the host of an H100 or A100, eager transformers takes 25 to
# 30 ms for it. TinyLlama's 1,000 launches take about 35 ms on the host of Colab's T4. An operator on the host's own
# small tensors costs the same Python and dispatch as a launch.
_FAST_HOST = {"launch_s": 20e-6, "host_operator_s": 20e-6}
_HEALTHY_4090 = {"float16": 1.55e14, "bfloat16": 1.55e14}
"""Products of healthy cards reach about 160 TFLOP/s (gpus.csv)."""
CARDS = {
    "H100": H100.but(**_FAST_HOST, plan_s=36e-3),  # the time of a cuDNN plan on an H100 with torch 2.11
    "A100": A100.but(**_FAST_HOST),
    "L4": L4.but(**_FAST_HOST),
    "T4": T4.but(launch_s=35e-6, host_operator_s=35e-6),
    "RTX-4090": RTX_4090.but(**_FAST_HOST, flops_per_s={**RTX_4090.flops_per_s, **_HEALTHY_4090}),
}


def scoreboard(
    truths: Sequence[Truth], folder: Path, *options: str, layers: int | None = None, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the script's scoreboard on these cards.

    `seconds` is time on the simulated host's clock, and `processor_s` is CPU time of this process. Judging and drawing
    take no simulated time: their real time is `drawing_s`. `in_time` says whether the sum is within the script's limit.
    """
    began_s = time.process_time()
    drawing: list[float] = []
    with contextlib.ExitStack() as stack:
        acceptance = stack.enter_context(on_card(*truths, hurried=layers is not None, without=without))
        stack.enter_context(mock.patch.object(sys, "argv", ["acceptance.py", "--out", str(folder), *options]))
        for name in _UNCLOCKED:
            stack.enter_context(_timed(name, drawing))
        if layers:
            stack.enter_context(cut(acceptance, folder.parent, layers))
        code = acceptance.main()
    found: dict[str, Any] = json.loads((folder / "scoreboard.json").read_text())
    return {
        **found,
        "code": code,
        "processor_s": time.process_time() - began_s,
        "drawing_s": sum(drawing),
        "in_time": found["seconds"] + sum(drawing) < 60 * found["minutes"],
    }


@contextlib.contextmanager
def _timed(name: str, seconds: list[float]) -> Iterator[None]:
    """Record the CPU seconds of each call of a function, within the context."""
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


def script() -> Any:
    """Return the script as a module."""
    known = importlib.util.spec_from_file_location("acceptance_on_a_simulated_card", _SCRIPT)
    assert known is not None
    assert known.loader is not None
    module = importlib.util.module_from_spec(known)
    sys.modules[known.name] = module
    known.loader.exec_module(module)
    return module


@contextlib.contextmanager
def on_card(*truths: Truth, hurried: bool = True, without: Sequence[str] = ()) -> Iterator[Any]:
    """Run the script on simulated cards, on the clock of a simulated host, and with some packages hidden."""
    acceptance = script()
    gc.freeze()  # each attempt ends with a collection, which would scan all of torch and transformers every time
    with contextlib.ExitStack() as stack:
        stack.callback(gc.unfreeze)
        stack.enter_context(without_packages(without))
        world = stack.enter_context(simulated(*truths, hurried=hurried))
        for name, stands_in in _outside(acceptance, world).items():
            stack.enter_context(mock.patch(name, stands_in))
        yield acceptance


def _outside(acceptance: Any, world: World) -> dict[str, Any]:
    """Replace other processes and torch's profiler for the script."""
    from claims.dram import ncu_target

    def target(model: str) -> None:
        bench = acceptance._bench(Path(model).parent, dry_run=False)
        bench.model = model
        ncu_target(bench)

    return {
        "claims.telemetry.time": SimulatedTime(world.host),
        "claims.telemetry.subprocess": SimpleNamespace(Popen=partial(Neighbour, world)),
        "claims.trace.recorded": kineto(world),
        "claims.dram.subprocess": SimpleNamespace(run=ncu(world, target)),
        "claims.dram.shutil": SimpleNamespace(which=lambda name: name),
    }


def _of_one_preset(fits: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with mock.patch("profiler.loading.source.preset_names", return_value=("gpt2",)):
        return fits(*args, **more)


@contextlib.contextmanager
def cut(acceptance: Any, folder: Path, layers: int) -> Iterator[None]:
    """Cut each model to some layers, with few tokens, no levers and no pages; doctor checks one preset."""
    from claims.bench import Bench

    whole, run = acceptance._bench, Bench.run

    def short(*args: Any, **more: Any) -> Any:
        bench = whole(*args, **more)
        for name in ("model", "small"):
            setattr(bench, name, str(Scenario(getattr(bench, name), layers).folder(folder)))
        return bench

    def brief(bench: Any, name: str, model: str | None = None, **options: Any) -> Any:
        if model and not Path(model).exists():
            model = str(Scenario(model, layers).folder(folder))
        return run(bench, name, model, **{"new_tokens": 8, "budget_s": 2.0, **options})

    with (
        mock.patch.object(acceptance, "_bench", short),
        mock.patch.object(Bench, "run", brief),
        mock.patch("claims.times._INTERLEAVED", 2),
        mock.patch("profiler.checks.doctor._fits", partial(_of_one_preset, doctor._fits)),
        mock.patch("profiler.report.write.write_reports"),
        mock.patch("profiler.run.measure._LEVERS_LEAST_S", math.inf),
    ):
        yield


def _duration(name: str, found: dict[str, Any]) -> str:
    groups = ", ".join(f"{group} {seconds:.0f}" for group, seconds in found["took_s"].items())
    return (
        f"{name}: {found['seconds']:.0f} s of its host ({groups}) and {found['drawing_s']:.0f} s to judge and draw,"
        f" {'within' if found['in_time'] else 'BEYOND'} {found['minutes']:g} minutes;"
        f" {found['processor_s']:.0f} s of a core here"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulated.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cards", nargs="*", default=list(CARDS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--without", default="", metavar="PACKAGE[,PACKAGE]")
    parser.add_argument("--only", metavar="GROUP[,GROUP]")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no card can be simulated here: {reason}.")
    failed = 0
    options = ["--only", asked.only] if asked.only else []
    without = asked.without.split(",") if asked.without else []
    for name in asked.cards:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="roofscope-") as folder, mock.patch.dict(os.environ):
            out = Path(folder) / "out"
            found = scoreboard([CARDS[name]], out, *options, layers=asked.layers, without=without)
        failed += found["failed"] + (not found["in_time"])
        print(_duration(name, found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
