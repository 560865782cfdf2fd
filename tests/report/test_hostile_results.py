"""Result files from strangers: their text is shown as text; nothing is run, followed, fetched or overwritten."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, opened
from made_runs import OLD, WHOLE, old_run
from pages import Page

from profiler.errors import RunError
from profiler.report.columns import EXPORTERS, tokens_table
from profiler.report.sections import run_sections
from profiler.report.terminal import print_sections, screen
from profiler.report.write import html_report, markdown_report
from profiler.run.judge_folder import judge_folder
from profiler.run.screens import html_comparison
from profiler.store.folder import read_results, read_run
from profiler.store.writer import write_cells
from profiler.units import markdown_text, visible, visible_in

# Each string attacks one medium: a page, a terminal, a spreadsheet, LaTeX, a picture, a reader's eyes, a C program or
# an encoder. Scripts for pages also set the title of the page.
HOSTILE = (
    "<script>document.title='RAN'</script>",
    "\"><svg onload=document.title='RAN'>",
    "\x1b]0;RAN\x07\x1b[2J\x9b31mred",
    "[red]styled[/red][/]",
    '=cmd|"/C calc"!A0',
    r"\input{/etc/passwd}\write18{id}$\frac{",
    "gpl\u202ecod.exe",
    "a\x00b\ud800",
    "![x](https://evil.example/x.png)",
    "a | b\n| c |`",
)
ALL = " ".join(HOSTILE)


_FREE = {"id", "name", "command", "answer", "warnings", "revision", "architecture", "method", "license", "created"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reference run with every free text of run.json replaced."""
    folder = shutil.copytree(OLD, tmp_path_factory.mktemp("hostile") / "run")
    content = json.loads((folder / "run.json").read_text())

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: spoil(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [spoil(item, key) for item in value]
        return ALL if isinstance(value, str) and key in _FREE else value

    content = {**spoil(content), "engine": content["engine"]}
    content["warnings"] = [ALL]
    (folder / "run.json").write_text(json.dumps(content))
    return folder


def acting(text: str) -> list[str]:
    """Return control characters, except line ends and tabs, which belong to the output."""
    return [sign for sign in text if not sign.isprintable() and sign not in "\n\t"]


def test_a_visible_text_acts_on_nothing() -> None:
    for text in HOSTILE:
        assert visible(text).isprintable()
        visible(text).encode()
        assert visible(visible(text)) == visible(text)
    assert visible_in({ALL: [ALL, 1, None]}) == {visible(ALL): [visible(ALL), 1, None]}
    assert visible("Modell 通义千问, μs ± 3 %") == "Modell 通义千问, μs ± 3 %"


@pytest.mark.parametrize(
    "write",
    [html_report, lambda run: html_comparison([run, run], run.folder)],
    ids=["a run", "precisions"],
)
def test_pages_hold_text_under_a_policy(folder: Path, write: Callable[[Any], str]) -> None:
    text = write(read_run(folder)).replace("\u00a0", " ")  # between a number and its unit
    page = Page(text)
    assert not page.open
    assert page.count("script") == (1 if write is html_report else 0), "the script that sorts"
    assert all("RAN" not in str(attrs) for tag, attrs in page.tags if tag in ("svg", "img"))
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert not acting(text)
    assert visible(HOSTILE[0]) in page.words
    [policy] = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")
def test_a_browser_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """The policy of the page also stops scripts that are not escaped."""
    page = tmp_path / "report.html"
    ran = "document.title='RAN'"
    foreign = f'<script>{ran}</script><img src=x onerror="{ran}"><svg onload="{ran}">'
    page.write_text(html_report(read_run(folder)).replace("</body>", f"{foreign}</body>"), encoding="utf-8")
    done = opened(page, "--virtual-time-budget=2000")
    assert "<title>RAN" not in done.stdout
    assert "<title>" in done.stdout


def test_a_terminal_gets_text(roofscope, folder: Path, tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    for arguments in (("compare", str(folder), str(WHOLE), "--anyway"), ("report", "nowhere\x1b[31m")):
        outcome = roofscope(*arguments)
        assert not acting(outcome.out + outcome.err), arguments
        assert "internal error" not in outcome.err
    print_sections(run_sections(read_run(folder)), screen())
    printed = " ".join(capfd.readouterr().out.split())
    assert "[red]styled[/red][/]" in printed
    assert not acting(printed)
    foreign = tmp_path / "foreign.csv"
    with foreign.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["batch_size", "prompt_len", "new_tokens", "tokens_per_s", "model"])
        writer.writerow([1, 64, 8, 50, ALL.replace("\x00", "")])
    outcome = roofscope("place", str(foreign), "--model", "smollm2-135m", "--gpu", "T4")
    assert outcome.code == 0, outcome.err
    assert not acting(outcome.out)


def test_tables_for_other_programs() -> None:
    run = old_run()
    results = tuple(
        replace(result, engine=text)
        for text, result in zip(map(visible, HOSTILE), run.results * len(HOSTILE), strict=False)
    )
    frame = tokens_table(replace(run, results=results))
    rows = list(csv.DictReader(io.StringIO(EXPORTERS["csv"](frame).decode())))
    assert len(rows) == len(HOSTILE)
    assert not any(row["engine"].startswith(("=", "+", "-", "@")) for row in rows)
    assert any(row["engine"].startswith("'=cmd") for row in rows)
    markdown = EXPORTERS["md"](frame).decode()
    assert len(markdown.splitlines()) == len(HOSTILE) + 2
    assert "<" not in markdown.replace("&lt;", "")
    assert not re.search(r"(?<!\\)[\[`]", markdown)
    latex = EXPORTERS["latex"](frame).decode()
    assert r"\input{" not in latex
    assert r"\write18" not in latex
    assert r"$\frac" not in latex
    below_zero = replace(run, results=(replace(run.results[0], latency_s=-1.5),))
    assert ",-1.5," in EXPORTERS["csv"](tokens_table(below_zero)).decode(), "a number is no formula"


def test_markdown_is_text(folder: Path) -> None:
    text = markdown_report(read_run(folder))
    assert not acting(text)
    text = re.sub(r"(?<!\\)`[^`]*`", "", text)  # code is shown unchanged
    assert "<script" not in text
    assert not re.findall(r"(?<!\\)!\[[^\]]*\]\(([^)]*)\)", text), "a picture would be fetched"
    assert markdown_text("a | <b> [c](d) `e` \\|") == "a \\| &lt;b> \\[c\\](d) \\`e\\` \\\\\\|"


@pytest.mark.slow
def test_pictures_and_reports_are_written_and_links_are_not_followed(roofscope, folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """If report.html in a run folder is a link to a file elsewhere, that file does not change."""
    copied = shutil.copytree(folder, tmp_path / "run")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    names = ("report.html", "roofline.png", "report.html.part")
    for name in names:
        (copied / name).unlink(missing_ok=True)
        (copied / name).symlink_to(mine)
    for arguments in (["report", str(copied)], ["plot", str(copied), "roofline"]):
        outcome = roofscope(*arguments)
        assert outcome.code == 0, outcome.err
    assert mine.read_text() == "mine"
    assert (copied / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert not (copied / "report.html").is_symlink()


@pytest.mark.slow
def test_no_file_outside_is_read(folder: Path) -> None:
    """The reader opens only files in the run's folder; paths in run.json are plain text."""
    spy = f"""
import sys
from pathlib import Path
from profiler.store.folder import read_run
from profiler.report.write import html_report
from profiler.report.write import markdown_report
known = read_run(Path({str(OLD)!r}))
markdown_report(known)
html_report(known)
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
run = read_run(Path({str(folder)!r}))
markdown_report(run)
html_report(run)
print(*opened, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", spy], capture_output=True, text=True, check=True)
    opened = done.stdout.split()
    assert str(folder / "run.json") in opened
    assert {Path(name).suffix for name in opened if not Path(name).is_relative_to(folder)} <= {".mplstyle", ".py"}


@pytest.mark.parametrize("name", ["cells.csv", "samples.jsonl", "operators.csv", "config.json", "run.json"])
def test_a_folder_with_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    """A pipe would block the reader, and a link to a device would fill the memory."""
    for number, spoil in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        folder = shutil.copytree(OLD, tmp_path / str(number))
        (folder / name).unlink(missing_ok=True)
        spoil(folder / name)
        with pytest.raises(RunError, match=r"not a regular file|it has no"):
            read_run(folder)
        with pytest.raises(RunError, match=r"not a regular file|it has no"):
            judge_folder(folder)


def test_cells_that_are_written_hold_no_formula(tmp_path: Path) -> None:
    """cells.csv keeps every text unchanged, and a spreadsheet runs none of them as a formula."""
    run = old_run()
    words = [*map(visible, HOSTILE), "'=quoted", "''@twice", "-"]
    results = tuple(replace(run.results[0], engine=text) for text in words)
    write_cells(tmp_path, results)
    with (tmp_path / "cells.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert not any(re.match(r"[=+@-](?!\d[\d.e+-]*$)", text) for text in row.values()), "but numbers may be < 0"
    assert [result.engine for result in read_results(tmp_path)] == words


def test_cells_of_another_run(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(OLD, tmp_path / "run"))
    (copied / "run.json").write_text((copied / "run.json").read_text().replace('"eager"', '"=cmd"'))
    with pytest.raises(RunError, match="has no engine 'eager'"):
        read_run(copied)
