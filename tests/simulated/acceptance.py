"""The acceptance script on simulated cards: python -m tests.simulated.acceptance [H100] [A100] [L4] [T4] [RTX-4090]

Without options it runs everything: its own models, all layers, every format and sample, and eager steps with a real
host's times. That takes a few minutes of one core per card. --only selects groups; --layers 1 cuts models and samples,
and doubles no batch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from profiler.checks import doctor

from .host import SimulatedTime
from .scenario import Scenario, apart
from .tools import Neighbour, kineto, ncu
from .truth import A100, H100, L4, RTX_4090, T4, Truth
from .world import World, simulated

sys.path.append(str(Path(__file__).parents[1] / "gpu"))  # the script and its claims

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


def scoreboard(truths: Sequence[Truth], folder: Path, *options: str, layers: int | None = None) -> dict[str, Any]:
    """Return the script's scoreboard on these cards, whose `seconds` are those of the simulated host."""
    with contextlib.ExitStack() as stack:
        acceptance = stack.enter_context(on_card(*truths, hurried=layers is not None))
        stack.enter_context(mock.patch.object(sys, "argv", ["acceptance.py", "--out", str(folder), *options]))
        if layers:
            stack.enter_context(cut(acceptance, folder.parent, layers))
        code = acceptance.main()
    return {**json.loads((folder / "scoreboard.json").read_text()), "code": code}


@contextlib.contextmanager
def on_card(*truths: Truth, hurried: bool = True) -> Iterator[Any]:
    """Yield the script as a module, on simulated cards and on the clock of a simulated host."""
    acceptance = importlib.reload(importlib.import_module("acceptance"))  # its time begins at its import
    gc.freeze()  # each attempt ends with a collection, which would scan all of torch and transformers every time
    with contextlib.ExitStack() as stack:
        stack.callback(gc.unfreeze)
        world = stack.enter_context(simulated(*truths, hurried=hurried))
        for name, stands_in in _outside(acceptance, world).items():
            stack.enter_context(mock.patch(name, stands_in))
        yield acceptance


def _outside(acceptance: Any, world: World) -> dict[str, Any]:
    """Replace other processes and torch's profiler for the script."""
    from claims.counts import ncu_target

    def target(model: str) -> None:
        bench = acceptance._bench(Path(model).parent, dry_run=False)
        bench.model = model
        ncu_target(bench)

    return {
        "claims.machine.time": SimulatedTime(world.host),
        "claims.machine.subprocess": SimpleNamespace(Popen=partial(Neighbour, world)),
        "claims.trace.recorded": kineto(world),
        "claims.counts.subprocess": SimpleNamespace(run=ncu(world, target)),
        "claims.counts.shutil": SimpleNamespace(which=lambda name: name),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="*", default=list(CARDS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--only", metavar="GROUP[,GROUP]")
    asked = parser.parse_args()
    bad = 0
    for name in asked.cards:
        print(f"== {name}", flush=True)
        with apart() as folder:
            options = ["--only", asked.only] if asked.only else []
            found = scoreboard([CARDS[name]], folder / "out", *options, layers=asked.layers)
        in_time = found["seconds"] < 60 * found["minutes"]
        bad += found["failed"] + (not in_time)
        print(
            f"{name}: {found['seconds']:.0f} s of its host, {'within' if in_time else 'BEYOND'} its minutes", flush=True
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
