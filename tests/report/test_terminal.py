"""The first screen: the answer, the table, a bar per cell, to scale; and tables of devices next to datasheets."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from docs.schemas import assert_follows
from made_runs import REFERENCE, ceiling, key, old_run, result, with_document
from rich.console import Console

from profiler.data.datasheets import gpus
from profiler.data.links import MessageTime, fit_link
from profiler.facts.ceilings import Ceilings
from profiler.grid.cells import Cell
from profiler.json_document import json_text
from profiler.measure.schedule import Progress
from profiler.report.blocks import Lines, Section, TextTable, text_table
from profiler.report.cells import cells
from profiler.report.device import ceilings_table, gpus_table, link_document, link_lines, link_table
from profiler.report.html import html_report
from profiler.report.overview import seconds_table
from profiler.report.progress import LineListener
from profiler.report.sections import SECTIONS, run_sections
from profiler.report.terminal import print_sections
from profiler.report.time_breakdown import bar_text, breakdown, breakdown_bars, shares_table
from profiler.store.document import LargerGrid
from profiler.store.folder import Run, read_run


def lines_of(sections: Sequence[Section | None], width: int = 100, most_lines: int | None = None) -> list[str]:
    stream = io.StringIO()
    print_sections(sections, Console(file=stream, width=width, markup=False, emoji=False), most_lines)
    return stream.getvalue().splitlines()


def test_a_bar_has_the_shares_of_its_cell() -> None:
    """Half weights, a quarter overhead, a quarter arithmetic; negative terms take no space."""
    cell = result(key(), 1.0, weights_s=0.5, overhead_s=0.25, compute_s=0.25)
    [bar] = breakdown_bars([cell], 8)
    text = bar_text(bar)
    widths = [(span.style, span.end - span.start) for span in text.spans]
    assert widths == [("blue", 24), ("yellow", 12), ("magenta", 12)]
    [bar] = breakdown_bars([replace(cell, unexplained_s=-0.08)], 8)
    assert bar_text(bar) == text


@pytest.mark.parametrize(
    ("width", "left_out"), [(100, []), (80, ["memory"]), (64, ["memory", "B/s", "FLOP/s", "tok/s"])]
)
def test_a_narrow_screen_has_fewer_columns_and_cuts_none(width: int, left_out: list[str]) -> None:
    """On a GPU the peak memory leaves first; at 80 columns every figure of the answer stays, and none is cut."""
    run = read_run(REFERENCE / "mistral-7b-h100")
    lines = lines_of(run_sections(run), width)
    assert next(filter(None, lines)).startswith(run.answer[0][:40]), "the answer comes first"
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    [heads] = [line.split() for line in lines if line.startswith("batch x tokens")]
    assert [name for name in ("memory", "B/s", "FLOP/s", "tok/s") if name not in heads] == left_out
    assert {"batch", "tokens", "time", "±", "%", "ceiling", "regime,", "confidence"} <= set(heads)


def test_a_negative_rest_is_shown_beyond_the_largest_terms() -> None:
    """Terms that add up to 104 % show their -4 %, though four others are larger."""
    terms = {"compute_s": 0.5, "kernel_s": 0.32, "overhead_s": 0.15, "redundant_s": 0.07, "unexplained_s": -0.04}
    bars = breakdown_bars([result(key(), 1.0, weights_s=0.0, **terms)], 8)
    [[_, words]] = shares_table(bars, 4).rows
    assert words == "arithmetic 50 %, kernels 32 %, overhead 15 %, redundant work 7 %, unexplained -4 %"


def test_a_cell_without_a_bar_is_named() -> None:
    """A time known to within 40 % has none, nor has a step of 357 ms whose kernels took 3.8 s while other work ran."""
    noisy = result(key(), 1.0, latency_low_s=0.6, latency_high_s=1.4, noise="unusable")
    later = result(key(batch=2), 0.357, kernel_s=3.8, unexplained_s=0.357 - 3.8)
    *_, bar, note = lines_of([breakdown(replace(old_run(), results=(noisy, later, result(key(batch=4)))))])
    assert bar.startswith("decode 4 x 64")
    assert note == "no bar for 2 cells (first: decode 1 x 64 is known only to within 40 %)"


def test_the_seconds_of_a_stage_are_a_share_of_those_after_loading() -> None:
    """An H200's minute: 43 s from the loaded model, of which timing took 27 %."""
    assert ["timing", "11.4 s", "27 %"] in seconds_table(read_run(REFERENCE / "mistral-7b-h200-default")).rows


@pytest.mark.parametrize(("budget_s", "why"), [(400.0, "needs about --budget 400"), (None, "does not fit into memory")])
def test_the_larger_grid_that_was_left_out_is_named_with_its_budget(budget_s: float | None, why: str) -> None:
    grid = replace(old_run().document.grid, larger=LargerGrid((128, 512), (1, 4, 16), budget_s))
    run = with_document(old_run(), grid=grid)
    assert f"a larger grid, prompts 128, 512 x batches 1, 4, 16, {why}" in lines_of([cells(run)])


def test_cells_of_a_default_grid_that_the_budget_did_not_reach_are_named() -> None:
    grid = replace(old_run().document.grid, unreached=(Cell(4, 64, 10), Cell(4, 256, 10)))
    run = with_document(old_run(), grid=grid)
    assert "left out: 4 x 64, 4 x 256 tokens; a larger --budget reaches them" in lines_of([cells(run)])


