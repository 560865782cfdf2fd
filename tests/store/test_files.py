"""No cell is lost or written twice; every file, old or broken, is read or refused, and each is replaced whole."""

import contextlib
import csv
import errno
import fcntl
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from cases import slow_except
from hypothesis import example, given
from hypothesis import strategies as st
from machines import CPU
from plain_engine import PlainEngine
from raw_samples import read_records

from profiler import effort
from profiler.cli import app as cli
from profiler.comparison.command import comparison_document
from profiler.comparison.compare import compare_sides
from profiler.comparison.side import side_of_file
from profiler.device.machine import Machine
from profiler.errors import RequestError, RunError
from profiler.facts.repetitions import Gap, Repetition
from profiler.grid.cells import Cell, Grid
from profiler.grid.ranges import make_grid, parse_values
from profiler.json_document import dumped, json_text
from profiler.loading.prompts import Prompts
from profiler.measure.schedule import Plan, Schedule
from profiler.measure.sweep import RepetitionContext, sweep
from profiler.place.place import placed
from profiler.readers.detect import read_foreign
from profiler.report.html import write_report
from profiler.report.progress import Listener
from profiler.run.judge_folder import judge_folder
from profiler.store.document import SCHEMA_VERSION
from profiler.store.folder import SAMPLES_FILE, Run, RunStore, read_document, read_facts_of, read_run, replace_file
from profiler.store.operators_csv import OPERATOR_COLUMNS, read_operators
from profiler.user_cache import write_cache

GRID = make_grid([2, 4, 8], [1, 2], 6)
FULL = OSError(errno.ENOSPC, "No space left on device")
LONG_GRID = make_grid(range(2, 62), [1, 2], 6)


def outcomes(engine: PlainEngine, earlier: Any = (), grid: Grid = GRID) -> Iterator[Repetition | Gap]:
    plan = Plan(grid, budget_s=0.0, whole=True, effort=replace(effort.STANDARD, rounds=1))
    machine = Machine(CPU)
    schedule, context = Schedule(plan, machine.now_s, earlier=earlier), RepetitionContext(machine, Prompts(32))
    return sweep(schedule, {"eager": engine}, context, lambda _: None)


def measure_into(folder: Path, *, resume: bool, grid: Grid = GRID) -> None:
    with RunStore(folder, resume=resume) as store:
        (folder / "run.json").write_text("{}")  # without it, the store removes the folder
        earlier = read_facts_of(folder) if resume else []
        for outcome in outcomes(PlainEngine(step_s=0.0005), earlier=earlier, grid=grid):
            store.append(outcome)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("cell", GRID.cells)
def test_out_of_memory_at_any_cell(cell: Cell, error: type[Exception]) -> None:
    """That cell is `oom`, cells at least as large in both directions have no number, and all others are measured."""
    engine = PlainEngine(fits=lambda batch, tokens: batch < cell.batch_size or tokens < cell.prompt_len, error=error)
    results = list(outcomes(engine))
    gaps = {outcome.cell: outcome.status for outcome in results if isinstance(outcome, Gap)}
    larger = {
        c for c in GRID.cells if c != cell and c.batch_size >= cell.batch_size and c.prompt_len >= cell.prompt_len
    }
    assert set(gaps) == {cell, *larger}
    assert gaps[cell] == "oom"
    assert set(gaps.values()) <= {"oom", "skipped"}
    assert {o.cell for o in results if isinstance(o, Repetition)} == set(GRID.cells) - set(gaps)


def test_a_prefill_that_did_not_fit_says_nothing_of_a_cache_that_is_filled() -> None:
    """A prefill of 8 tokens fails; a step after 16 filled ones needs no such prefill."""
    grid = Grid((8,), (1,), 6, context_lens=(16,))
    results = list(outcomes(PlainEngine(fits=lambda _, tokens: tokens < 8), grid=grid))
    assert [(type(found), found.cell.context_len) for found in results if found.cell.context_len] == [(Repetition, 16)]
    assert [found.status for found in results if isinstance(found, Gap)] == ["oom"]


@pytest.mark.ci
def test_killed_at_twenty_moments_and_resumed(tmp_path: Path) -> None:
    """After 20 SIGKILLs while the sweep writes, one resume finishes the run: no cell is lost or measured twice."""
    folder = tmp_path / "run"
    moments = random.Random(0)
    context = multiprocessing.get_context("fork")
    killed = 0
    for _ in range(20):
        resume = (folder / "samples.jsonl").exists()
        child = context.Process(target=measure_into, args=(folder,), kwargs={"resume": resume, "grid": LONG_GRID})
        child.start()
        time.sleep(0.005 + 0.03 * moments.random())
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        lines = (folder / "samples.jsonl").read_bytes().split(b"\n")[:-1] if folder.exists() else []
        for line in lines:
            json.loads(line)
    assert killed >= 10
    measure_into(folder, resume=True, grid=LONG_GRID)
    records = read_records(folder)
    timed = [(record["batch_size"], record["prompt_len"]) for record in records]
    assert sorted(timed) == sorted((cell.batch_size, cell.prompt_len) for cell in LONG_GRID.cells)


