"""Render the sections of a report as one self-contained HTML file that opens offline."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from functools import cache, singledispatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
    visible_sections,
)
from profiler.report.columns import columns_with_values
from profiler.report.selection import report_rows
from profiler.report.svg import inline_svg
from profiler.report.time_breakdown import breakdown_bars, terms_of
from profiler.store.folder import Run
from profiler.units import duration, unbroken

_MOST_BARS_A_PHASE = 100


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
    shown, note = report_rows(block.run)
    columns = columns_with_values(block.run, "html")
    return _macro(
        "cells",
        headings=[column.heading for column in columns],
        rows=[[column.entry(result) for column in columns] for result in shown],
        note=note,
    )


@_render_block.register
def _(block: BreakdownChart) -> Markup:
    measured = block.run.measured
    bars = breakdown_bars(measured, _MOST_BARS_A_PHASE)
    note = f"{len(bars)} of {len(measured)} cells; all are in cells.csv." if len(bars) < len(measured) else ""
    # All bars are on one scale.
    low = min((segment.start for bar in bars for segment in bar.segments), default=0.0)
    high = max((segment.end for bar in bars for segment in bar.segments), default=1.0)
    terms = {term: TERMS[term].name for term in terms_of(bars)}
    return _macro("bars", terms=terms, bars=bars, low=low, percent=100 / (high - low), duration=duration, note=note)
