"""Several runs on one page and one screen: precisions compared with the first, and changes from one run to another."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import PRECISIONS, REFERENCE, key, old_run, result, with_document
from pages import Page

from profiler.comparison.command import compared
from profiler.comparison.text import changes_section, changes_table, column_words, comparison_sentences
from profiler.grid.cells import Cell
from profiler.report.terminal import print_sections, screen
from profiler.run.screens import (
    AGAINST_COLUMNS,
    PRECISION_COLUMNS,
    comparison_sections,
    difference_rows,
    html_comparison,
    precision_rows,
    precision_sentences,
    write_comparison,
)
from profiler.store.folder import Run, read_run


def show(runs: list[Run], *, plain: bool = False) -> None:
    print_sections(comparison_sections(runs, ["" for _ in runs]), screen(plain=plain))


def made(quant: str, step_s: float, storage_bytes: int) -> Run:
    """Return a run with one decode of a model in one precision."""
    run = old_run()
    model = replace(run.model, quant=quant, dtype="bfloat16", storage_bytes=storage_bytes)
    cell = result(key(), step_s, dequantise_s=0.0 if quant == "none" else 0.1)
    return replace(with_document(run, model=model), results=(cell,), folder=Path("/runs") / quant)


@pytest.fixture
def pair() -> list[Run]:
    """Return two runs: the second takes half the time and a quarter of the memory."""
    return [made("none", 1.0, 4 * 10**9), made("nf4", 0.5, 10**9)]


def test_rows_have_the_figures_of_both(pair: list[Run]) -> None:
    first, second = (dict(zip(PRECISION_COLUMNS, row, strict=True)) for row in precision_rows(pair))
    assert (first["memory"], first["saved"], first["tok/s"]) == ("4.00 GB", "-", "1.00")
    assert (second["memory"], second["saved"], second["tok/s"]) == ("1.00 GB", "3.00 GB", "2.00")
    assert (first["dequantising"], second["dequantising"]) == ("-", "100 ms")
    [against] = difference_rows(pair)
    assert against == ["decode 1 x 64", "nf4", "500 ms", "2.00x", "1.97 .. 2.03"]
    assert len(against) == len(AGAINST_COLUMNS)


def test_a_busy_machine_is_named_first(pair: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    busy = "This machine was busy: other work kept up to 1.0 cores busy."
    show([pair[0], with_document(pair[1], answer=[busy])])
    assert capsys.readouterr().out.strip().splitlines()[:2] == [
        busy,
        "nf4 takes 4x less memory than bfloat16; decode is faster throughout (up to 2x at batch 1 x 64).",
    ]


def test_words_say_where_it_wins_and_loses() -> None:
    base, slow, alike = made("none", 1.0, 10**9), made("int8", 4.0, 10**9), made("fp4", 1.0, 10**9)
    assert "decode is slower throughout (down to 0.25x" in precision_sentences([base, slow])[0]
    assert "decode is the same within 3 %" in precision_sentences([base, alike])[0]
    loose = replace(alike, results=(replace(alike.results[0], latency_low_s=1e-4, latency_high_s=12.0),))
    [unknown] = precision_sentences([base, loose])
    assert "decode cannot be distinguished" in unknown
    assert "the same" not in unknown
    two = [key(), key(batch=2)]
    base = replace(base, results=tuple(result(of) for of in two))
    slow = replace(slow, results=(result(two[0], 4.0), result(two[1], 4.0, latency_low_s=0.8)))
    assert "decode is slower in 1 of 2 cells (down to 0.25x at batch 1 x 64)" in precision_sentences([base, slow])[0]


def test_no_difference_is_claimed_from_one_visit_each(pair: list[Run]) -> None:
    """One visit of one side is not enough for a claim, even if it is twice as fast and the intervals are disjoint."""
    once = replace(pair[1], results=(replace(pair[1].results[0], visits=1),))
    often = replace(pair[0], results=(replace(pair[0].results[0], visits=6),))
    [row] = difference_rows([often, once])
    assert row[-1] == "one visit: no claim"
    assert precision_sentences([often, once]) == [
        "nf4 takes 4x less memory than bfloat16; decode was visited once (2x as fast then): no claim."
    ]
    twice = replace(once, results=(replace(once.results[0], visits=2),))
    assert "is faster throughout (up to 2x" in precision_sentences([often, twice])[0]


def in_many_cells(quant: str, step_s: float, more_s: float, visits: dict[int, int]) -> Run:
    """Return a run of 20 prompts, each with 10 decode steps.

    Steps are `more_s` longer per token of the prompt. The sweep took 400 s.
    """
    run = made(quant, 1.0, 10**9)
    rows = tuple(
        replace(result(replace(key(), cell=Cell(1, prompt, 10)), step_s + more_s * prompt), visits=visits[prompt])
        for prompt in range(1, 21)
    )
    return replace(with_document(run, stage_s={"timing": 400.0}), results=rows)


def test_a_cell_that_was_visited_once_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Three cells of nf4 were visited twice; int8 was visited once.

    The first precision had 23 visits of 20 equal cells in 400 s, so 40 visits take 696 s. The steps of nf4's visits add
    up to 13.84 s. With two visits per cell they add up to 24.2 s, which takes 699 s. The 20 visits of int8 took 400 s,
    so two per cell take 800 s. Visits get 67 % of a budget: 2,195 s need 3,276 s.
    """
    thrice, once = ({prompt: 2 if prompt in some else 1 for prompt in range(1, 21)} for some in ((3, 8, 13), ()))
    runs = [
        in_many_cells("none", 1.0, 0.0, thrice),
        in_many_cells("nf4", 0.5, 0.01, thrice),
        in_many_cells("int8", 4.0, 0.01, once),
    ]
    assert len(difference_rows(runs)) == 40
    show(runs, plain=True)
    text = capsys.readouterr().out
    assert "37 of 40 cells were visited once" in text
    assert "--budget 3280 for all of them" in text
    assert "as far as it was visited twice (3 of 20 cells)" in " ".join(text.split())
    assert "--budget 3280" in Page(html_comparison(runs, Path("/runs"))).words


