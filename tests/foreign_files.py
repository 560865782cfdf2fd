"""Files of other tools: those of tests/data/foreign, and copies with other values."""

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.readers.figures import ForeignFile

FILES = Path(__file__).parent / "data" / "foreign"


def record(name: str, index: int = 0) -> dict[str, Any]:
    """One JSON record of a file: of its list, of its lines, or the whole file."""
    text = (FILES / name).read_text()
    found = [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)
    chosen: dict[str, Any] = found[index] if isinstance(found, list) else found
    return chosen


def changed(path: Path, name: str, *changes: dict[str, Any], index: int = 0) -> Path:
    """Write a record of a file to `path`: on one line for each of `changes`, which override its keys."""
    path.write_text("\n".join(json.dumps({**record(name, index), **each}) for each in changes))
    return path


def served(path: Path, **changes: Any) -> Path:
    """SGLang's bench_one_batch_server: 1,024 tokens in 50 ms, then 1,024 more at 2.5 ms each."""
    shape = {"batch_size": 1, "input_len": 1024, "output_len": 1025, "input_throughput": 20480.0, "latency": 2.61}
    return changed(path, "sglang-server.jsonl", {**shape, **changes})


def holds(file: ForeignFile, covers: str, expected: dict[str, object], said: str) -> None:
    """Assert fields of the last figure that covers something, of its parts or file; `said` is in a note or remark."""
    figure = [figure for figure in file.figures if figure.covers == covers][-1]
    assert said in " ".join((*figure.notes, *file.remarks))
    for what, value in expected.items():
        parts = (figure.shape, figure, file)
        source = next((part for part in parts if hasattr(part, what)), None)
        found = figure.time.value if what == "seconds" else file.settings.get(what) or getattr(source, what, None)
        assert found == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), what
