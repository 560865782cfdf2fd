"""The records of a run's samples.jsonl, without the profiler's own reader."""

import json
from pathlib import Path
from typing import Any


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
