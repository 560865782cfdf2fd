"""Conditions after a fault: every loss is reported, no unrelated figure changes, and a resume repairs the run.

These columns of cells.csv may differ from those of the run without a fault:

| columns | may change with |
|---|---|
| COUNTS | nothing; executed work, if run.json reports that its counting rule could not be read |
| TIMES | a fault in a visit of that cell; else by at most two ticks of a CUDA event (0.5 us each, one per mark), since
  earlier work shifts the clock, and 1 % if the number of visits differs |
| SAMPLES | the end of a sweep: it has fewer visits after a fault, and more after a resume |
| all others (roofs, split, regime, confidence, memory in use) | any fault: they depend on roofs, the twin and replays |
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .kinds import KINDS
from .sites import Call, Injection

Row = dict[str, str]

COUNTS = ("model_flops", "model_bytes", "executed_flops", "executed_bytes", "intensity")
EXECUTED = ("executed_flops", "executed_bytes")
_RULES_OF_COUNTING = {"the choice of kernels", "bitsandbytes' choice of 4-bit kernels"}
"""Parts of a run that count executed work; a run may report them as missing."""
TIMES = ("latency_s", "ttft_s", "first_step_s", "issue_s")
SAMPLES = (
    "samples", "visits", "stopped", "latency_low_s", "latency_high_s", "p90_s", "p99_s", "ttft_p90_s", "ttft_p99_s",
)  # fmt: skip
KEY = ("engine", "phase", "batch_size", "prompt_len", "context_len")
_TICK_S = 0.5e-6
_OTHER_VISITS = 0.01
_STATUSES = ("ok", "oom", "failed", "skipped")
_CODES = (0, 2, 3)
_MORE_S = 60.0
"""Simulated seconds that a fault may add to a run: a deadline for every stage."""
_FALSE = 0.05
"""A figure with a larger relative error is false."""


@dataclass(frozen=True)
class Ran:
    """The outcome of one command."""

    code: int | None
    """None if the command raised an exception."""
    out: str
    err: str
    escaped: str
    """The traceback of the exception that the command raised."""
    calls: Sequence[Call]
    fired: Sequence[Call]
    left_bytes: int
    """Bytes of the card's memory in use at the end, after Python's garbage collection."""
    simulated_s: float
    folder: Any
    """The run folder (`Folder`), if the command left one."""


@dataclass(frozen=True)
class Folder:
    """The state of a run folder."""

    rows: Mapping[tuple[str, ...], Row]
    document: Mapping[str, Any]
    facts: frozenset[str]
    """Each kind of fact with its subject, and each non-empty field of run.json."""
    report: str = ""
    """report.md, if the run reports something missing."""


def read(folder: Path) -> Folder | None:
    """Read a run folder without the profiler's own reader. Return None if it contains no run."""
    if not (folder / "run.json").exists():
        return None
    document = json.loads((folder / "run.json").read_text())
    rows: dict[tuple[str, ...], Row] = {}
    if (folder / "cells.csv").exists():
        with (folder / "cells.csv").open(newline="") as file:
            rows = {tuple(row[name] for name in KEY): row for row in csv.DictReader(file)}
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    facts = {fact for record in records for fact in _facts(record)} | set(_said(document))
    facts |= {
        f"{'/'.join(key)} {name}"
        for key, row in rows.items()
        for name, value in row.items()
        if value and name not in SAMPLES
    }
    return Folder(rows, document, frozenset(facts))


_OF = ("cell", "engine", "phase", "batch_size", "prompt_len", "context_len", "link", "operator", "way")


