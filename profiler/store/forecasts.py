"""forecast.json in a run folder: the last forecast."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from profiler.predict.result import Answer
from profiler.store.writer import replace_file
from profiler.units import visible_in

FORECAST_FILE = "forecast.json"
_FORECAST = TypeAdapter(Answer)


def write_forecast(folder: Path, answer: Answer) -> None:
    """Write a forecast into a run folder. Raises RunError if the file cannot be written."""
    replace_file(folder / FORECAST_FILE, _FORECAST.dump_json(answer, indent=1, exclude={"check"}).decode() + "\n")


def read_forecast(folder: Path) -> Answer | None:
    """The forecast in a run folder; None if it is missing, damaged or of another version."""
    try:
        content = visible_in(json.loads((folder / FORECAST_FILE).read_bytes()))
        return _FORECAST.validate_json(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return None
