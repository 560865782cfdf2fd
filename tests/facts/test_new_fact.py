"""A new fact is one class: it is stored, read, and found among the others; facts that left are passed over."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter

import profiler.facts
from profiler.errors import RunError
from profiler.facts.fact import Fact, MergedFacts
from profiler.facts.run_facts import OwnedModel
from profiler.grid.cells import Cell, CellKey
from profiler.store.folder import SAMPLES_FILE, fact_of, line_of, read_facts_of

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
        fact_of(record).merge_into(merged)
    assert merged.every(Warmth) == facts
    assert merged.latest(Warmth) == facts[-1]
    assert merged.latest_by(Warmth, "key") == (facts[-1],)


def test_every_kind_is_known_to_a_process_that_only_reads_a_folder() -> None:
    sources = [path.read_text() for path in Path(profiler.facts.__path__[0]).glob("*.py")]
    classes = {name for source in sources for name in re.findall(r'^class \w+\(Fact, kind="(\w+)"\)', source, re.M)}
    code = "from profiler.store.folder import Fact; print(*Fact.kinds)"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"contention", "visit"} < classes
    assert set(known) >= classes


LEFT = (
    {"kind": "fresh_start", "link": "disk", "launch_s": 2.5, "load_s": 0.4, "load_bytes": 538, "engines": {}},
    {"kind": "after_silence", "batch_size": 1, "prompt_len": 8, "new_tokens": 4, "silence_s": 1.0, "steps_s": [[0.1]]},
    {"kind": "queue", "batch_size": 2, "prompt_len": 8, "way": "sorting", "as_they_come_s": [0.2], "this_way_s": [0.1]},
)
"""Lines of a run of version 0.4, whose measurements have left."""


def test_facts_that_left_are_passed_over_and_unknown_ones_are_not(tmp_path: Path) -> None:
    lines = (Path(__file__).parents[1] / "data" / "tiny_run" / SAMPLES_FILE).read_text()
    (tmp_path / SAMPLES_FILE).write_text(lines)
    without = read_facts_of(tmp_path)
    (tmp_path / SAMPLES_FILE).write_text("".join(json.dumps(record) + "\n" for record in LEFT) + lines)
    assert read_facts_of(tmp_path) == without
    (tmp_path / SAMPLES_FILE).write_text(json.dumps({**LEFT[0], "kind": "made_up"}) + "\n" + lines)
    with pytest.raises(RunError, match="line 1 is not a fact of a run"):
        read_facts_of(tmp_path)


def test_what_an_older_version_stored_of_vllm_is_passed_over() -> None:
    lines = (Path(__file__).parents[1] / "data" / "tiny_run" / SAMPLES_FILE).read_text().splitlines()
    repetition = next(record for record in map(json.loads, lines) if record["kind"] == "visit")
    iterations = [{"prefill_requests": 1, "prefill_tokens": 8, "decode_requests": 0, "decode_tokens": 0, "waiting": 0}]
    assert fact_of({**repetition, "scheduled": iterations, "cache_used_bytes": 1 << 20}) == fact_of(repetition)
    owned = {"version": "0.32.0", "load_s": 9.5, "weight_bytes": 5, "cache_bytes": 7}
    more = {"how": "compiled", "cache_tokens": 1280, "block_tokens": 128, "tokens_an_iteration": 4096}
    assert TypeAdapter(OwnedModel).validate_python(owned | more) == OwnedModel(**owned)  # type: ignore[arg-type]
