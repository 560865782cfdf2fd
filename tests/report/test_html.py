"""report.html of a run, which fetches nothing, also in a real browser; and pages that compare several runs."""

import json
import math
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from browser import BROWSER, dumped
from made_runs import PRECISIONS, ROOT, Page, key, old_run, result, whole_run, with_document

from profiler.facts.change_ids import ChangeId
from profiler.judge.advice import Advice, Effect
from profiler.judge.breakdown import TERMS
from profiler.report.html import html_report, write_report
from profiler.report.roofline_data import ceiling_lines
from profiler.run.screens import AGAINST_COLUMNS, PRECISION_COLUMNS, difference_rows, precision_rows, write_comparison
from profiler.store.folder import Run, read_run


@pytest.fixture(scope="module")
def old_page() -> str:
    return html_report(old_run())


def test_every_cell_is_a_point_with_a_tooltip() -> None:
    run = whole_run()
    page = Page(html_report(run))
    for phase in ("prefill", "decode"):
        assert page.count("g", phase) == sum(result.phase == phase for result in run.measured)
    for cell in run.results:
        assert f"{cell.key.name}: " in page.words
    assert run.document.answer[0] in page.words
    assert run.document.command in page.words


def test_a_runs_terms_are_in_the_legend(old_page: str) -> None:
    split = old_page.split('<ul class="legend">')[2].split("</ul>")[0]
    # An eager run on one device converts, pads and fetches nothing, and has no engine term.
    present = ("weights", "kv", "compute", "kernel", "redundant", "overhead", "unexplained")
    names = {TERMS[f"{name}_s"].name for name in present}
    assert names == {term.name for term in TERMS.values()} & {words.strip() for words in Page(split).text}


def test_nothing_is_fetched(old_page: str) -> None:
    page = Page(old_page)
    assert not page.open
    for _tag, attrs in page.tags:
        assert not {"src", "srcset", "action"} & set(attrs)
        assert str(attrs.get("href", "#")).startswith("#")
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|https?://", old_page)
    assert len(old_page) < 3_000_000


@pytest.mark.ci
def test_an_empty_run_and_a_partly_failed_one(tmp_path: Path) -> None:
    run = old_run()
    failed = tuple(replace(result, status="failed", latency_s=math.nan, regime=None) for result in run.results)
    nothing = replace(with_document(run, answer=(), evidence=()), folder=tmp_path, results=failed)
    write_report(nothing)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "nothing to conclude" in text
    assert "failed" in text
    assert "<svg" not in text
    part = replace(run, results=(replace(run.results[0], status="oom", latency_s=math.nan), *run.results[1:]))
    assert "oom" in html_report(part)
    one = replace(run, results=tuple(result for result in run.results if result.phase == "decode")[:1])
    assert Page(html_report(one)).count("g", "decode") == 1


def test_a_page_begins_with_figures_and_the_advised_line() -> None:
    """The answer's sentences say nothing here: the page has the line and its times from the document."""
    advice = Advice(
        ChangeId.STATIC_CACHE, "a static cache", 'cache_implementation="static"', 1, 64,
        Effect(20e-3, 8e-3, 1e-4), Effect(30e-3, 31e-3, 2e-3), 4, 4,
    )  # fmt: skip
    cells = [
        result(key("prefill"), 30e-3, ttft_s=31e-3),
        result(key("decode"), 20e-3, attained=0.15, regime="overhead-bound", weights_s=5e-3, overhead_s=15e-3),
        result(key("decode", 8), 25e-3),
        result(key("decode", 1, 32), 5e-3, noise="unusable"),
    ]
    page = html_report(replace(with_document(old_run(), answer=("Nothing.",), advised=(advice,)), results=tuple(cells)))
    words = Page(page).words
    for figure in (
        "20.0 ms per token decode, 64 tokens", "320 tokens/s decode, 8 x 64 tokens",
        "31.0 ms to the first token prefill, 64 tokens", "15 % of its ceiling",
        "weights 25 %, 5.00 ms", "overhead 75 %, 15.0 ms",
        "a decode step of 8.00 ms instead of 20.0 ms at 1 x 64 (tried)",
    ):  # fmt: skip
        assert figure in words
    assert words.index("per token") < words.index("overhead 75") < words.index("cache_implementation")
    assert words.index("cache_implementation") < words.index("Nothing.") < words.index("Roofline")


