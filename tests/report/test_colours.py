"""Colours of a page: texts have a contrast of 4.5:1 against what is behind them, and areas and lines one of 3:1.

The ratio is that of WCAG 2.2: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio
"""

import re
from pathlib import Path

import pytest
from made_runs import REFERENCE, WHOLE

from profiler import report
from profiler.judge.breakdown import TERMS
from profiler.report.blocks import Picture
from profiler.report.html import inline_svg
from profiler.report.plots import PLOTS
from profiler.store.folder import read_run

STYLE = (Path(report.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
Rgb = tuple[float, float, float]
AREA, TEXT = 3.0, 4.5
FURNITURE = {"none", "var(--paper)", "var(--grid)", "var(--line)"}
"""What carries no figure: the background, grid lines, frames."""
SHADE = 0.12
"""Opacity of an area whose name is written in it."""


def rgb(colour: str) -> Rgb:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def over(colour: Rgb, opacity: float, behind: Rgb) -> Rgb:
    red, green, blue = (opacity * top + (1 - opacity) * base for top, base in zip(colour, behind, strict=True))
    return red, green, blue


def luminance(colour: Rgb) -> float:
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> dict[str, dict[str, Rgb]]:
    """Return the colours of each theme by the name of their variable."""
    light, dark = (
        {name: rgb(colour) for name, colour in re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)}
        for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    )
    return {"light": light, "dark": {**light, **dark}}


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> dict[str, Rgb]:
    return themes()[request.param]


def test_black_on_white_is_21() -> None:
    assert contrast(rgb("#000000"), rgb("#ffffff")) == pytest.approx(21)
    assert contrast(rgb("#777777"), rgb("#ffffff")) == pytest.approx(4.48, abs=0.01), "a known near miss"


def test_texts_of_the_style(theme: dict[str, Rgb]) -> None:
    texts = set(re.findall(r"(?<!-)\bcolor: var\(--(\w+)\)", STYLE)) | set(re.findall(r"fill: var\(--(\w+)\)", STYLE))
    assert texts >= {"ink", "dim", "warn", "blue"}
    for name in texts:
        assert min(contrast(theme[name], theme[behind]) for behind in ("paper", "soft")) >= TEXT, name


def test_terms_of_a_bar(theme: dict[str, Rgb]) -> None:
    """Neighbours in a bar are separated by a gap of paper."""
    for term in TERMS.values():
        assert contrast(theme[term.page_color], theme["paper"]) >= AREA, term.name
        assert not term.hatch or f'[data-hatch="{term.hatch[:1]}"]'.replace("\\", "\\\\") in STYLE
    assert re.search(r"\.bar \{[^}]*gap: 2px", STYLE)


def _value(style: str, name: str, default: str) -> str:
    return found[1] if (found := re.search(rf'(?:^|[ ;"]){name}[:=] ?"?([^;"]+)', style)) else default


def _paints(svg: str) -> set[tuple[str, str, float, str, float]]:
    """Return tag, fill, its opacity, stroke and its opacity of the elements of a picture."""
    found = set()
    for tag, attributes in re.findall(r"<(path|use|rect|text)\b([^>]*)>", svg):
        for style in re.findall(r'style="([^"]*)"', attributes) or [attributes]:
            if "fill" in style or "stroke" in style:
                whole = float(_value(style, "opacity", "1"))
                opacities = [whole * float(_value(style, f"{paint}-opacity", "1")) for paint in ("fill", "stroke")]
                fill, stroke = _value(style, "fill", "none"), _value(style, "stroke", "none")
                found.add((tag, fill, opacities[0], stroke, opacities[1]))
    return found


DRAWN = {"operators": "smollm2-135m-xeon-float32", "waterfall": "mistral-7b-h200-engines", "memory": "mistral-7b-h100"}
"""The run of a picture that the usual one does not have, or not with all of its colours."""


@pytest.mark.parametrize("name", PLOTS)
def test_every_element_of_a_picture(name: str) -> None:
    run = read_run(REFERENCE / DRAWN.get(name, WHOLE.name))
    svg = str(inline_svg(Picture(name, "", (run,)), 5.0))
    assert len(_paints(svg)) > 3
    for colours in themes().values():

        def colour(paint: str, colours: dict[str, Rgb] = colours) -> Rgb:
            return rgb(paint) if paint.startswith("#") else colours[paint.removeprefix("var(--").removesuffix(")")]

        paper = colours["paper"]
        behind = [paper]
        if name == "roofline":
            behind += [over(colours[shade], SHADE, paper) for shade in ("sky", "amber")]
        faces = [fill for tag, fill, *_ in _paints(svg) if tag == "path" and fill.startswith("var") and name == "map"]
        for tag, fill, fill_opacity, stroke, stroke_opacity in _paints(svg):
            if tag == "text":
                under = [colour(face) for face in faces if face not in FURNITURE] if fill.startswith("#") else behind
                assert min(contrast(colour(fill), each) for each in under) >= TEXT, (name, fill)
                continue
            drawn = [(fill, fill_opacity), (stroke, stroke_opacity)]
            shown = [(paint, opacity) for paint, opacity in drawn if paint not in FURNITURE and opacity > SHADE + 0.1]
            if shown and not fill.startswith("url("):
                assert all(
                    any(contrast(over(colour(paint), opacity, each), each) >= AREA for paint, opacity in shown)
                    for each in behind
                ), (name, fill, stroke)
