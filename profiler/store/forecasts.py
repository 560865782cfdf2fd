"""forecast.json and costs.json: a run's last forecast and its costs on rented GPUs, kept in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from profiler.predict.costs import CostOverLoad
from profiler.predict.result import Answer
from profiler.store.writer import replace_file
from profiler.units import visible_in

FORECAST_FILE = "forecast.json"

_ADAPTER = TypeAdapter(Answer)

T = TypeVar("T")


def write_forecast(folder: Path, answer: Answer) -> None:
    """Keep a forecast in a run folder. Raises RunError where that takes no file."""
    write_json(folder / FORECAST_FILE, _ADAPTER, answer)


def read_forecast(folder: Path) -> Answer | None:
    """The forecast that a run folder holds; None where it holds none, or one of another version."""
    return read_json(folder / FORECAST_FILE, _ADAPTER)


def write_json(path: Path, adapter: TypeAdapter[T], value: T) -> None:
    """Write a value as an indented JSON file. Raises RunError where the folder takes no file."""
    replace_file(path, adapter.dump_json(value, indent=1).decode() + "\n")


def read_json(path: Path, adapter: TypeAdapter[T]) -> T | None:
    """The value of a JSON file; None where it is missing, damaged, or of another version."""
    try:
        content = visible_in(json.loads(path.read_bytes()))
        return adapter.validate_json(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return None


COSTS_FILE = "costs.json"

_COSTS = TypeAdapter(CostOverLoad)


def write_costs(folder: Path, costs: CostOverLoad) -> None:
    """Keep costs over the load in a run folder. Raises RunError where that takes no file."""
    write_json(folder / COSTS_FILE, _COSTS, costs)


def read_costs(folder: Path) -> CostOverLoad | None:
    """The costs that a run folder holds; None where it holds none, or those of another version."""
    return read_json(folder / COSTS_FILE, _COSTS)
