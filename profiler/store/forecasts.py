"""forecast.json and costs.json in a run folder: the last forecast, and the last costs on rented GPUs."""

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
COSTS_FILE = "costs.json"

_FORECAST = TypeAdapter(Answer)
_COSTS = TypeAdapter(CostOverLoad)

T = TypeVar("T")


def write_forecast(folder: Path, answer: Answer) -> None:
    """Write a forecast into a run folder. Raises RunError if the file cannot be written."""
    _write(folder / FORECAST_FILE, _FORECAST, answer)


def read_forecast(folder: Path) -> Answer | None:
    """The forecast in a run folder; None if it is missing, damaged or of another version."""
    return _read(folder / FORECAST_FILE, _FORECAST)


def write_costs(folder: Path, costs: CostOverLoad) -> None:
    """Write costs over the load into a run folder. Raises RunError if the file cannot be written."""
    _write(folder / COSTS_FILE, _COSTS, costs)


def read_costs(folder: Path) -> CostOverLoad | None:
    """The costs in a run folder; None if they are missing, damaged or of another version."""
    return _read(folder / COSTS_FILE, _COSTS)


def _write(path: Path, adapter: TypeAdapter[T], value: T) -> None:
    replace_file(path, adapter.dump_json(value, indent=1).decode() + "\n")


def _read(path: Path, adapter: TypeAdapter[T]) -> T | None:
    try:
        content = visible_in(json.loads(path.read_bytes()))
        return adapter.validate_json(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return None