def test_the_page_links_to_each_run(tmp_path: Path) -> None:
    base = shutil.copytree(PRECISIONS, tmp_path / "a model")
    runs = [read_run(base / name) for name in ("none", "nf4")]
    write_comparison(runs, base)
    page = Page((base / "report.html").read_text(encoding="utf-8"))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == ["none/report.html", "nf4/report.html"]
    text = page.words
    for run in runs:
        assert run.model.precision in text
        assert run.answer[0] in text
    assert "nf4 takes 4.6x less memory than float32" in text
    assert page.count("svg") == 1
    assert "tokens/s" in text
    assert "time of a decode step, ms" in text
    assert not page.open
    assert page.count("script") == 0


def test_a_precision_without_a_number_is_still_listed(pair: list[Run], tmp_path: Path) -> None:
    failed = replace(pair[1], results=(replace(pair[1].results[0], status="oom"),))
    write_comparison([pair[0], with_document(failed, answer=())], tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.count("svg") == 0
    assert "nothing to conclude" in page.words


def test_the_screen_has_room(capsys: pytest.CaptureFixture[str]) -> None:
    show([read_run(PRECISIONS / name) for name in ("none", "nf4", "int4wo")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("overhead-bound (kernels)" in line for line in lines), "nothing is cut off"
    assert any("speed-up" in line for line in lines)


@pytest.mark.slow
def test_the_screen_says_whether_drift_is_taken_off_and_why_nothing_is_claimed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cell visited once is inconclusive even if its interval is above 0, and its row says why.

    If the machine was 25 % faster, the report says that drift is taken off. If the drift is unknown, the report says
    that it is not taken off.
    """
    epyc, zen4 = (REFERENCE / f"smollm2-135m-{name}" for name in ("epyc", "zen4"))
    comparison = compared(epyc, zen4)
    assert any(item.low > 0 and item.verdict == "inconclusive" for item in comparison.changes)
    print_sections([changes_section(comparison)], screen())
    head, rows = capsys.readouterr().out.split("cell  ", 1)
    assert "drift is taken off" in " ".join(head.split())
    assert "inconclusive: the interval contains 0 and more than 3 %" in " ".join(head.split())
    assert rows.split("\n")[0].rstrip().endswith("reason")
    assert all(re.search(r"\+[1-9].*%.*inconclusive +one visit", row) for row in rows.split("\n") if "4 x 128" in row)
    still = replace(comparison, changes=tuple(replace(item, machine=0.0) for item in comparison.changes))
    assert "drift is not taken off" in column_words(still)


def test_a_faster_precision_is_reported_with_the_terms_that_changed() -> None:
    """nf4 reads 4.6 times fewer weight bytes but converts them; the row of a decode has both terms."""
    comparison = compared(PRECISIONS / "none", PRECISIONS / "nf4")
    first = next(change for change in comparison.changes if change.phase == "decode")
    assert first.terms["weights_s"] < 0
    assert sum(first.terms.values()) == pytest.approx(first.gained_s)
    assert len(changes_table(comparison).rows) == 8
    assert any("slower" in sentence or "faster" in sentence for sentence in comparison_sentences(comparison))
