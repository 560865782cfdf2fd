"""Render the sections of a report as one self-contained HTML file that opens offline."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, singledispatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from profiler.judge.breakdown import TERMS
from profiler.report.blocks import (
    Block,
    BreakdownChart,
    CellsTable,
    Lines,
    Picture,
    Section,
    Sentences,
    ShellCommand,
    TextTable,
    Tooltip,
    visible_sections,
)
from profiler.report.columns import columns_with_values
from profiler.report.plots import draw
from profiler.report.plots.style import styled
from profiler.store.folder import Run
from profiler.units import unbroken


def html_page(title: str, subtitle: str, sections: Sequence[Section | None]) -> str:
    """Return the sections as one HTML document; a section without blocks for HTML is left out."""
    shown = [
        (section, [_render_block(block) for block in section.blocks]) for section in visible_sections(sections, "html")
    ]
    sortable = any(isinstance(block, CellsTable) for section, _ in shown for block in section.blocks)
    template = _templates().get_template("page.html.j2")
    return template.render(title=title, subtitle=subtitle, sections=shown, sortable=sortable)


def link_from(run: Run, folder: Path) -> str:
    """Return the path of a run's own report, relative to a folder."""
    return quote(Path(os.path.relpath(run.folder / "report.html", folder)).as_posix())


@cache
def _templates() -> Environment:
    """Return the environment of the page templates, which escapes every inserted value."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["unbroken"] = unbroken
    return environment


def _macro(name: str, **values: object) -> Markup:
    """Call a macro of blocks.html.j2."""
    macros: Any = _templates().get_template("blocks.html.j2").module
    rendered: Markup = getattr(macros, name)(**values)
    return rendered


@singledispatch
def _render_block(block: Block) -> Markup:
    """Return one block as HTML. Raises TypeError for a kind that HTML does not know."""
    raise TypeError(f"HTML renders no {type(block).__name__}")


@_render_block.register
def _(block: Sentences | Lines | TextTable | ShellCommand) -> Markup:
    return _macro(type(block).__name__, block=block)


@_render_block.register
def _(block: Picture) -> Markup:
    return inline_svg(block.runs, block.name, block.alt, block.tooltips)


@_render_block.register
def _(block: CellsTable) -> Markup:
    columns = columns_with_values(block.run, "html")
    rows = [[column.entry(result) for column in columns] for result in block.run.results]
    return _macro("cells", headings=[column.heading for column in columns], rows=rows)


@_render_block.register
def _(block: BreakdownChart) -> Markup:
    return inline_svg([block.run], "breakdown", "The terms of the time of cells, as shares")


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
    **dict.fromkeys(("#000000", "#222222", "#333333"), "var(--ink)"),
    "#ffffff": "var(--paper)",
    "#e3e3e3": "var(--grid)",
    "#cccccc": "var(--line)",
    "#888888": "var(--dim)",
}


def inline_svg(runs: Sequence[Run], name: str, label: str, tooltips: Mapping[str, Tooltip] | None = None) -> Markup:
    """Return a picture of PLOTS as an HTML element in the page's colours, which scrolls in a narrower page.

    `tooltips` maps ids of the picture's elements to their tooltips. Raises the errors of `draw`.
    """
    figure = draw(runs, name)
    file = io.StringIO()
    # Ids depend only on the picture's name: a run always gives the same page, and two pictures have different ids.
    with styled(**{"svg.hashsalt": name}):
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True)
    plt.close(figure)
    svg = _LEFT_OUT.sub("", file.getvalue())
    svg = _PAINT.sub(lambda paint: _COLOR.sub(lambda hue: _VARIABLES.get(hue[0], hue[0]), paint[0]), svg)

    def group(opened: re.Match[str]) -> str:
        """Return the opening tag of a group with its tooltip; ids that nothing names are left out."""
        tooltip = (tooltips or {}).get(opened[1])
        if tooltip is None:
            return opened[0] if f"#{opened[1]}" in svg else "<g>"
        tab = ' tabindex="0"' if tooltip.reachable else ""
        return f'<g id="{opened[1]}" class="{tooltip.css_class}"{tab}><title>{escape(tooltip.title)}</title>'

    [(root, view, width)] = re.findall(r'(<svg [^>]*viewBox="(\S+ \S+ (\d+)[^"]*)"[^>]*>)', svg)
    drawn = re.sub(r'<g id="([^"]*)">', group, svg[svg.index(root) + len(root) :])
    # A picture that is scaled down cannot be read, so a narrow page scrolls it, as it does tables.
    style = f'class="figure" style="min-width: {int(width) + 1}px" role="img" aria-label="{escape(label)}"'
    # Safe: matplotlib escaped every text.
    return Markup(f'<div class="scroll"><svg viewBox="{view}" {style}>{drawn}</div>')