@pytest.mark.ci
def test_the_answers_lines_are_code_to_copy_and_the_roofline_is_first() -> None:
    """The line that was not tried, and the run's own command with a budget that has time to compile."""
    run = read_run(ROOT / "runs/reference/mistral-7b-h100-default")
    page = html_report(run)
    code = [unescape(re.sub("<[^>]*>", "", line)) for line in re.findall(r'<pre class="code">(.*?)</pre>', page)]
    assert code[0] == 'model.generate(..., cache_implementation="static")'
    [trial] = [line for line in code if line.endswith("--budget 360")]
    assert trial.startswith("roofscope run mistral-7b-v0.1 ")
    assert trial.count("--budget") == 1
    titles = re.findall(r"<h2>([^<]+)", page)
    assert [title.strip() for title in titles[:2]] == ["Roofline", "Cells"]
    assert len(titles) <= 11, "with what has no title, 12"
    assert page.count("<details>") == len(titles) - 2, "the rest is folded"
    assert "15.3\u00a0ms" in page, "no line ends between a number and its unit"


# Opens all sections, clicks a heading and copy buttons, and writes the resulting texts into the document.
PROBE = """
<script>
const all = selector => [...document.querySelectorAll(selector)];
all("details").forEach(each => each.open = true);
const buttons = all("#cells th button");
const column = buttons.findIndex(button => button.textContent === "time");
buttons[column].click();
const units = {s: 1, ms: 1e-3, "µs": 1e-6};
const seconds = text => parseFloat(text) * units[text.split(" ")[1]];
const times = all("#cells tbody tr").map(row => seconds(row.children[column].textContent));
const shown = all("svg").filter(each => each.getClientRects().length);
const width = document.documentElement.clientWidth;
const copied = [];
document.execCommand = () => copied.push(document.querySelector("textarea").value);
all("button.copy").forEach(button => button.click());
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify({
  sorted: times.every((value, index) => !index || times[index - 1] <= value),
  shown: times.length,
  least: times[0],
  hover: document.querySelector(".point.decode title").textContent,
  ceilings: all(".ceiling title").length,
  wide: document.documentElement.scrollWidth > width,
  ink: getComputedStyle(shown[0].querySelector("text")).fill,
  letters: Math.min(...shown.flatMap(svg => [...svg.querySelectorAll("text")].map(
    text => parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a))) >= 9,
  pictures: shown.length,
  whole: shown.every(svg => svg.getBoundingClientRect().left >= 0 && svg.getBoundingClientRect().right <= width),
  captions: all("caption").every(caption => caption.getBoundingClientRect().right <= width),
  contents: all("nav a").every(link => document.querySelector(link.getAttribute("href"))),
  copied: copied.at(-1),
  heading: copied.find(text => text.includes("\\t")).split("\\t")[0],
  requests: performance.getEntriesByType("resource").length,
});
document.body.append(probe);
</script>
"""


@pytest.fixture(scope="module")
def large_page() -> str:
    """A real run with 400 more cells, the fastest of which is in the middle."""
    run = whole_run()
    decode = next(result for result in run.results if result.phase == "decode" and result.status == "ok")
    more = (replace(decode, batch_size=1000 + step, latency_s=1e-5 if step == 177 else 20e-3) for step in range(400))
    return html_report(replace(run, results=(*run.results, *more)))


@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_headless_browser(width: int, large_page: str, tmp_path: Path) -> None:
    run = whole_run()
    options = ("--virtual-time-budget=2000", f"--window-size={width},900")
    probe = json.loads(unescape(dumped(large_page, PROBE, tmp_path / "report.html", *options)))
    assert probe.pop("hover").startswith("decode 1 x")
    assert probe == {
        "sorted": True,
        "shown": 432,  # 16 prefills and 416 decodes
        "least": pytest.approx(1e-5),
        "ceilings": len(ceiling_lines(run)),
        "wide": False,  # the page itself never scrolls sideways
        "ink": "rgb(27, 31, 36)",  # a picture's text has the page's text colour
        "letters": True,  # none is smaller than 9 px
        "pictures": 2,  # roofline and map
        "whole": True,
        "captions": True,
        "contents": True,
        "copied": run.document.command,
        "heading": "phase",
        "requests": 0,
    }


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
