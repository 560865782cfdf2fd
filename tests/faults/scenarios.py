"""The runs that get faults: small models on simulated cards, each with sites that no other run has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simulated.scenario import Scenario
from simulated.truth import A100, H100, T4, Truth


@dataclass(frozen=True)
class Played:
    """One run of `roofscope run` on one card."""

    name: str
    asked: Scenario
    truth: Truth
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command line in addition to the scenario's; None removes one."""
    pictures: bool = False
    """Whether to also write report.html and the pictures, which takes seconds."""
    libraries: tuple[str, ...] = ()
    """Modules to import before the run is recorded."""
    lies: bool = False
    """Whether to try only false answers and slow calls: otherwise the cells of this run have high confidence."""

    def arguments(self, folder: Path) -> dict[str, Any]:
        every = {**self.asked.options(), "out": folder, **self.options}
        return {name: value for name, value in every.items() if value is not None}


def _small(engine: str = "eager", prompts: tuple[int, ...] = (16, 32), **changes: Any) -> Scenario:
    return Scenario("smollm2-135m", 1, "float16", engine, prompts, (1, 2), 8, **changes)


def _one(model: str, layers: int = 1) -> Scenario:
    return Scenario(model, layers, "bfloat16", "eager", (16,), (1,), 8)


_MIXTRAL = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}

SCENARIOS: dict[str, Played] = {
    played.name: played
    for played in (
        Played("eager", _small(), A100),
        Played("graph", _small("graph"), A100),
        Played("nf4", _small(quant="nf4"), A100),
        Played("int8", _small(prompts=(16,), quant="int8"), A100),
        Played("fp8", replace(_one("smollm2-135m"), quant="fp8"), H100, libraries=("torchao",)),
        Played("experts", replace(_one("mixtral-8x7b"), changes=_MIXTRAL), A100),
        Played("engines", _small("static,compile,generate", (16,)), A100, {"budget": 120}),
        Played(
            "inside", _one("smollm2-135m", layers=4), A100, {"trace": True, "no_levers": None}, libraries=("torchao",)
        ),
        Played("pictures", _small(prompts=(16,)), A100, pictures=True, libraries=("matplotlib.pyplot",)),
        Played("sure", Scenario("mistral-7b-v0.1", 1, "float16", "eager", (16, 512), (1, 2), 8), T4, lies=True),
    )
}