def one_fails(call: Callable[..., Any], number: int, error: BaseException) -> Mock:
    """A call that raises an error at one of its uses."""
    return Mock(wraps=call, side_effect=[*[DEFAULT] * number, error, *[DEFAULT] * 1000])


@pytest.mark.parametrize("failing", range(6))
def test_a_disk_that_fills_up_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The error is one line, every line before it can be read, and a resume with free space finishes the run."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", one_fails(os.fsync, failing, FULL))
        with pytest.raises(RunError, match="No space left on device"):
            measure_into(folder, resume=False)
    assert len(read_records(folder)) >= failing
    measure_into(folder, resume=True)
    assert {(r["batch_size"], r["prompt_len"]) for r in read_records(folder)} == {
        (cell.batch_size, cell.prompt_len) for cell in GRID.cells
    }


STAGES = ("loading", "timing", "ceilings", "overhead", "replaying", "writing the report")


@pytest.mark.parametrize("stage", slow_except(STAGES[:2], STAGES))
def test_ctrl_c_in_each_stage(profile_tiny: Callable[..., Run], tmp_path: Path, stage: str) -> None:
    """Before the first cell no folder is left, or it reads as interrupted; later the measured cells are saved."""
    folder = tmp_path / "run"

    def begun(text: str) -> None:
        if stage in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_tiny(budget_s=0.5, weights="random", listener=Mock(Listener, stage=begun))
    if stage in ("loading", "ceilings", "overhead"):
        assert not folder.exists()
        return
    cells = read_run(folder).cells
    assert (cells["status"] == "ok").all() == (stage != "timing")
    assert read_document(folder).finished == (stage == "writing the report")


def test_sigterm_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="130"):
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)


ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "data" / "tiny_run"
WHOLE = ROOT / "runs" / "reference" / "smollm2-135m-2-cores"
FOREIGN = sorted(
    file for file in (ROOT / "tests" / "data").rglob("*") if file.suffix in (".json", ".jsonl", ".csv", ".md")
)
DOCUMENT = json.loads((WHOLE / "run.json").read_text())
RECORDS = {json.loads(line)["kind"]: json.loads(line) for line in (WHOLE / SAMPLES_FILE).read_text().splitlines()}
OPERATOR = {
    **dict.fromkeys(OPERATOR_COLUMNS, "1"), "phase": "prefill", "operator": "o", "engine": "eager",
    **dict.fromkeys(("redundant_bytes_by_cause", "redundant_flops_by_cause", "gemms"), ""),
}  # fmt: skip
CELL = next(csv.DictReader((OLD / "cells.csv").read_text().splitlines()))

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
options = st.text(alphabet="0123456789.,*+-=%$ eETinf4\x00٣", max_size=24) | st.text(max_size=24)
cells = st.sampled_from(
    ["", "1", "-1", "nan", "1e999", "prefill", "eager", "²", "[]", '{"a": 1}', "null", '{"copies": "x"}', "9" * 5000]
)


def tried(parse: Callable[[], object]) -> None:
    """Run a parser; any error other than a RequestError or a RunError fails the test."""
    with contextlib.suppress(RequestError, RunError):
        parse()


