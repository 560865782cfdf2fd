"""Render sections, such as those of a run's report, as one self-contained HTML file that opens offline."""

import io
import re
from collections.abc import Sequence
from functools import cache, singledispatch
from pathlib import Path

import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from profiler.judge.breakdown import TERMS
from profiler.report.blocks import Block, BreakdownChart, CellsTable, Picture, Section, visible_sections
from profiler.report.columns import columns_with_values
from profiler.report.plots import draw
from profiler.report.plots.style import styled
from profiler.report.sections import run_sections
from profiler.report.selection import of_first_engine
from profiler.report.time_breakdown import MOST_BARS_A_PHASE, WORTH_SHOWING, breakdown_bars, terms_of
from profiler.store.folder import Run, replace_file
from profiler.units import duration, unbroken, utc_minute


def write_report(run: Run) -> None:
    replace_file(run.folder / "report.html", html_report(run))


def html_report(run: Run) -> str:
    """Return the report of a run as one HTML document."""
    document = run.document
    unfinished = " · interrupted" if not document.finished else ""
    subtitle = f"{run.model.precision} · {utc_minute(document.created)} · roofscope {document.roofscope}{unfinished}"
    return html_page(f"{run.model.id} on {document.device.name}", subtitle, run_sections(run))


def html_page(title: str, subtitle: str, sections: Sequence[Section | None]) -> str:
    """Return the sections as one HTML document; a section without blocks for HTML is left out."""
    visible = visible_sections(sections, "html")
    shown = [(section, [_render_block(block) for block in section.blocks]) for section in visible]
    return _templates().get_template("page.html.j2").render(title=title, subtitle=subtitle, sections=shown)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "duration": duration,
        "unbroken": unbroken,
        "slug": lambda title: re.sub("[^a-z0-9]+", "-", title.lower()),
    }
    return environment


def _macro(name: str, **values: object) -> Markup:
    return Markup(getattr(_templates().get_template("blocks.html.j2").module, name)(**values))


@singledispatch
def _render_block(block: Block) -> Markup:
    return _macro(type(block).__name__, block=block)


@_render_block.register
def _(block: Picture) -> Markup:
    return _macro("Picture", wide=inline_svg(block, _WIDE_IN), narrow=inline_svg(block, _NARROW_IN))


@_render_block.register
def _(block: CellsTable) -> Markup:
    """Measured and failed cells; the notes below the table count those that were only forecast."""
    columns = columns_with_values(block.run, "html")
    shown = [result for result in block.run.results if result.status != "forecast"]
    rows = [[column.entry(result) for column in columns] for result in shown]
    return _macro("CellsTable", headings=[column.heading for column in columns], rows=rows)


@_render_block.register
def _(block: BreakdownChart) -> Markup:
    cells = [block.only] if block.only else of_first_engine(block.run)
    bars = sorted(breakdown_bars(cells, MOST_BARS_A_PHASE), key=lambda bar: bar.result.phase)
    legend, heading = [(term, term.name) for term in terms_of(bars)], ""
    if block.only:
        heading, step_s = "Where the time of a token goes: ", block.only.latency_s
        shown = [part for bar in bars for part in bar.segments if abs(part.share) >= WORTH_SHOWING]
        legend = [(part.term, f"{part.words}, {duration(part.share * step_s)}") for part in shown]
    return _macro("BreakdownChart", bars=bars, legend=legend, heading=heading)


_WIDE_IN, _NARROW_IN = 11.0, 5.0
"""Width of pictures: the page's, and that of a phone of 390 px."""
_PIXELS_A_POINT = 1.45  # of a screen: letters of 9 points have 13 pixels
_PAINT = re.compile(r'\b(?:style|fill|stroke)="[^"]*"')
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
# What a page has no use for: metadata, a style for all elements, comments, namespaces, fonts, space between elements.
_LEFT_OUT = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|\bxlink:(?=href)|font-family:[^;\"]*;?|(?<=>)\s+(?=<)",
    re.DOTALL,
)
# Names of the pictures' colours in style.css, which has a light and a dark variant of each.
_VARIABLES = {
    **{term.color.lower(): f"var(--{term.page_color})" for term in TERMS.values()},
    **dict.fromkeys(("#000000", "#222222", "#333333", "#424242"), "var(--ink)"),
    "#ffffff": "var(--paper)",
    "#e3e3e3": "var(--grid)",
    "#cccccc": "var(--line)",
    "#888888": "var(--dim)",
}


def inline_svg(block: Picture, width_in: float) -> Markup:
    """Return a picture of PLOTS as an SVG element in the page's colours. Raises the errors of `draw`."""
    figure = draw(block.runs, block.name, width_in)
    figure.suptitle("")  # the page has it
    file = io.StringIO()
    # Ids depend only on name and width: a run always gives the same page, and two pictures have different ids.
    with styled(**{"svg.hashsalt": f"{block.name} {width_in}"}):
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True)
    plt.close(figure)
    svg = _LEFT_OUT.sub("", file.getvalue())
    svg = _PAINT.sub(lambda paint: _COLOR.sub(lambda hue: _VARIABLES.get(hue[0], hue[0]), paint[0]), svg)
    tooltips = block.tooltips if width_in == _WIDE_IN else {}

    def group(opened: re.Match[str]) -> str:
        """Return the opening tag of a group with its tooltip; ids that nothing names are left out."""
        if opened[1] not in tooltips:
            return opened[0] if f"#{opened[1]}" in svg else "<g>"
        words, css_class = tooltips[opened[1]]
        tab = ' tabindex="0"' if opened[1].startswith("cell-") else ""
        return f'<g class="{css_class}"{tab}><title>{escape(words)}</title>'

    [(root, view, width)] = re.findall(r'(<svg [^>]*viewBox="(\S+ \S+ (\d+)[^"]*)"[^>]*>)', svg)
    drawn = re.sub(r'<g id="([^"]*)">', group, svg[svg.index(root) + len(root) :])
    # Safe: matplotlib escaped every text.
    look = f'style="max-width: {_PIXELS_A_POINT * int(width):.0f}px" role="img" aria-label="{escape(block.alt)}"'
    return Markup(f'<svg viewBox="{view}" {look}>{drawn}')
