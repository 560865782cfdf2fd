"""Commands and options of earlier versions, each with what to use instead."""

from __future__ import annotations

_MEASURE_ON_IT = "use `forecast MODEL --on GPU` for published figures, or `run` on the GPU itself"
_SEVERAL_GPUS = "use `count --tp`, `place --tp --link`, or `run --tp` on the GPUs themselves"
_MEASURE_CELLS = "measure the cells with `run --prompt-lens ... --batch-sizes ...`"
_RERUN = "measure the new run with `run`, and pass its folder: `gate BASE NEW`"
_ONE_LOAD = "`rent` compares GPUs at their largest batch within --max-ttft-ms and --max-tpot-ms"
_COSTS = "use `explore` for the map, or `count --format csv` for the figures"
_SEVERAL_CELLS = "use `plot RUN... throughput`"
REMOVED = {
    "selftest": "run `python tests/gpu/acceptance.py` of the repository",
    "run --cold": "`run` and `why` report first calls",
    "run --prefix": "use `count --prefix`",
    "ceilings --out": _MEASURE_ON_IT,
    "ceilings --out-dtypes": _MEASURE_ON_IT,
    "ceilings --plot": "use `ceilings --link N --format json`",
    "count --plot map": _COSTS,
    "count --plot intensity": _COSTS,
    "count --plot latency": _COSTS,
    "run --no-levers": "use `run --no-trials`",
    "plot split": "use `plot RUN breakdown`",
    "plot intensity": "use `plot RUN roofline`",
    "plot depth": _SEVERAL_CELLS,
    "plot steps": "use the p90_s and p99_s of cells.csv",
    "plot engines": "use `plot RUN waterfall`",
    "plot forecast": "use `forecast RUN --format json`",
    "plot precisions": _SEVERAL_CELLS,
    "plot devices": _SEVERAL_CELLS,
    "forecast --tp": _SEVERAL_GPUS,
    "forecast --link": _SEVERAL_GPUS,
    "forecast --price": "use `rent MODEL --price GPU=USD`",
    "forecast --check": _MEASURE_CELLS,
    "forecast --model": _MEASURE_CELLS,
    "forecast --budget": _MEASURE_CELLS,
    "forecast --keep": "use `forecast RUN --format json`",
    "forecast --out": "use `forecast RUN --format json`",
    "explore --run": "use `explore MODEL`; `report RUN` draws the cells of a run",
    "gate --rerun": _RERUN,
    "gate --model": _RERUN,
    "gate --prompts": _RERUN,
    "gate --budget": _RERUN,
    "gate --device": _RERUN,
    "gate --out": _RERUN,
    "rent --for": "use --prompt, --new, --max-ttft-ms and --max-tpot-ms",
    "rent --rate": _ONE_LOAD,
    "rent --batch": _ONE_LOAD,
    "rent --prefix": "use `count --prefix`",
    "rent --class": "use --price GPU=USD",
    "rent --provider": "use --price GPU=USD",
    "rent --spot": "use --price GPU=USD",
    "rent --cards": "use --price GPU=USD, which compares only the GPUs that you name",
    "rent --host-index": "`rent` gives ranges of published figures",
    "rent --by-utilisation": _ONE_LOAD,
    "rent --out": "use `rent MODEL --format json`",
}
"""What to use instead of a command, of `COMMAND --option`, or of a picture."""


def removed(name: str) -> str | None:
    """Return the sentence that refuses a command, option or picture that left; None if it never existed."""
    instead = REMOVED.get(name)
    return None if instead is None else f"`{name}` was removed; {instead}."
