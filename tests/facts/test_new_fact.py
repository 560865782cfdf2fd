"""A new fact is one class: it is stored, read, and found among the others without further edits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import profiler.facts
from profiler.facts.fact import Fact, MergedFacts
from profiler.grid.cells import Cell, CellKey
from profiler.store.samples import fact_of, line_of

KEY = CellKey("decode", Cell(batch_size=2, prompt_len=16, new_tokens=8))


@dataclass(frozen=True)
class Warmth(Fact, kind="warmth"):
    """The temperature of a made-up sensor in one cell."""

    key: CellKey
    degrees: float


def test_it_is_stored_read_and_merged() -> None:
    facts = [Warmth(KEY, 41.0), Warmth(KEY, 43.5)]
    merged = MergedFacts()
    for fact in facts:
        record = json.loads(line_of(fact))
        assert (record["kind"], record["batch_size"], record["phase"]) == ("warmth", 2, "decode")
        merged.add(fact_of(record))
    assert merged.every(Warmth) == facts
    assert merged.latest(Warmth) == facts[-1]
    assert merged.latest_by(Warmth, "key") == (facts[-1],)


def test_every_kind_is_known_to_a_process_that_only_reads_a_folder() -> None:
    sources = [path.read_text() for path in Path(profiler.facts.__path__[0]).glob("*.py")]
    classes = {name for source in sources for name in re.findall(r'^class \w+\(Fact, kind="(\w+)"\)', source, re.M)}
    code = "from profiler.store.samples import Fact; print(*Fact.kinds)"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"contention", "visit"} < classes
    assert set(known) >= classes
