"""The runs that faults are injected into: small models on simulated cards, each for the sites that no other has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..simulated.scenario import Scenario
from ..simulated.truth import A100, Truth


@dataclass(frozen=True)
class Played:
    """One run of `roofscope run` on one card."""

    name: str
    asked: Scenario
    truth: Truth
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the command line, beside those of the scenario."""
    pictures: bool = False
    """Whether report.html and the pictures are written as well: they take seconds."""
    libraries: tuple[str, ...] = ()
    """Imported before the run is recorded."""

    def arguments(self, folder: Path) -> dict[str, Any]:
        asked = self.asked
        return {
            "dtype": asked.dtype,
            "quant": asked.quant,
            "engine": asked.engine,
            "prompt_lens": ",".join(map(str, asked.prompt_lens)),
            "batch_sizes": ",".join(map(str, asked.batch_sizes)),
            "new_tokens": asked.new_tokens,
            "no_levers": True,
            "out": folder,
            **self.options,
        }


def _small(engine: str = "eager", **changes: Any) -> Scenario:
    return Scenario("smollm2-135m", 1, "float16", engine, (16, 32), (1, 2), 8, **changes)


SCENARIOS: dict[str, Played] = {
    played.name: played
    for played in (
        Played("eager", _small(), A100),
        Played("graph", _small("graph"), A100),
        Played("nf4", _small(quant="nf4"), A100),
    )
}
