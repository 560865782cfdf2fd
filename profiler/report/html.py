"""report.html: one self-contained file that opens offline."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from profiler.grid.cells import Phase
from profiler.judge.breakdown import TERM_NAMES
from profiler.judge.precisions import precision_sentences
from profiler.report.batch_test import slope_texts
from profiler.report.breakdown_bars import BreakdownBar, breakdown_bars, terms_of
from profiler.report.execution import RAN_COLUMNS, ran_rows, trial_cell
from profiler.report.forecast import FORECAST_COLUMNS, answer_sentences, forecast_rows
from profiler.report.glossary import footnotes
from profiler.report.optional_sections import cold_lines, generate_lines, ragged_lines
from profiler.report.precisions import AGAINST_COLUMNS, PRECISION_COLUMNS, difference_rows, once_line, precision_rows
from profiler.report.roofline_data import cell_points, roof_lines
from profiler.report.sections import (
    activity_lines,
    host_line,
    instrument_line,
    no_claim_lines,
    noise_lines,
    quality_line,
    rank_lines,
    roofs_lines,
    stage_line,
    unexplained_lines,
    waterfalls,
)
from profiler.report.selection import MOST_ROWS_A_PHASE, MOST_SIZES, MOST_SORTED_A_PHASE, evenly, of_all, spanning
from profiler.report.svg import Mark, inline_svg
from profiler.report.tables import (
    COLUMNS,
    breakdown_rows,
    card_rows,
    engine_rows,
    entries,
    health_rows,
    lever_rows,
    module_time_rows,
    packed,
    roof_rows,
)
from profiler.store.folder import Run
from profiler.store.forecasts import read_costs, read_forecast
from profiler.units import duration, scaled

_MOST_BARS_A_PHASE = 100
_MOST_SERIES = 12
_ROOFLINE = "Achieved FLOP/s against arithmetic intensity, both logarithmic"
_ENGINES = "From the first engine's time to another's, term by term"
_COSTS = "USD a million output tokens over the sequences at once, by card, up to the largest batch of each"
_FORECAST = "Forecast time against the batch with the band that holds nine in ten, and measured cells"
_PRECISIONS = "Tokens per second of each precision, in decode against the batch and in prefill against its tokens"


@cache
def templates() -> Environment:
    """Return the environment of the page templates, which escapes every inserted value."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(scaled=scaled)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals.update(policy=_policy(environment))
    return environment


def _policy(environment: Environment) -> str:
    """Return a page's content security policy (https://www.w3.org/TR/CSP3/): own styles and the sorting script."""
    script = environment.get_template("sorter.html").render()
    own = script[script.index("<script>") + len("<script>") : script.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        " base-uri 'none'; form-action 'none'"
    )


def html_report(run: Run, *, draw: bool = True) -> str:
    """Return the report of a run as one HTML document, with its roofline unless `draw` is false."""
    measured = run.measured
    bars = breakdown_bars(measured, _MOST_BARS_A_PHASE)
    sorted_rows = spanning(run.results, MOST_SORTED_A_PHASE)
    forecast = read_forecast(run.folder)
    forecast_cells, carried = forecast_rows(forecast.cells) if forecast else ((), [])
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            run=run,
            document=run.document,
            model=run.model,
            measured=len(measured),
            roofline=_roofline(run) if measured and draw else None,
            drawn=len(cell_points(run)),
            terms=[(css_name(term), TERM_NAMES[term]) for term in terms_of(bars)],
            bars=_drawn_bars(bars),
            uncertain=breakdown_rows(run),
            ran_columns=RAN_COLUMNS,
            ran=ran_rows(run),
            tried_in=trial_cell(run),
            levers=lever_rows(run),
            cards=card_rows(run),
            maps=_maps(run),
            columns=[column.heading for column in COLUMNS],
            forecast=inline_svg([run], "forecast", _FORECAST) if forecast and measured else None,
            forecast_words=answer_sentences(forecast) if forecast else (),
            forecast_columns=FORECAST_COLUMNS,
            forecast_cells=forecast_cells,
            carried=carried,
            costs=inline_svg([run], "cost", _COSTS) if read_costs(run.folder) else None,
            rows=[entries(result) for result in spanning(run.results, MOST_ROWS_A_PHASE)],
            packed=packed(sorted_rows),
            sorted_rows=len(sorted_rows),
            all_rows=len(run.results),
            scaling=[test for test in run.document.scaling if test.axis == "batch"][:_MOST_SERIES],
            slope_texts=slope_texts,
            evenly=evenly,
            most_sizes=MOST_SIZES,
            inside=module_time_rows(run),
            active=[*activity_lines(run), *unexplained_lines(run), *rank_lines(run)],
            quality=quality_line(run),
            engines=engine_rows(run),
            generate=generate_lines(run),
            ragged=ragged_lines(run),
            cold=cold_lines(run),
            engine_waterfall=inline_svg([run], "engines", _ENGINES) if waterfalls(run) else None,
            no_claims=no_claim_lines(run),
            noisy=noise_lines(run),
            roofs=roofs_lines(run),
            host=host_line(run),
            roof_rows=roof_rows(run),
            health=health_rows(run),
            instrument=instrument_line(run),
            stages=stage_line(run),
            words=[line.replace("**", "", 2).split(": ", 1) for line in footnotes(run)] if measured else [],
        )
    )


