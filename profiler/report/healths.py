"""Which of several cards is ill, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.diagnosis.devices import Health
from profiler.units import percent


def health_lines(found: Sequence[Health]) -> list[str]:
    """Which card is ill; or that none is."""
    ill = [item.words for item in found if item.ill]
    if ill:
        return ill
    furthest = max(found, key=lambda item: item.behind)
    return [
        f"No card is ill: {' and '.join(item.device for item in found)} agree ({furthest.device} is"
        f" {percent(furthest.behind)} behind at most, of which more than noise in {percent(furthest.surely)} of the"
        " cells)."
    ]
