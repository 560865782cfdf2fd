"""Errors of checked forecasts, in the user's data folder: one JSON object per line."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckedCell:
    """A forecast cell with its measured time."""

    device: str
    threads: int
    model: str
    what: str
    """The cell and its precision, such as `decode 4 x 128, bfloat16`."""
    forecast_s: float
    measured_s: float
    inside: bool
    """Whether the measured time is inside the forecast's interval."""
    at: str
    """Time of the check, in UTC as ISO 8601."""

    @property
    def error(self) -> float:
        """|forecast / measured - 1|."""
        return abs(self.forecast_s / self.measured_s - 1)


def log_file() -> Path:
    """The path of checks.jsonl in the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "roofscope" / "checks.jsonl"


def append_checks(cells: Sequence[CheckedCell]) -> None:
    """Append checks to the log; errors of the file system are ignored."""
    path = log_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)
    except OSError:
        pass


def read_checks() -> list[CheckedCell]:
    """All checks in the log; lines that cannot be read are left out."""
    checks = []
    try:
        lines = log_file().read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            checks.append(CheckedCell(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return checks


def checks_line(device: str, threads: int) -> tuple[str, ...]:
    """One sentence with the median error of a machine's checked forecasts; empty if it has none."""
    cells = [cell for cell in read_checks() if (cell.device, cell.threads) == (device, threads)]
    if not cells:
        return ()
    off = statistics.median(cell.error for cell in cells)
    inside = sum(cell.inside for cell in cells)
    return (
        f"On this machine forecasts have been {100 * off:.1f} % off (median of {len(cells)} checked cells, {inside} of"
        " them inside their interval).",
    )
