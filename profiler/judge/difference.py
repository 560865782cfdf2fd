"""The difference of two times: the logarithm of their ratio, its interval, its verdict, and whether it is a claim."""

import math
from dataclasses import dataclass
from typing import Literal

from profiler.stats import CLAIM_REPETITIONS, Estimate

ChangeVerdict = Literal["slower", "faster", "same", "inconclusive"]

SAME = 0.03
"""A change whose whole interval is within this share counts as none."""


def is_claim(low: float, high: float, repetitions: int) -> bool:
    """Whether a difference is a claim: its 95 % interval excludes 0, and the side with fewer repetitions has enough."""
    return has_claim_repetitions(repetitions) and (low > 0 or high < 0)


def has_claim_repetitions(repetitions: int | None) -> bool:
    """Whether the side with fewer repetitions has enough for a claim, as far as it is known."""
    return repetitions is None or repetitions >= CLAIM_REPETITIONS


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer a step takes after than before, as the natural logarithm of after / before."""

    log_ratio: float
    log_low: float
    log_high: float
    """95 % interval of `log_ratio`."""
    repetitions: int | None
    """Repetitions of the side with fewer; None if they were not recorded."""
    because: str = ""
    """Why the two times allow no verdict besides too few repetitions; empty if they allow one."""

    @property
    def change(self) -> float:
        """after / before - 1: 0.07 is 7 % slower."""
        return math.expm1(self.log_ratio)

    @property
    def low(self) -> float:
        return math.expm1(self.log_low)

    @property
    def high(self) -> float:
        return math.expm1(self.log_high)

    @property
    def verdict(self) -> ChangeVerdict:
        """Whether the change is certain, and in which direction."""
        if self.because or not has_claim_repetitions(self.repetitions):
            return "inconclusive"
        if self.low > 0:
            return "slower"
        if self.high < 0:
            return "faster"
        return "same" if self.low >= -SAME and self.high <= SAME else "inconclusive"

    @property
    def is_claim(self) -> bool:
        """Whether the change may be claimed: `slower` or `faster`."""
        return self.verdict in ("slower", "faster")


def difference(
    before: Estimate,
    after: Estimate,
    repetitions: int | None,
    *,
    machine: float = 0.0,
    machine_half_width: float = 0.0,
    because: str = "",
) -> Difference:
    """Return the difference of two independent times.

    Errors of independent times add in quadrature in the logarithm of their ratio. `machine` is the logarithm of what
    the machine itself changed, which is divided out, and `machine_half_width` the half width of its interval.
    """
    middle = math.log(after.median_s / before.median_s) - machine
    down = math.hypot(math.log(after.median_s / after.low_s), math.log(before.high_s / before.median_s))
    up = math.hypot(math.log(after.high_s / after.median_s), math.log(before.median_s / before.low_s))
    low, high = middle - math.hypot(down, machine_half_width), middle + math.hypot(up, machine_half_width)
    return Difference(middle, low, high, repetitions, because)


def longer_s(before: Estimate, after: Estimate) -> Estimate:
    """Return how many seconds longer a step takes after than before; errors add as in `difference`, here in seconds."""
    middle_s = after.median_s - before.median_s
    down_s = math.hypot(after.median_s - after.low_s, before.high_s - before.median_s)
    up_s = math.hypot(after.high_s - after.median_s, before.median_s - before.low_s)
    return Estimate(middle_s, middle_s - down_s, middle_s + up_s, min(before.samples, after.samples))
