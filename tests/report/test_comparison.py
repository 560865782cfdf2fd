"""Several precisions of one model: one page and one screen, which hold each against the first."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import PRECISIONS, key, old_run, result, with_document
from pages import Page

from profiler.diagnosis.precisions import sentences
from profiler.record.run import Run, read_run
from profiler.report.comparison import AGAINST_COLUMNS, PRECISION_COLUMNS, against_rows, precision_rows
from profiler.report.comparison_table import print_comparison
from profiler.report.console import screen
from profiler.report.html import html_comparison
from profiler.report.page import write_comparison, write_reports


def made(quant: str, step_s: float, storage_bytes: int) -> Run:
    """One decode of a model in one precision."""
    run = old_run()
    model = replace(run.model, quant=quant, dtype="bfloat16", storage_bytes=storage_bytes)
    cell = result(key(), step_s, dequantise_s=0.0 if quant == "none" else 0.1)
    return replace(with_document(run, model=model), results=(cell,), folder=Path("/runs") / quant)


@pytest.fixture
def pair() -> list[Run]:
    """Half the time in a quarter of the memory."""
    return [made("none", 1.0, 4 * 10**9), made("nf4", 0.5, 10**9)]


def test_rows_have_the_figures_of_both(pair: list[Run]) -> None:
    first, second = (dict(zip(PRECISION_COLUMNS, row, strict=True)) for row in precision_rows(pair))
    assert (first["memory"], first["saved"], first["tok/s"]) == ("4.00 GB", "-", "1.00")
    assert (second["memory"], second["saved"], second["tok/s"]) == ("1.00 GB", "3.00 GB", "2.00")
    assert (first["dequantising"], second["dequantising"]) == ("-", "100 ms")
    [against] = against_rows(pair)
    assert against == ["decode 1 x 64", "nf4", "500 ms", "2.00x", "1.96 .. 2.04"]
    assert len(against) == len(AGAINST_COLUMNS)


def test_no_difference_is_claimed_from_one_visit_each(pair: list[Run]) -> None:
    """Twice as fast with intervals far apart: one visit of one of them does not prove it."""
    once = replace(pair[1], results=(replace(pair[1].results[0], visits=1),))
    often = replace(pair[0], results=(replace(pair[0].results[0], visits=6),))
    [row] = against_rows([often, once])
    assert row[-1] == "one visit: no claim"
    assert sentences([often, once]) == [
        "nf4 takes 4x less memory than none in bfloat16; decode was visited once (2x to 2x as fast then): no claim;"
        " --budget gives more."
    ]
    twice = replace(once, results=(replace(once.results[0], visits=2),))
    assert "is faster (up to 2x" in sentences([often, twice])[0]


def test_the_page_links_to_each_run(tmp_path: Path) -> None:
    base = shutil.copytree(PRECISIONS, tmp_path / "a model")
    runs = [read_run(base / name) for name in ("none", "nf4")]
    write_reports(runs)
    write_comparison(runs, base)
    page = Page((base / "report.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == ["none/report.html", "nf4/report.html"]
    assert all((base / str(link)).is_file() for link in links)
    text = page.words
    for run in runs:
        assert run.model.precision in text
        assert run.answer[0] in text
    assert "nf4 takes 4.6x less memory than none" in text
    assert page.count("svg") == 1
    assert "decode tokens/s" in text
    assert "prefill tokens/s" in text
    assert (base / "precisions.png").stat().st_size > 10_000
    assert not page.open
    assert page.count("script") == 0


def test_names_are_escaped(pair: list[Run]) -> None:
    evil = "<script>alert(1)</script>"
    runs = [with_document(run, model=replace(run.model, id=evil), answer=(evil,), warnings=(evil,)) for run in pair]
    text = html_comparison(runs, Path("/runs"))
    assert evil not in text
    assert evil in Page(text).words


def test_a_precision_without_a_number_is_still_told(pair: list[Run], tmp_path: Path) -> None:
    failed = replace(pair[1], results=(replace(pair[1].results[0], status="oom"),))
    write_comparison([pair[0], with_document(failed, answer=())], tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.count("svg") == 0
    assert "nothing to conclude" in page.words
    assert not (tmp_path / "precisions.png").exists()


def test_the_screen_has_room(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison([read_run(PRECISIONS / name) for name in ("none", "nf4", "int4wo")], screen())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("overhead-bound (kernels)" in line for line in lines), "nothing is cut off"
    assert any("speed-up" in line for line in lines)
