"""Draw docs/images/token.svg, README's picture, from committed runs: `python -m tests.readme_picture`."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/token.svg"
RUNS = ROOT / "runs/reference"

_WIDTH, _LEFT, _PER_MS, _TOP, _ROW = 760, 214, 7.9, 56, 34
COLOURS = {
    "light": {"paper": "#ffffff", "ink": "#1b1f24", "dim": "#5b6672", "works": "#0072b2", "waits": "#c05200",
              "plans": "#8a4f7d"},
    "dark": {"paper": "#14181d", "ink": "#e8ebee", "dim": "#a3adb8", "works": "#3d9be0", "waits": "#ff8a3d",
             "plans": "#d58fc4"},
}  # fmt: skip
"""Of each theme; the panel has its own paper, as a page's theme may differ from the browser's."""
WORDS = {
    "works": "the GPU works",
    "waits": "the GPU waits for the host",
    "plans": "cuDNN plans attention",
}


@dataclass(frozen=True)
class Bar:
    """A decode step of one sequence, in seconds, as the parts that add up to it."""

    label: str
    works_s: float
    waits_s: float = 0.0
    plans_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.works_s + self.waits_s + self.plans_s


def decode_row(run: str, engine: str) -> dict[str, str]:
    """Return the row of a committed run's smallest decode step, as cells.csv has it."""
    with (RUNS / run / "cells.csv").open(encoding="utf-8", newline="") as file:
        return next(row for row in csv.DictReader(file) if (row["phase"], row["engine"]) == ("decode", engine))


def bars() -> tuple[Bar, ...]:
    """Return the steps of Mistral-7B on the H200, slowest first; the last one is the limit, not a measurement."""
    eager = decode_row("mistral-7b-h200-default", "eager")
    compiled = decode_row("mistral-7b-h200-compile", "compile")
    evidence = json.loads((RUNS / "mistral-7b-h200-default/run.json").read_text(encoding="utf-8"))["evidence"]
    first_s = next(item["first_use_s"] for item in evidence if item.get("first_use_s"))
    eager_s, waits_s = float(eager["latency_s"]), float(eager["dispatch_s"])
    works_s = eager_s - waits_s
    return (
        Bar("first use of a length", works_s, waits_s, first_s - eager_s),
        Bar("eager, as it runs by default", works_s, waits_s),
        Bar("as one CUDA graph", float(decode_row("mistral-7b-h200-engines", "graph")["latency_s"])),
        Bar("compiled and tuned", float(compiled["latency_s"])),
        Bar("limit of this GPU's memory", float(compiled["weights_s"]) + float(compiled["kv_s"])),
    )


def picture() -> str:
    """Return the picture as SVG."""
    rows = bars()
    body = [_text(20, 28, "Mistral-7B on an H200: milliseconds per token of one sequence", "title")]
    for index, bar in enumerate(rows):
        y, x = _TOP + index * _ROW, float(_LEFT)
        body.append(_text(_LEFT - 10, y + 16, bar.label, "label"))
        for part in WORDS:
            width = getattr(bar, f"{part}_s") * 1e3 * _PER_MS
            if width > 0:
                kind = f"{part} limit" if bar is rows[-1] else part
                body.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" class="{kind}"/>')
                if bar.waits_s:
                    body.append(_text(x + width / 2, y + 16, f"{getattr(bar, f'{part}_s') * 1e3:.1f}", "inside"))
                x += width
        body.append(_text(x + 8, y + 16, f"{bar.total_s * 1e3:.1f} ms", "value"))
    y = _TOP + len(rows) * _ROW + 14
    x = 20.0
    for part, words in WORDS.items():
        body.append(f'<rect x="{x}" y="{y - 11}" width="13" height="13" class="{part}"/>')
        body.append(_text(x + 20, y, words, "note"))
        x += 40 + 7.2 * len(words)
    height = y + 18
    style = (  # later rules win
        f":root{{{_variables('light')}}}@media(prefers-color-scheme:dark){{:root{{{_variables('dark')}}}}}"
        "text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink)}"
        ".title{font-size:16px;font-weight:600}.label{text-anchor:end}.inside{text-anchor:middle;fill:var(--paper)}.value{font-weight:600}.note{font-size:13px;fill:var(--dim)}.paper{fill:var(--paper)}"
        "rect{stroke:var(--paper)}"
        f"{''.join(f'.{name}{{fill:var(--{name})}}' for name in WORDS)}"
        ".limit{fill:none;stroke:var(--works);stroke-width:2;stroke-dasharray:4 3}"
    )
    spoken = "; ".join(f"{bar.label}: {bar.total_s * 1e3:.1f} ms" for bar in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<title>{escape(spoken)}</title>\n<style>{style}</style>\n"
        f'<rect width="{_WIDTH}" height="{height}" rx="8" class="paper"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(words)}</text>'


def _variables(theme: str) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in COLOURS[theme].items())


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