def html_comparison(runs: Sequence[Run], folder: Path) -> str:
    """Return a comparison of several runs of one model as an HTML document in `folder`, with links to their reports."""
    drawable = all(run.measured for run in runs)
    return (
        templates()
        .get_template("comparison.html.j2")
        .render(
            runs=[(run, link_from(run, folder), quality_line(run)) for run in runs],
            first=runs[0],
            answer=precision_sentences(runs),
            picture=inline_svg(runs, "precisions", _PRECISIONS) if drawable else None,
            precision_columns=PRECISION_COLUMNS,
            precisions=precision_rows(runs),
            against_columns=AGAINST_COLUMNS,
            against=difference_rows(runs),
            once=once_line(runs),
        )
    )


def link_from(run: Run, folder: Path) -> str:
    """Return the path of a run's own report, relative to a folder."""
    return quote(Path(os.path.relpath(run.folder / "report.html", folder)).as_posix())


def _roofline(run: Run) -> Markup:
    """Return the roofline as SVG, with a tooltip for each roof and each cell."""
    marks = {f"roof-{number}": Mark(line.label, f"roof {line.kind}") for number, line in enumerate(roof_lines(run))}
    for number, point in enumerate(cell_points(run)):
        marks[f"cell-{number}"] = Mark(point.tooltip, f"point {point.key.phase}", reachable=True)
    return inline_svg([run], "roofline", _ROOFLINE, marks)


@dataclass(frozen=True)
class _Part:
    css: str
    left: float
    width: float
    """Position, in percent of the bar."""
    words: str


@dataclass(frozen=True)
class _Bar:
    name: str
    time: str
    parts: tuple[_Part, ...]

    @property
    def words(self) -> str:
        return ", ".join(part.words for part in self.parts)


def css_name(term: str) -> str:
    """Return a term's class in style.css."""
    return term.removesuffix("_s")


def _drawn_bars(bars: Sequence[BreakdownBar]) -> list[_Bar]:
    """Time breakdowns of cells, all on one scale."""
    low = min((segment.start for bar in bars for segment in bar.segments), default=0.0)
    high = max((segment.end for bar in bars for segment in bar.segments), default=1.0)
    percent = 100 / (high - low)
    return [
        _Bar(
            bar.name,
            duration(bar.result.latency_s),
            tuple(
                _Part(
                    css_name(segment.term),
                    percent * (segment.start - low),
                    percent * abs(segment.share),
                    f"{segment.name} {100 * segment.share:.1f} %",
                )
                for segment in bar.segments
            ),
        )
        for bar in bars
    ]


@dataclass(frozen=True)
class _Map:
    title: str
    depths: tuple[int, ...]
    rows: tuple[tuple[int, tuple[str, ...]], ...]
    """A batch size and its regime at each depth."""


def _maps(run: Run) -> list[_Map]:
    """Return the regimes over batch and depth: one table per phase and engine."""
    groups: dict[tuple[Phase, str], dict[tuple[int, int], str]] = {}
    for result in run.measured:
        depth = result.prompt_len if result.phase == "prefill" else result.context_len
        regimes = groups.setdefault((result.phase, result.engine), {})
        regimes[result.batch_size, depth] = result.regime or ""
    return [_map(f"{phase} ({engine})", regimes) for (phase, engine), regimes in groups.items()]


def _map(title: str, regimes: dict[tuple[int, int], str]) -> _Map:
    all_batches, all_depths = sorted({batch for batch, _ in regimes}), sorted({depth for _, depth in regimes})
    batches, depths = evenly(all_batches, MOST_SIZES), evenly(all_depths, MOST_SIZES)
    rows = tuple((batch, tuple(regimes.get((batch, depth), "") for depth in depths)) for batch in batches)
    shown = of_all(len(batches) * len(depths), len(all_batches) * len(all_depths))
    return _Map(title + shown, tuple(depths), rows)