def _facts(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of facts: their kind and their subject."""
    name = " ".join([str(record.get("kind")), *(str(record[key]) for key in _OF if key in record)])
    yield name
    for key in record.get("keys", ()):
        for item in record.get("operators", ()):
            yield f"{name} {json.dumps(key)} {item.get('operator')}"


_UNSTABLE = (
    "scaling", "curve", "seconds", "readings", "stage_s", "levers", "terms", "conflicts", "signals", "answer",
    "noise_reasons", "flags",
)  # fmt: skip
"""Parts of run.json that may have other entries after a fault."""


def _said(value: Any, path: str = "run.json") -> Iterator[str]:
    """Yield the path of each field that is not empty."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in _UNSTABLE:
                yield from _said(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _said(inner, f"{path}[{number}]")
    elif value is not None and value != "" and not (isinstance(value, float) and math.isnan(value)):
        yield path


@dataclass(frozen=True)
class Case:
    """A run with a fault, and the same run without one."""

    injection: Injection
    base: Ran
    first: Ran
    resumed: Ran | None

    @property
    def kind(self) -> Any:
        return KINDS[self.injection.kind]

    @property
    def touched(self) -> frozenset[str]:
        return frozenset(call.cell for call in self.first.fired if call.cell)

    @property
    def why(self) -> str:
        """Return the fault's message, as the profiler repeats it."""
        if self.injection.kind == "oom":
            return "out of memory"
        return "" if self.kind.raised is None else str(self.kind.raised()).splitlines()[0]


def failures(case: Case) -> list[str]:
    """Return the failed conditions, each prefixed with the name of its oracle."""
    return [f"{oracle.__name__.strip('_')}: {text}" for oracle in ORACLES for text in oracle(case)]


def _ends_by_a_documented_code(case: Case) -> Iterator[str]:
    first = case.first
    if first.code not in _CODES:
        last = (first.err or first.escaped).strip().splitlines()[-1:]
        yield f"exit code {first.code}: {' '.join(last)}"


def _says_one_line(case: Case) -> Iterator[str]:
    for ran in filter(None, (case.first, case.resumed)):
        lines = [line for line in ran.err.splitlines() if line.strip()]
        if len(lines) > 1 or "Traceback" in ran.err:
            yield f"{len(lines)} lines on stderr: {lines[0]} ... {lines[-1]}"


def _may_end(case: Case) -> Iterator[str]:
    """Only a wrong request, a failed load and a lost device may end a run."""
    if case.first.code != 2 or not case.first.fired:
        return
    call = case.first.fired[0]
    if case.kind.sticky or call.stage in ("", "loading"):
        return
    yield f"the run ended ({' '.join(case.first.err.split())[:200]})"


def _keeps_every_cell(case: Case) -> Iterator[str]:
    """Requested = measured + failed + skipped."""
    for name, ran in (("run", case.first), ("resume", case.resumed)):
        if ran is None or ran.code not in _CODES:
            continue
        if ran.folder is None:
            if ran.code != 2:
                yield f"{name}: exit code {ran.code} without a run folder"
            continue
        if set(ran.folder.rows) != set(case.base.folder.rows) and (ran.code != 2 or ran.folder.rows):
            yield f"{name}: {len(ran.folder.rows)} of {len(case.base.folder.rows)} cells in cells.csv"
        if odd := {row["status"] for row in ran.folder.rows.values()} - set(_STATUSES):
            yield f"{name}: cells with the status {odd}"


def _leaves_other_cells_alone(case: Case) -> Iterator[str]:
    if case.first.folder is None:
        return
    for key, row in case.first.folder.rows.items():
        base = case.base.folder.rows.get(key)
        depth = row["prompt_len"] if row["prompt_len"] != "0" else row["context_len"]
        if base is None or f"{row['engine']}/{row['batch_size']}/{depth}" in case.touched:
            continue
        may_fail = case.kind.sticky or case.injection.kind == "oom" or case.first.code == 2
        if row["status"] != "ok":
            if base["status"] == "ok" and not may_fail:
                yield f"{'/'.join(key)} is {row['status']}, which the fault did not touch"
            continue
        missing = {part["what"] for part in case.first.folder.document.get("missing", ())}
        counted = [name for name in COUNTS if name not in EXECUTED or not missing & _RULES_OF_COUNTING]
        yield from (f"{'/'.join(key)} {text}" for text in _moved(base, row, counted))


def _moved(base: Row, row: Row, counted: Sequence[str] = COUNTS) -> Iterator[str]:
    for name in counted:
        if base[name] != row[name]:
            yield f"{name} {base[name]} -> {row[name]}"
    share = 0.0 if base["visits"] == row["visits"] else _OTHER_VISITS
    for name in TIMES:
        if _differs(base[name], row[name], share, 2.02 * _TICK_S):
            yield f"{name} {base[name]} -> {row[name]}"


def _differs(base: str, other: str, share: float, least: float = 0.0) -> bool:
    try:
        return abs(float(other) - float(base)) > least + share * abs(float(base))
    except ValueError:
        return base != other


def _is_never_sure_of_a_lie(case: Case) -> Iterator[str]:
    """Check that no false figure has the highest confidence."""
    if (case.kind.raised is not None) or case.first.folder is None:
        return
    for key, row in case.first.folder.rows.items():
        base = case.base.folder.rows[key]
        if row["status"] == "ok" and row["confidence"] == "high":
            for name in (*TIMES, "attained", "regime"):
                if _differs(base[name], row[name], _FALSE):
                    yield f"{'/'.join(key)} is sure of {name} {row[name]}, which is {base[name]}"


def _gives_memory_back(case: Case) -> Iterator[str]:
    if case.first.left_bytes > case.base.left_bytes:
        yield f"{case.first.left_bytes - case.base.left_bytes} bytes of the card are still held"


def _ends_in_time(case: Case) -> Iterator[str]:
    if case.first.simulated_s > case.base.simulated_s + _MORE_S:
        yield f"{case.first.simulated_s:.0f} simulated seconds instead of {case.base.simulated_s:.0f}"


def _loses_nothing_in_silence(case: Case) -> Iterator[str]:
    """Check that a missing fact gives exit code 3 (2 if the run ended) and a one-line reason.

    The reason is in run.json, in report.md and on the screen.
    """
    if case.first.folder is None or case.first.code == 2:
        return
    gone = sorted(fact for fact in case.base.folder.facts - case.first.folder.facts if not _is_no_loss(case, fact))
    if not gone:
        return
    text = f"{len(gone)} facts are gone ({'; '.join(gone[:3])})"
    if case.first.code != 3:
        yield f"exit code {case.first.code}, and {text}"
    written = json.dumps(case.first.folder.document), case.first.out, case.first.folder.report
    for place, said in zip(("run.json", "the screen", "report.md"), written, strict=True):
        if case.why and _plain(case.why)[:24] not in _plain(said):
            yield f"{place} does not say why ({case.why[:60]}): {text}"


def _is_no_loss(case: Case, fact: str) -> bool:
    """Return whether a missing fact is no loss.

    The device does not offer it and run.json names it, or the budget ends before it.
    """
    if case.injection.kind == "nvml-unsupported":
        not_seen = [set(ran.document["health"]["not_seen"]) for ran in (case.base.folder, case.first.folder)]
        return not_seen[0] < not_seen[1]
    return case.injection.kind == "later" and fact.startswith(("replay ", "trial ", "generate ", "run.json.generate"))


def _plain(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _heals(case: Case) -> Iterator[str]:
    """Check that one resume without the fault ends the run as if there had been no fault."""
    resumed, base = case.resumed, case.base.folder
    if resumed is None:
        return
    if resumed.code != 0:
        last = (resumed.err or resumed.escaped).strip().splitlines()[-1:]
        yield f"the resume ends with {resumed.code}: {' '.join(last)}"
    if resumed.folder is None or resumed.code == 2:
        return
    if not resumed.folder.document.get("finished"):
        yield "the resumed run is not finished"
    bad = {f"{'/'.join(key)} {row['status']}" for key, row in resumed.folder.rows.items() if row["status"] != "ok"}
    if bad:
        yield f"after the resume {len(bad)} cells have no number: {min(bad)}"
    for key, row in resumed.folder.rows.items():
        if row["status"] == "ok" and key in base.rows:
            yield from (f"after the resume {'/'.join(key)} {text}" for text in _moved(base.rows[key], row))
    if gone := sorted(base.facts - resumed.folder.facts):
        yield f"after the resume {len(gone)} facts are gone: {'; '.join(gone[:3])}"


ORACLES = (
    _ends_by_a_documented_code,
    _says_one_line,
    _may_end,
    _keeps_every_cell,
    _leaves_other_cells_alone,
    _is_never_sure_of_a_lie,
    _gives_memory_back,
    _ends_in_time,
    _loses_nothing_in_silence,
    _heals,
)
