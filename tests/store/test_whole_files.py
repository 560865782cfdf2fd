"""Files are replaced atomically at any failure, and run folders work on unusual file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from cases import slow_except

from profiler.errors import RunError
from profiler.report.write import write_reports
from profiler.run.judge_folder import judge_folder
from profiler.store.folder import read_document, read_run
from profiler.store.writer import RunStore, replace_file
from profiler.user_cache import write_cache

RUN = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-zen4"
DERIVED = ("run.json", "cells.csv", "operators.csv", "report.html", "report.md")


class Stop(BaseException):
    """Ends a job during a system call, as Ctrl-C would."""


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def small_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without content, which are quick to make."""
    monkeypatch.setattr("profiler.report.write.html_report", lambda _run, **_: "a page")


def judged(folder: Path) -> None:
    """Write the five files that the end of a run writes."""
    write_reports([judge_folder(folder)])


@pytest.mark.parametrize("number", slow_except((0,), range(len(DERIVED))))
@pytest.mark.parametrize(("call", "error"), [("fsync", full()), ("replace", Stop())], ids=["full disk", "Ctrl-C"])
def test_at_each_write_of_the_reports(
    tmp_path: Path, small_page: None, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException, number: int
) -> None:
    """An error at any fsync or replacement leaves each file old or new, no draft, and a repetition succeeds."""
    folder = Path(shutil.copytree(RUN, tmp_path / "run"))
    for name in DERIVED:
        if not (folder / name).exists():
            (folder / name).write_text("old")
    before = {name: (folder / name).read_bytes() for name in DERIVED}
    calls, real = iter(range(100)), getattr(os, call)

    def failing(*arguments: object) -> object:
        if next(calls) == number:
            raise error
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(RunError if call == "fsync" else Stop):
            judged(folder)
    assert not list(folder.glob("*.part"))
    assert sum((folder / name).read_bytes() != before[name] for name in DERIVED) <= number
    assert read_run(folder).measured
    judged(folder)
    assert read_document(folder).finished


def test_a_disk_that_takes_a_part(tmp_path: Path) -> None:
    """Writes beyond a size fail (RLIMIT_FSIZE); the existing file stays unchanged."""
    path = tmp_path / "cells.csv"
    replace_file(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for most in (0, 1, 4096, 99_999):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            with pytest.raises(RunError, match="cannot be written: File too large"):
                replace_file(path, "x" * 100_000)
            assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("cells.csv", "old")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def test_killed_before_its_first_word(tmp_path: Path) -> None:
    """A run killed while the model loads can start again in its folder; after the first fact it cannot."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples.jsonl").touch()
    with RunStore(tmp_path / "run") as second:
        (second.folder / "samples.jsonl").write_text("{}\n")
        with pytest.raises(RunError, match="already has a run"):
            RunStore(second.folder)


def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    """The second run raises an error, and the first run's folder is unchanged."""
    with RunStore(tmp_path / "run") as store:
        (store.folder / "run.json").write_text("{}")
        for resume in (False, True):
            with pytest.raises(RunError, match=r"already has a run|another roofscope is writing"):
                RunStore(store.folder, resume=resume)
        assert sorted(file.name for file in store.folder.iterdir()) == ["run.json", "samples.jsonl"]


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    """Root may rename a file over /dev/null; the test uses a pipe instead."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(RunError, match="it is not a regular file"):
            replace_file(path, "text")
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "report.html"
    mine.write_text("mine")
    link.symlink_to(mine)
    replace_file(link, "a page")
    assert (mine.read_text(), link.read_text(), link.is_symlink()) == ("mine", "a page", False)


def test_a_notebook_shows_the_answer_of_a_run() -> None:
    run = read_run(str(RUN))
    assert repr(run).splitlines() == [*run.answer, f"run: {RUN}"]