def test_a_ranked_table_keeps_its_first_rows_and_another_one_spans_all() -> None:
    """Of 100 rows a screen of 45 lines has the first, or evenly picked ones from the first to the last."""
    rows = [[f"row {number}", "1"] for number in range(100)]
    for ranked in (True, False):
        lines = lines_of([Section("", [text_table(("name", "value"), rows, ranked=ranked)])], 80, most_lines=45)
        shown = [line.split("  ")[0] for line in lines if line.startswith("row ")]
        assert shown[0] == "row 0"
        assert shown[-1] == (f"row {len(shown) - 1}" if ranked else "row 99")
        assert f"{len(shown)} of 100 rows" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [60, 61, 62, 70, 80, 100])
def test_no_word_of_a_table_is_torn(width: int) -> None:
    """A text and a first column break between words, and a number of 30 characters never."""
    row = ("decode 16 x 4096, threads 8", f"{10**29}", "arithmetic +178 ms where others kept 0.9 cores busy")
    table = text_table(("cell", "change", "reason"), [row], wrapped=("reason",))
    lines = lines_of([Section("", [table])], width)
    assert max(map(len, lines)) <= width
    assert {*" ".join(row).split()} <= {*" ".join(lines).split()}


def test_negative_terms_are_left_of_zero() -> None:
    cell = result(key(), 1.0, weights_s=1.1, kernel_s=-0.02, unexplained_s=-0.08)
    [bar] = breakdown_bars([cell], 8)
    spans = {item.term.name: (item.start, item.end) for item in bar.segments}
    assert spans["weights"] == (0.0, pytest.approx(1.1))
    assert spans["kernels below the ceiling"] == (pytest.approx(-0.02), pytest.approx(0.0))
    assert spans["unexplained"] == (pytest.approx(-0.10), pytest.approx(-0.02))
    assert sum(item.share for item in bar.segments) == pytest.approx(1.0)
    assert bar.below_zero == "kernels -2 %, unexplained -8 %"
    [tiny] = breakdown_bars([result(key(), 1.0, weights_s=1.005, unexplained_s=-0.005)], 8)
    assert tiny.below_zero == ""


def test_a_line_per_stage_and_one_per_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    listener = LineListener()
    listener.stage("timing")
    for repetition, elapsed_s, left_s in ((1, 0, 60), (1, 29, 31), (1, 45, 15), (2, 70, 5), (2, 90, 1)):
        listener.progress(Progress(Cell(1, 64, 8), repetition, elapsed_s, left_s), 4)
    assert capsys.readouterr().err.splitlines() == [
        "timing",
        "batch 1 x 64, repetition 1, about 1:00 left",
        "batch 1 x 64, repetition 1, about 0:15 left",
        "batch 1 x 64, repetition 2, about 0:01 left",
    ]


def toy(run: Run) -> Section:
    table = text_table(("dish", "price"), [["<soup>", "3.50"]], caption="of today")
    return Section("A toy section", [Lines([f"cooked for {run.model.id}"]), table], "made up")


def test_a_new_section_is_one_function_that_every_report_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.report.sections.SECTIONS", [*SECTIONS, toy])
    run = old_run()
    page = html_report(run)
    for text in ("\n".join(lines_of(run_sections(run))), page):
        assert f"cooked for {run.model.id}" in text
        assert "of today" in text
    assert "A toy section" in page


def printed(table: TextTable) -> list[str]:
    return [" ".join(line.split()) for line in lines_of([Section("", [table])])]


def test_a_ceiling_is_next_to_its_datasheet() -> None:
    ceilings = Ceilings({"float32": ceiling(8e12)}, {"read": ceiling(1.5e11)}, 1 << 30, True, launch={"host_s": 4e-6})
    lines = printed(ceilings_table(ceilings, {"float32": 1e13, "bandwidth": 3e11}))
    assert "float32 8.00 TFLOP/s 7.20 T to 8.80 T 80 % - 8 by hand" in lines
    assert "read 150 GB/s 135 G to 165 G 50 % - 8 by hand" in lines
    assert "launch, host 4.00 µs - one tiny kernel" in lines
    assert "read 150 GB/s 135 G to 165 G - - 8 by hand" in printed(ceilings_table(ceilings, {}))


def test_every_card_is_one_line_of_100_columns() -> None:
    lines = printed(gpus_table(gpus()))
    assert "T4 16 320 0.254 8.10 - 65.0 - - 130 203 70" in lines
    # A shown figure is marked if sources differ on it. Sources differ on the L2 of an RTX A5000, which is not shown.
    for gpu in gpus():
        # The memory follows the name, because RTX 4070 is also the start of another name.
        [line] = [line for line in lines if re.match(rf"{re.escape(gpu.gpu)}( [?])?( [0-9.-]+){{11}}$", line)]
        if gpu.gpu in ("L40", "RTX A5000"):
            assert ("?" in line) == (gpu.gpu == "L40")


def test_the_document_has_the_rates_of_nccl_tests() -> None:
    """All-reduces of 4 ranks send 2 x 3/4 of their bytes, here at 200 GB/s after 20 µs."""
    points = [MessageTime(4, size, 20e-6 + 1.5 * size / 200e9) for size in (1 << power for power in range(10, 27))]
    document = link_document(fit_link("planted", points, "arithmetic"))
    assert_follows("ceilings-link", json.loads(json_text(document)))
    assert document.ranks == 4
    assert document.alpha_s == pytest.approx(20e-6)
    largest = document.points[-1]
    assert largest.bus_bytes_per_s == pytest.approx(1.5 * largest.alg_bytes_per_s)
    assert largest.fitted_s == pytest.approx(largest.seconds)
    assert len(link_table(document).rows) == 17
    text = " ".join(link_lines(document))
    assert "20.0 µs" in text
    assert "below 2.54 MiB wait mostly for latency" in text
    assert text.endswith("--tp 4 --link 20.0,200")
