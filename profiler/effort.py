"""How long and how often each part of a run is measured: one value, which tests make small."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Effort:
    """Rounds, budgets and warm-up. Shares are of the run's budget."""

    rounds: int = 30
    """Most repetitions of a cell."""
    whole_grid: bool = False
    """Whether every cell is timed twice, whatever the budget."""
    warm_up_s: float = 1.0
    """Most seconds of untimed prefills before a new shape."""
    more_prefills_s: float = 0.8
    """Seconds of further prefills in each repetition."""
    tail_share: float = 0.05
    """Most of the budget for the 20 prefills of a cell of the answer that give its time to first token a p95."""
    drift_calls: int = 7
    """Calls per burst of the drift probe."""
    drift_bursts: int = 6
    """Most bursts until two in a row agree."""
    checks_kept_ceilings: bool = True
    """Whether ceilings kept from an earlier run are checked against the device before they are used."""
    ceiling_s: float = 1.5
    """Seconds for each ceiling outside of a run, such as in `ceilings`."""
    ceilings_again_s: float = 0.5
    """Most seconds for each ceiling at the end of a run; 0: none is measured again."""
    shares: Mapping[str, float] = field(
        default_factory=lambda: {
            "ceilings": 0.10,
            "overhead": 0.06,
            "timing": 0.50,
            "ceilings again": 0.01,
            "replays": 0.06,
            "replays between cells": 0.01,
            "generate": 0.01,
            "trials": 0.20,
            "unexplained": 0.01,
            "report": 0.04,
        }
    )
    """Shares of the parts of a run (`RunPart`). A user reads the timed cells and the tried changes."""
    neighbours_share: float = 0.1
    """Waiting for other processes to end before anything is timed, at most."""
    script_least_s: float = 30.0
    script_most_s: float = 300.0
    """`why`: least and most seconds after the script; between them as long as the script took."""
    script_repeats: int = 20
    """`why`: most repeats of a short call within one side of a pair."""
    script_calls: int = 8
    """`why`: most calls that are repeated together."""
    script_floor: bool = True
    """`why`: whether the least time of the calls is measured."""


STANDARD = Effort()
"""What every command takes unless it is given another."""
