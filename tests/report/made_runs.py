"""Runs to report on: the runs in the repository, and edited copies of them; and a parsed HTML page."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from profiler.facts.ceilings import Ceiling
from profiler.grid.cells import Cell, CellKey, Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.cells import CellEvidence, CellResult
from profiler.store.folder import Run, read_run

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "runs" / "reference"
WHOLE = REFERENCE / "smollm2-135m-2-cores"
PRECISIONS = REFERENCE / "smollm2-135m-precisions"


def old_run() -> Run:
    return read_run(ROOT / "tests" / "data" / "tiny_run")


def whole_run() -> Run:
    return read_run(WHOLE)


def with_document(run: Run, **changes: Any) -> Run:
    return replace(run, document=replace(run.document, **changes))


def ceiling(per_s: float) -> Ceiling:
    return Ceiling(per_s, 0.9 * per_s, 1.1 * per_s, samples=8, method="by hand")


def key(phase: Phase = "decode", batch: int = 1, depth: int = 64, engine: str = "eager") -> CellKey:
    return CellKey(phase, Cell(batch, depth, 32, engine=engine))


def result(of: CellKey, latency_s: float = 1.0, **columns: Any) -> CellResult:
    """Return a measured cell whose time is all weights, unless columns say otherwise."""
    terms = {term: 0.0 for term in TERMS if term not in ("weights_s", "unexplained_s")}
    figures: dict[str, Any] = {
        "latency_s": latency_s, "latency_low_s": 0.99 * latency_s, "latency_high_s": 1.01 * latency_s, "samples": 40,
        "tokens_per_s": of.tokens / latency_s, "model_flops": 1000, "model_bytes": 500, "intensity": 2.0,
        "flops_per_s": 1000 / latency_s, "bytes_per_s": 500 / latency_s, "attained": 0.5, "regime": "memory-bound",
        "confidence": "high", "noise": "quiet", **terms, "weights_s": latency_s, "unexplained_s": 0.0, **columns,
    }  # fmt: skip
    return CellResult(**{**of.columns, "status": "ok", **figures})


def evidence(of: CellKey, **columns: Any) -> CellEvidence:
    figures: dict[str, Any] = {
        "regime": "memory-bound", "confidence": "high", "flags": (), "signals": (), "conflicts": (),
        "split_half_widths_s": {}, "noise_reasons": (), "predicted_peak_memory_bytes": 10**9, **columns,
    }  # fmt: skip
    return CellEvidence(**of.columns, **figures)


class Page(HTMLParser):
    """Collects the elements in order, the elements that are still open, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def count(self, tag: str, css_class: str = "") -> int:
        classes = [(attrs.get("class") or "").split() for name, attrs in self.tags if name == tag]
        return sum(not css_class or css_class in names for names in classes)
