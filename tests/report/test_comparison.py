"""Several runs on one page and one screen: precisions compared with the first, and changes from one run to another."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import PRECISIONS, Page, key, old_run, result, with_document

from profiler.run.screens import AGAINST_COLUMNS, PRECISION_COLUMNS, difference_rows, precision_rows, write_comparison
from profiler.store.folder import Run, read_run


def made(base: Path, quant: str, step_s: float, storage_bytes: int) -> Run:
    """Return a run with one decode of a model in one precision."""
    run = old_run()
    model = replace(run.model, quant=quant, dtype="bfloat16", storage_bytes=storage_bytes)
    cell = result(key(), step_s, dequantise_s=0.0 if quant == "none" else 0.1)
    return replace(with_document(run, model=model), results=(cell,), folder=base / quant)


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    """Return two runs: the second takes half the time and a quarter of the memory."""
    return [made(tmp_path, "none", 1.0, 4 * 10**9), made(tmp_path, "nf4", 0.5, 10**9)]


def test_rows_have_the_figures_of_both(pair: list[Run]) -> None:
    first, second = (dict(zip(PRECISION_COLUMNS, row, strict=True)) for row in precision_rows(pair))
    assert (first["memory"], first["saved"], first["tok/s"]) == ("4.00 GB", "-", "1.00")
    assert (second["memory"], second["saved"], second["tok/s"]) == ("1.00 GB", "3.00 GB", "2.00")
    assert (first["dequantising"], second["dequantising"]) == ("-", "100 ms")
    [against] = difference_rows(pair)
    assert against == ["decode 1 x 64", "nf4", "500 ms", "2.00x", "1.97 .. 2.03"]
    assert len(against) == len(AGAINST_COLUMNS)


def test_a_cell_that_was_timed_once_is_counted(tmp_path: Path) -> None:
    """The first of two cells of nf4 was timed twice; int8 was timed once."""
    runs = []
    for quant, step_s, repetitions in (("none", 1.0, (2, 1)), ("nf4", 0.5, (2, 1)), ("int8", 4.0, (1, 1))):
        rows = [
            replace(result(key(batch=batch), step_s), repetitions=count)
            for batch, count in zip((1, 2), repetitions, strict=True)
        ]
        runs.append(replace(made(tmp_path, quant, 1.0, 10**9), results=tuple(rows)))
    write_comparison(runs)
    words = Page((tmp_path / "report.html").read_text(encoding="utf-8")).words
    assert "3 of 4 cells were timed once" in words
    assert "as far as it was timed twice (1 of 2 cells)" in words


def test_the_page_links_to_each_run(tmp_path: Path) -> None:
    base = shutil.copytree(PRECISIONS, tmp_path / "a model")
    runs = [read_run(base / name) for name in ("none", "nf4")]
    write_comparison(runs)
    page = Page((base / "report.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == ["none/report.html", "nf4/report.html"]
    text = page.words
    for run in runs:
        assert run.model.precision in text
        assert run.answer[0] in text
    assert "nf4 takes 4.6x less memory than float32" in text
    assert page.count("div", "wide") == page.count("div", "narrow") == 1
    assert "tokens/s" in text
    assert "time of a decode step, ms" in text
    assert not page.open
    assert page.count("script") == 0


def test_a_precision_without_a_number_is_still_listed(pair: list[Run], tmp_path: Path) -> None:
    failed = replace(pair[1], results=(replace(pair[1].results[0], status="oom"),))
    write_comparison([pair[0], with_document(failed, answer=())])
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.count("svg") == 0
    assert "nothing to conclude" in page.words
