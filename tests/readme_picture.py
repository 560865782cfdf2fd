"""Draw docs/images/token.svg, README's picture, from committed runs: `python -m tests.readme_picture`."""

import csv
import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/token.svg"
RUNS = ROOT / "runs/reference"
WORDS = {"works": "the GPU works", "waits": "the GPU waits for the host", "plans": "cuDNN plans attention"}
_LIGHT = "--paper:#ffffff;--ink:#1b1f24;--dim:#5b6672;--works:#0072b2;--waits:#c05200;--plans:#8a4f7d"
_DARK = "--paper:#14181d;--ink:#e8ebee;--dim:#a3adb8;--works:#3d9be0;--waits:#ff8a3d;--plans:#d58fc4"
"""The panel has its own paper, as a page's theme may differ from the browser's. All have 4.5:1 on it (WCAG 2.2)."""
_WIDTH, _LEFT, _PER_MS, _TOP, _ROW = 760, 214, 7.9, 56, 34
_STYLE = """text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink)}rect{stroke:var(--paper)}
.title{font-size:16px;font-weight:600}.label{text-anchor:end}.value{font-weight:600}.paper{fill:var(--paper)}
.inside{text-anchor:middle;fill:var(--paper)}.note{font-size:13px;fill:var(--dim)}.works{fill:var(--works)}
.waits{fill:var(--waits)}.plans{fill:var(--plans)}
.limit{fill:none;stroke:var(--works);stroke-width:2;stroke-dasharray:4 3}"""


def bars() -> dict[str, dict[str, float]]:
    """Return decode steps of Mistral-7B on the H200, slowest first: ms by part. The last one is the limit."""
    eager = _decode("mistral-7b-h200-default", "eager")
    graph, compiled = _decode("mistral-7b-h200-engines", "graph"), _decode("mistral-7b-h200-compile", "compile")
    evidence = json.loads((RUNS / "mistral-7b-h200-default/run.json").read_text(encoding="utf-8"))["evidence"]
    first = next(1e3 * item["first_use_s"] for item in evidence if item.get("first_use_s"))
    step = {"works": eager["latency_s"] - eager["overhead_s"], "waits": eager["overhead_s"]}
    return {
        "first use of a length": {**step, "plans": first - eager["latency_s"]},
        "eager, as it runs by default": step,
        "as one CUDA graph": {"works": graph["latency_s"]},
        "compiled and tuned": {"works": compiled["latency_s"]},
        "limit of this GPU's memory": {"works": compiled["weights_s"] + compiled["kv_s"]},
    }


def _decode(run: str, engine: str) -> dict[str, float]:
    """The times of a run's smallest decode step, in ms."""
    with (RUNS / run / "cells.csv").open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if (row["phase"], row["engine"]) == ("decode", engine))
    return {name: 1e3 * float(row[name]) for name in ("latency_s", "overhead_s", "weights_s", "kv_s")}


def picture() -> str:
    drawn = [_text(20, 28, "title", "Mistral-7B on an H200: milliseconds per token of one sequence")]
    for row, (label, parts) in enumerate(bars().items()):
        x, y = float(_LEFT), _TOP + row * _ROW
        drawn.append(_text(_LEFT - 10, y + 16, "label", label))
        for part, ms in parts.items():
            kind = "limit" if label.startswith("limit") else part
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{ms * _PER_MS:.1f}" height="22" class="{kind}"/>')
            if len(parts) > 1:
                drawn.append(_text(x + ms * _PER_MS / 2, y + 16, "inside", f"{ms:.1f}"))
            x += ms * _PER_MS
        drawn.append(_text(x + 8, y + 16, "value", f"{sum(parts.values()):.1f} ms"))
    height = _TOP + len(bars()) * _ROW + 32
    for x, (part, words) in zip((20, 156, 383), WORDS.items(), strict=True):
        drawn.append(f'<rect x="{x}" y="{height - 29}" width="13" height="13" class="{part}"/>')
        drawn.append(_text(x + 20, height - 18, "note", words))
    style = f":root{{{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n{_STYLE}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n<style>{style}</style>\n'
        f'<rect width="{_WIDTH}" height="{height}" rx="8" class="paper"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _text(x: float, y: float, kind: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