def places(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value of a JSON document."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        inner = list(content.items())
    elif isinstance(content, list):
        inner = list(enumerate(content[:3]))
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of a JSON document with the value at `place` replaced."""
    if not place:
        return value
    key, *rest = place
    copy = dict(content) if isinstance(content, dict) else list(content)
    copy[key] = changed(content[key], tuple(rest), value)
    return copy


def one_changed(content: Any) -> st.SearchStrategy[Any]:
    """A valid JSON document in which one value is replaced by an arbitrary one."""
    return st.builds(lambda place, value: changed(content, place, value), st.sampled_from(places(content)), anything)


@given(options)
@example("1..99999999999999999999*2")
@example("9" * 5000)
@example("٣")
def test_ranges(text: str) -> None:
    tried(lambda: parse_values(text, "--batch-sizes"))


@given(one_changed(DOCUMENT), st.sampled_from(sorted(RECORDS)).flatmap(lambda kind: one_changed(RECORDS[kind])))
@example([], 1)
@example({"schema_version": "4"}, {"kind": []})
@example({"schema_version": [1]}, {"kind": None})
def test_run_json_and_samples(tmp_path: Path, content: Any, record: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps(content))
    tried(lambda: read_document(tmp_path))
    (tmp_path / SAMPLES_FILE).write_text(json.dumps(record) + "\n")
    tried(lambda: read_facts_of(tmp_path))


@pytest.mark.parametrize(
    "content", [b"\xff\n", b"[" * 10**5 + b"\n", b'{"kind": "repetition"', b"\x00\n", b'{"kind": "\\ud800"}\n']
)
@pytest.mark.parametrize("name", [SAMPLES_FILE, "run.json", "cells.csv", "operators.csv"])
def test_broken_files(tmp_path: Path, name: str, content: bytes) -> None:
    folder = Path(shutil.copytree(OLD, tmp_path / "run"))
    (folder / name).write_bytes(content)
    for parse in (read_run, read_facts_of, read_operators):
        tried(partial(parse, folder))
    tried(lambda: read_foreign(folder / name))


FACT = json.dumps(next(iter(RECORDS.values())))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", None, r"it has no run\.json"),
        ("run.json", '{"schema_version": 6}', r"run\.json is damaged"),
        ("run.json", f'{{"schema_version": {SCHEMA_VERSION + 1}, "something_new": 1}}', "newer roofscope"),
        ("run.json", '{"schema_version": 5}', r"read it with roofscope 0\.3\.0"),
        ("run.json", (OLD / "run.json").read_text().replace('"eager"', '"=cmd"'), "run.json has no engine 'eager'"),
        ("cells.csv", "phase\nprefill\n", r"cells\.csv lacks the column 'batch_size'"),
        (SAMPLES_FILE, f'{FACT}\n{{"kind": "vis\n{FACT}', r"samples\.jsonl, line 2 is damaged"),
        (SAMPLES_FILE, f"{FACT}\n[]", r"samples\.jsonl, line 2 is not a JSON object"),
        (SAMPLES_FILE, f'{FACT}\n{{"kind": "visit"}}', r"samples\.jsonl, line 2 is not a fact of a run"),
    ],
)
def test_a_damaged_folder_says_which_file_and_another_schema_which_release(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    file = Path(shutil.copytree(OLD, tmp_path / "run")) / name
    file.unlink() if content is None else file.write_text(content)
    read: Callable[[Path], Run] = judge_folder if name == SAMPLES_FILE else read_run
    with pytest.raises(RunError, match=words):
        read(file.parent)


def row_of(file: Path, row: dict[str, str]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, row)
        writer.writeheader()
        writer.writerow(row)


@given(st.sampled_from(OPERATOR_COLUMNS), st.sampled_from(sorted(CELL)), cells)
@example("redundant_bytes_by_cause", "engine", "[" * 10**5)
@example("redundant_flops_by_cause", "engine", '{"copies": {}}')
@example("flops", "latency_s", "²")
@example("gemms", "engine", "1*0x1x1")
def test_operators_and_cells(tmp_path: Path, column: str, other: str, value: str) -> None:
    (tmp_path / "run.json").write_text((OLD / "run.json").read_text())
    row_of(tmp_path / "cells.csv", {**CELL, other: value})
    tried(lambda: read_run(tmp_path))
    row_of(tmp_path / "operators.csv", OPERATOR)
    [[operator]] = read_operators(tmp_path).values()
    assert operator.flops == 1
    row_of(tmp_path / "operators.csv", {**OPERATOR, column: value})
    tried(lambda: read_operators(tmp_path))


@given(st.data())
def test_other_tools_files(tmp_path: Path, data: st.DataObject) -> None:
    """A valid file with one value or some characters replaced can be used, or is refused.

    It can be compared with itself, placed under a roofline, and written as JSON, which has no infinity.
    """
    original = data.draw(st.sampled_from(FOREIGN))
    file = tmp_path / original.name
    text = original.read_text()
    try:
        content = json.loads(text)
    except ValueError:
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(st.text(max_size=6)) + text[start + data.draw(st.integers(0, 20)) :]
    else:
        text = json.dumps(data.draw(one_changed(content)))
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    tried(lambda: used(file))


def used(file: Path) -> None:
    result_file = read_foreign(file)
    rows = [placed(figure.with_shape(), (1e-3, 1e-3, None), "yes", True) for figure in result_file.figures]
    json.dumps([asdict(row) for row in rows], allow_nan=False)
    side = side_of_file(result_file)
    json_text(dumped(comparison_document(compare_sides(side, side))))


RUN = WHOLE.with_name("smollm2-135m-zen4")
DERIVED = ("run.json", "cells.csv", "operators.csv", "report.html")


def judged(folder: Path) -> None:
    """Write the four files that the end of a run writes."""
    write_report(judge_folder(folder))


@pytest.mark.parametrize("number", slow_except((0,), range(len(DERIVED))))
@pytest.mark.parametrize(
    ("call", "error"), [("fsync", FULL), ("replace", KeyboardInterrupt())], ids=["full disk", "Ctrl-C"]
)
def test_at_each_write_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException, number: int
) -> None:
    """An error at any fsync or replacement leaves each file old or new, no draft, and a second attempt succeeds."""
    folder = Path(shutil.copytree(RUN, tmp_path / "run"))
    for name in DERIVED:
        if not (folder / name).exists():
            (folder / name).write_text("old")
    before = {name: (folder / name).read_bytes() for name in DERIVED}
    monkeypatch.setattr("profiler.report.html.html_report", lambda _run, **_: "a page")  # quick to make
    with monkeypatch.context() as patch:
        patch.setattr(os, call, one_fails(getattr(os, call), number, error))
        with pytest.raises(RunError if call == "fsync" else KeyboardInterrupt):
            judged(folder)
    assert not list(folder.glob("*.part"))
    assert sum((folder / name).read_bytes() != before[name] for name in DERIVED) <= number
    assert read_run(folder).measured
    judged(folder)
    assert read_document(folder).finished


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_cache(tmp_path / "file" / "roofs" / "one.json", b"{}")
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Network file systems may have no locks: the run is written without one."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(code, os.strerror(code))))
    with RunStore(tmp_path / "run") as store:
        assert store.folder.is_dir()


def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    """A run killed while it loads can start again in its folder; an error of another one leaves it as it is."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SAMPLES_FILE).touch()
    with RunStore(tmp_path / "run") as store:
        (store.folder / SAMPLES_FILE).write_text("{}\n")
        for resume, words in ((False, "already has a run"), (True, "another roofscope is writing")):
            with pytest.raises(RunError, match=words):
                RunStore(store.folder, resume=resume)
        assert [file.name for file in store.folder.iterdir()] == [SAMPLES_FILE]


def test_a_link_to_a_file_is_replaced_and_what_is_no_plain_file_stays(tmp_path: Path) -> None:
    """Root may rename a file over /dev/null; the test uses a pipe instead."""
    mine, pipe, link = tmp_path / "mine", tmp_path / "pipe", tmp_path / "link"
    mine.write_text("mine")
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(RunError, match="it is not a regular file"):
            replace_file(path, "text")
    assert (pipe.is_fifo(), link.is_symlink()) == (True, True)
    link.unlink()
    link.symlink_to(mine)
    replace_file(link, "a page")
    assert (mine.read_text(), link.read_text(), link.is_symlink()) == ("mine", "a page", False)


def test_a_notebook_shows_the_answer_of_a_run() -> None:
    run = read_run(str(RUN))
    assert repr(run).splitlines() == [*run.answer, f"run: {RUN}"]


BEFORE_0_5 = {
    "slow-kernels": "kernel-bound", "above-ceiling": "above-roof", "int32 matmuls": "int32 products",
    "redundant_bytes_by_cause": "avoidable_bytes_by_cause", "redundant_flops_by_cause": "avoidable_flops_by_cause",
    "redundant_bytes": "avoidable_bytes", "redundant_s": "avoidable_s", "overhead_s": "dispatch_s",
    "changes": "levers", "repetitions": "visits", "ceiling": "roof", "ceiling_s": "roof_s",
}  # fmt: skip
"""What words were called in files before version 0.5."""


def test_old_keys_columns_and_values_are_those_of_today(tmp_path: Path) -> None:
    """A run of today with each of these words replaced by its old one is still the same run."""

    def content() -> list[Any]:
        run = read_run(folder)
        return [repr(read) for read in (run.results, run.document, read_operators(folder), read_facts_of(folder))]

    folder = Path(shutil.copytree(RUN.with_name("smollm2-135m-xeon-minute"), tmp_path / "run"))
    today, replaced = content(), set()
    for name in ("run.json", "cells.csv", "operators.csv", "samples.jsonl"):
        text = (folder / name).read_text()
        for now, old in BEFORE_0_5.items():
            text, count = re.subn(rf'(?<=[",\n]){now}(?=[",\n])', old, text)
            replaced |= {(name, old)} if count else set()
        (folder / name).write_text(text)
    assert {("run.json", "levers"), ("cells.csv", "kernel-bound"), ("operators.csv", "roof_s")} <= replaced
    assert content() == today
