"""forecast.json: the last forecast of a run's model, kept in its folder for its report."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from profiler.diagnosis.forecast import Answer
from profiler.errors import RunError

FORECAST_FILE = "forecast.json"
_ADAPTER = TypeAdapter(Answer)


def write_forecast(folder: Path, answer: Answer) -> None:
    """Keep a forecast in a run folder. Raises RunError where that takes no file."""
    try:
        (folder / FORECAST_FILE).write_bytes(_ADAPTER.dump_json(answer, indent=1) + b"\n")
    except OSError as error:
        raise RunError(f"{folder / FORECAST_FILE} cannot be written: {error.strerror}.") from None


def read_forecast(folder: Path) -> Answer | None:
    """The forecast that a run folder holds; None where it holds none, or one of another version."""
    try:
        return _ADAPTER.validate_json((folder / FORECAST_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
