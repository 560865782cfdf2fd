"""Why cells are noisy: a line for what all share, and one per other reason."""

from __future__ import annotations

import re
from collections.abc import Sequence

from profiler.grid.cells import CellKey
from profiler.report.blocks import DOCUMENTS, Lines, Section
from profiler.store.folder import Run


def noise(run: Run) -> Section:
    return Section("Noise", [Lines(noise_lines(run))], media=DOCUMENTS)


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
# A reason that at least this many cells share is printed in one line.
_MIN_SHARED_CELLS = 3


def noise_lines(run: Run) -> list[str]:
    """Return the noise reasons: a line for those of all cells, one per kind that several share, one per other cell."""
    common, kinds = common_noise(run), _noise_kinds(run)
    shared = {kind: texts for kind, texts in kinds.items() if kind not in common and len(texts) >= _MIN_SHARED_CELLS}
    lines = [line] if (line := common_noise_line(run)) else []
    for texts in sorted(shared.values(), key=len, reverse=True):
        lines.append(f"{len(texts)} of {len(run.document.evidence)} cells: {_together(list(texts.values()))}")
    for key, reasons in own_noise(run).items():
        unshared = [why for why in reasons if _NUMBER.sub("#", why) not in shared]
        if unshared:
            lines.append(f"{key.name}: {', '.join(unshared)}")
    return lines


def common_noise_line(run: Run) -> str | None:
    """Return `all 32 cells: the machine itself drifted by 23 %`, or None where all cells share no reason."""
    reasons = [_together(texts) for texts in common_noise(run).values()]
    return f"all {len(run.document.evidence)} cells: {'; '.join(reasons)}" if reasons else None


def common_noise(run: Run) -> dict[str, list[str]]:
    """Return the noise reasons that all cells of the run share, by kind."""
    evidence = run.document.evidence
    kinds = _noise_kinds(run)
    return {kind: list(texts.values()) for kind, texts in kinds.items() if len(texts) == len(evidence) > 1}


def own_noise(run: Run) -> dict[CellKey, list[str]]:
    """Return the noise reasons of each cell, without those that all cells share."""
    common = common_noise(run)
    reasons = {
        item.key: [why for why in item.noise_reasons if _NUMBER.sub("#", why) not in common]
        for item in run.document.evidence
    }
    return {key: texts for key, texts in reasons.items() if texts}


def _noise_kinds(run: Run) -> dict[str, dict[CellKey, str]]:
    """Return the cells of each kind of reason (its text without figures), with each cell's own text."""
    kinds: dict[str, dict[CellKey, str]] = {}
    for item in run.document.evidence:
        for why in item.noise_reasons:
            kinds.setdefault(_NUMBER.sub("#", why), {})[item.key] = why
    return kinds


def _together(texts: Sequence[str]) -> str:
    """Return `time known to within 2.6 to 9.1 %`: reasons of one kind as one text, with the range of each figure."""
    figures = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))

    def span(_: re.Match[str]) -> str:
        values = sorted(next(figures), key=float)
        return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"

    return _NUMBER.sub(span, texts[0])


def visited_once(run: Run) -> set[CellKey]:
    """Return the cells visited once; empty if all cells were."""
    once = {result.key for result in run.measured if result.visits == 1}
    return once if len(once) < len(run.measured) else set()
