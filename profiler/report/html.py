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
from xml.etree import ElementTree

import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from profiler.judge.breakdown import TERMS
from profiler.report.blocks import (
    Block,
    BreakdownChart,
    CellsTable,
    Definitions,
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
from profiler.report.time_breakdown import breakdown_bars, terms_of
from profiler.store.folder import Run
from profiler.units import duration, unbroken


def html_page(title: str, subtitle: str, sections: Sequence[Section | None]) -> str:
    """Return the sections as one HTML document; a section without blocks for HTML is left out."""
    shown = [
        (section, [_render_block(block) for block in section.blocks]) for section in visible_sections(sections, "html")
    ]
    sortable = any(isinstance(block, CellsTable) for section, _ in shown for block in section.blocks)
    template = _templates().get_template("page.html.j2")
    colors = {column: term.page_color for column, term in TERMS.items()}
    return template.render(title=title, subtitle=subtitle, sections=shown, sortable=sortable, colors=colors)


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
def _(block: Sentences | Lines | TextTable | Definitions | ShellCommand) -> Markup:
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
    measured = block.run.measured
    bars = breakdown_bars(measured, len(measured))
    note = f"{len(bars)} of {len(measured)} cells; all are in cells.csv." if len(bars) < len(measured) else ""
    # All bars are on one scale.
    low = min((segment.start for bar in bars for segment in bar.segments), default=0.0)
    high = max((segment.end for bar in bars for segment in bar.segments), default=1.0)
    terms = {term: TERMS[term].name for term in terms_of(bars)}
    return _macro("bars", terms=terms, bars=bars, low=low, percent=100 / (high - low), duration=duration, note=note)


_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_FONT = re.compile(r"\s*font-family:[^;]*;?")
# The whole value of a link, or a clip or hatch, as an attribute or within a style.
_REFERENCE = re.compile(r"^#([\w-]+)$|url\(#([\w-]+)\)")
# Names of the pictures' colours in style.css, which has a light and a dark variant of each.
_VARIABLES = {
    "#000000": "var(--ink)",
    "#222222": "var(--ink)",
    "#333333": "var(--ink)",
    "#ffffff": "var(--paper)",
    "#e3e3e3": "var(--grid)",
    "#cccccc": "var(--line)",
    "#888888": "var(--dim)",
    "#d55e00": "var(--vermilion)",
    "#0072b2": "var(--blue)",
    "#009e73": "var(--green)",
    "#cc79a7": "var(--pink)",
    "#e69f00": "var(--amber)",
    "#56b4e9": "var(--sky)",
    "#882255": "var(--wine)",
    "#44aa99": "var(--teal)",
}
_LEFT_OUT = {"metadata", "style"}


def inline_svg(runs: Sequence[Run], name: str, label: str, tooltips: Mapping[str, Tooltip] | None = None) -> Markup:
    """Return a picture of PLOTS or COMPARISONS as an HTML element, which scrolls in a narrower page.

    `tooltips` maps ids of the picture's elements to their tooltips. Raises the errors of `draw`.
    """
    figure = draw(runs, name)
    file = io.StringIO()
    # Ids depend only on the picture's name: a run always gives the same page, and two pictures have different ids.
    with styled(**{"svg.hashsalt": name}):
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True)
    plt.close(figure)
    root = ElementTree.fromstring(file.getvalue())
    _simplify(root)
    referenced = {
        link or url
        for element in root.iter()
        for value in element.attrib.values()
        for link, url in _REFERENCE.findall(value)
    }
    for element in root.iter():
        element_id = element.attrib.pop("id", "")
        if element_id in referenced:
            element.set("id", element_id)
        if tooltips and (tooltip := tooltips.get(element_id)):
            title = ElementTree.Element("title")
            title.text = tooltip.title
            element.insert(0, title)
            element.attrib |= {"id": element_id, "class": tooltip.css_class}
            element.attrib |= {"tabindex": "0"} if tooltip.reachable else {}
    view = root.attrib["viewBox"]
    # A picture that is scaled down cannot be read, so a narrow page scrolls it, as it does tables.
    width = f"min-width: {float(view.split()[2]):.0f}px"
    root.attrib = {"viewBox": view, "class": "figure", "style": width, "role": "img", "aria-label": label}
    # Safe: the serialiser escaped every character.
    return Markup(
        f'<div class="scroll">{ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)}</div>'
    )


def _simplify(root: ElementTree.Element) -> None:
    """Remove namespaces, metadata and fonts, and replace colours with the page's variables."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if "style" in element.attrib:
            style = _FONT.sub("", element.attrib["style"])
            element.set("style", _COLOR.sub(lambda color: _VARIABLES.get(color[0], color[0]), style))
        for child in [child for child in element if child.tag.rpartition("}")[2] in _LEFT_OUT]:
            element.remove(child)
        element.tail = None
        if not (element.text or "").strip():
            element.text = None
