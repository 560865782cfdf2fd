"""Commands and options of earlier versions, each with what to use instead."""

_LEFT = {
    "selftest": "run `python tests/gpu/acceptance.py` of the repository",
    "run --cold": "`run` and `why` report first calls",
    "run --prefix, rent --prefix": "use `count --prefix`",
    "ceilings --out, ceilings --out-dtypes": (
        "use `forecast MODEL --on GPU` for published figures, or `run` on the GPU itself"
    ),
    "ceilings --plot": "use `ceilings --link N --format json`",
    "count --plot map, count --plot intensity, count --plot latency": (
        "use `explore` for the map, or `count --format csv` for the figures"
    ),
    "run --no-levers": "use `run --no-trials`",
    "plot split": "use `plot RUN breakdown`",
    "plot intensity": "use `plot RUN roofline`",
    "plot depth, plot precisions, plot devices": "use `plot RUN... throughput`",
    "plot steps": "use the p90_s and p99_s of cells.csv",
    "plot engines": "use `plot RUN waterfall`",
    "plot forecast, forecast --keep, forecast --out": "use `forecast RUN --format json`",
    "forecast --tp, forecast --link": "use `count --tp`, `place --tp --link`, or `run --tp` on the GPUs themselves",
    "forecast --price": "use `rent MODEL --price GPU=USD`",
    "forecast --check, forecast --model, forecast --budget": (
        "measure the cells with `run --prompt-lens ... --batch-sizes ...`"
    ),
    "explore --run": "use `explore MODEL`; `report RUN` draws the cells of a run",
    "gate --rerun, gate --model, gate --prompts, gate --budget, gate --device, gate --out": (
        "measure the new run with `run`, and pass its folder: `gate BASE NEW`"
    ),
    "rent --for": "use --prompt, --new, --max-ttft-ms and --max-tpot-ms",
    "rent --rate, rent --batch, rent --by-utilisation": (
        "`rent` compares GPUs at their largest batch within --max-ttft-ms and --max-tpot-ms"
    ),
    "rent --class, rent --provider, rent --spot": "use --price GPU=USD",
    "rent --cards": "use --price GPU=USD, which compares only the GPUs that you name",
    "rent --host-index": "`rent` gives ranges of published figures",
    "rent --out": "use `rent MODEL --format json`",
}
"""Commands, `COMMAND --option`s and pictures, and what to use instead of each."""
REMOVED = {name: instead for names, instead in _LEFT.items() for name in names.split(", ")}


def removed(name: str) -> str | None:
    """Return the sentence that refuses a command, option or picture that left; None if it never existed."""
    return f"`{name}` was removed; {REMOVED[name]}." if name in REMOVED else None
