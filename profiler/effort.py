"""How long and how often each part of a run is measured: one value, which tests make small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Rounds, budgets and warm-up. Shares are of the run's budget."""

    rounds: int = 30
    """Most visits of a cell."""
    whole_grid: bool = False
    """Whether every cell is visited twice, whatever the budget."""
    warm_up_s: float = 1.0
    """Most seconds of untimed prefills before a new shape."""
    more_prefills_s: float = 0.8
    """Seconds of further prefills in each visit."""
    tail_share: float = 0.05
    """Most of the budget for the 20 prefills of a cell of the answer that give its time to first token a p95."""
    drift_calls: int = 7
    """Calls per burst of the drift probe."""
    drift_bursts: int = 6
    """Most bursts until two in a row agree."""
    checks_kept_roofs: bool = True
    """Whether roofs kept from an earlier run are checked against the device before they are used."""
    roof_s: float = 1.5
    """Most seconds of samples for each roof."""
    roofs_again_s: float = 0.5
    """Most seconds for each roof at the end of a run; 0: none is measured again."""
    weight_read_s: float = 0.5
    """Seconds of reading the model's own weights."""
    host_pace_s: float = 5.0
    """Seconds of the standard twin's steps, which give the host's index."""
    twin_s: float = 1.5
    """Most seconds of the hollow twin's steps, per phase, batch size and engine."""
    roofs_again_share: float = 0.02
    """Measuring the roofs once more."""
    replays_share: float = 0.10
    """Replaying each cell's kernels."""
    between_share: float = 0.02
    """Replays of linears at rows between those of the cells."""
    generate_share: float = 0.04
    """Timing the parts of `generate`."""
    trials_share: float = 0.10
    """Trying variants on a few layers."""
    gpu_replays_share: float = 0.06
    gpu_trials_share: float = 0.40
    """The same shares on a GPU. Its replays are graphs of single operators, which take less than a second per step.
    Trials are what a run on a rented GPU is for."""
    unexplained_share: float = 0.03
    """Hooking the cells with unexplained time."""
    report_share: float = 0.06
    """Judging the run and writing its report."""
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

    @property
    def visits_share(self) -> float:
        """Share of further seconds of a budget that go to the visits of cells."""
        after = (self.roofs_again_share, self.replays_share, self.between_share, self.trials_share)
        return 1 - sum((*after, self.unexplained_share, self.report_share))


STANDARD = Effort()
"""What every command takes unless it is given another."""
