"""forecast.json and costs.json: a run's last forecast, and what its model costs on rented cards, for its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from profiler.diagnosis.costs import CostOverLoad
from profiler.diagnosis.foretold import Answer
from profiler.record.store import replace_file
from profiler.units import visible_in

FORECAST_FILE = "forecast.json"
COSTS_FILE = "costs.json"
_ADAPTER = TypeAdapter(Answer)
_COSTS = TypeAdapter(CostOverLoad)
T = TypeVar("T")


def write_forecast(folder: Path, answer: Answer) -> None:
    """Keep a forecast in a run folder. Raises RunError where that takes no file."""
    _write(folder / FORECAST_FILE, _ADAPTER, answer)


def read_forecast(folder: Path) -> Answer | None:
    """The forecast that a run folder holds; None where it holds none, or one of another version."""
    return _read(folder / FORECAST_FILE, _ADAPTER)


def write_costs(folder: Path, costs: CostOverLoad) -> None:
    """Keep costs over the load in a run folder. Raises RunError where that takes no file."""
    _write(folder / COSTS_FILE, _COSTS, costs)


def read_costs(folder: Path) -> CostOverLoad | None:
    """The costs that a run folder holds; None where it holds none, or those of another version."""
    return _read(folder / COSTS_FILE, _COSTS)


def _write(path: Path, adapter: TypeAdapter[T], value: T) -> None:
    replace_file(path, adapter.dump_json(value, indent=1).decode() + "\n")


def _read(path: Path, adapter: TypeAdapter[T]) -> T | None:
    try:
        content = visible_in(json.loads(path.read_bytes()))
        return adapter.validate_json(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return None
