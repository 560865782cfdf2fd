"""A chart as inline SVG in the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import matplotlib.pyplot as plt
from markupsafe import Markup

from profiler.report.blocks import Tooltip
from profiler.report.plots import draw
from profiler.report.plots.style import styled
from profiler.store.folder import Run

_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_FONT = re.compile(r"\s*font-family:[^;]*;?")
# The whole value of a link, or a clip or hatch, as an attribute or within a style.
_REFERENCE = re.compile(r"^#([\w-]+)$|url\(#([\w-]+)\)")
# Names of the pictures' colours in style.css, which has a light and a dark variant of each.
_VARIABLES = {
    "#000000": "ink",
    "#222222": "ink",
    "#333333": "ink",
    "#ffffff": "paper",
    "#e3e3e3": "grid",
    "#cccccc": "line",
    "#888888": "dim",
    "#d55e00": "vermilion",
    "#0072b2": "blue",
    "#009e73": "green",
    "#cc79a7": "pink",
    "#e69f00": "amber",
    "#56b4e9": "sky",
    "#882255": "wine",
    "#44aa99": "teal",
}
_LEFT_OUT = {"metadata", "style"}


def inline_svg(runs: Sequence[Run], name: str, label: str, tooltips: Mapping[str, Tooltip] | None = None) -> Markup:
    """Return a picture of PLOTS or COMPARISONS as an HTML element, which scrolls in a narrower page.

    `tooltips` maps ids of the picture's elements to their tooltips. Raises the errors of `draw`.
    """
    root = _parsed(runs, name)
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
            _add_tooltip(element, element_id, tooltip)
    view = root.attrib["viewBox"]
    # A picture that is scaled down cannot be read, so a narrow page scrolls it, as it does tables.
    width = f"min-width: {float(view.split()[2]):.0f}px"
    root.attrib = {"viewBox": view, "class": "figure", "style": width, "role": "img", "aria-label": label}
    # Safe: the serialiser escaped every character.
    return Markup(
        f'<div class="scroll">{ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)}</div>'
    )


def _parsed(runs: Sequence[Run], name: str) -> ElementTree.Element:
    figure = draw(runs, name)
    file = io.StringIO()
    # Ids depend only on the picture's name: a run always gives the same page, and two pictures have different ids.
    with styled(**{"svg.hashsalt": name}):
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True)
    plt.close(figure)
    return ElementTree.fromstring(file.getvalue())


def _simplify(root: ElementTree.Element) -> None:
    """Remove namespaces, metadata and fonts, and replace colours with the page's variables."""
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items()}
        if "style" in element.attrib:
            element.set("style", _COLOR.sub(_variable, _FONT.sub("", element.attrib["style"])))
        for child in [child for child in element if _local(child.tag) in _LEFT_OUT]:
            element.remove(child)
        element.tail = None
        if not (element.text or "").strip():
            element.text = None


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _variable(match: re.Match[str]) -> str:
    return f"var(--{_VARIABLES[match[0]]})" if match[0] in _VARIABLES else match[0]


def _add_tooltip(element: ElementTree.Element, element_id: str, tooltip: Tooltip) -> None:
    title = ElementTree.Element("title")
    title.text = tooltip.title
    element.insert(0, title)
    element.set("id", element_id)
    element.set("class", tooltip.css_class)
    if tooltip.reachable:
        element.set("tabindex", "0")
