"""forecast.json: the last forecast of a run's model, kept in its folder for its report."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from profiler.diagnosis.forecast import Answer
from profiler.record.store import replace_file
from profiler.units import visible_in

FORECAST_FILE = "forecast.json"
_ADAPTER = TypeAdapter(Answer)


def write_forecast(folder: Path, answer: Answer) -> None:
    """Keep a forecast in a run folder. Raises RunError where that takes no file."""
    replace_file(folder / FORECAST_FILE, _ADAPTER.dump_json(answer, indent=1).decode() + "\n")


def read_forecast(folder: Path) -> Answer | None:
    """The forecast that a run folder holds; None where it holds none, or one of another version."""
    try:
        content = visible_in(json.loads((folder / FORECAST_FILE).read_bytes()))
        return _ADAPTER.validate_json(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return None
