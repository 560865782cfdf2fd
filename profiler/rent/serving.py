"""Requests per second that a GPU serves, by Little's law over its step times.

A prompt takes `prompt_s`, and a decode step of n sequences takes `step_s[n]`. Sequences join and leave between steps
(continuous batching), and while a prompt is processed no sequence advances. With N tokens per answer, n sequences in
flight need n prompts and N - 1 shared steps. So they complete n / ((N - 1) step_s[n] + n prompt_s) requests per second,
which is Little's law (1961): sequences in flight = rate x time in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from profiler.predict.operator_arrays import Array
from profiler.rent.options import Limits


@dataclass(frozen=True)
class Operation:
    """A GPU that serves `rate_per_s` requests per second."""

    in_flight: int
    """Sequences in each decode step."""
    rate_per_s: float
    ttft_s: float
    tpot_s: float
    """Seconds per output token, with the interruptions by other prompts."""
    step_s: float
    """Seconds of a decode step without them."""


@dataclass(frozen=True)
class StepTimes:
    """The times of one GPU, or of one group of GPUs, and the tokens per answer."""

    prompt_s: float
    step_s: Array
    """[largest batch]"""
    new_tokens: int

    @property
    def rates_per_s(self) -> Array:
        """Requests per second with 1 to n sequences in flight [largest batch]."""
        in_flight = np.arange(1, len(self.step_s) + 1)
        return np.asarray(in_flight / ((self.new_tokens - 1) * self.step_s + in_flight * self.prompt_s))

    def ttft_s(self, rate_per_s: Array | float, step_s: Array | float) -> Array:
        """Mean seconds to the first token at these rates: other prompts, the running step, and the own prompt.

        Prompts arrive at random and take equal times, so they wait as in an M/D/1 queue (Pollaczek-Khinchine).
        """
        busy = rate_per_s * self.prompt_s
        return np.asarray(self.prompt_s * (1 + busy / (2 * (1 - busy))) + step_s)

    def tpot_s(self, rate_per_s: Array | float, step_s: Array | float) -> Array:
        """Seconds per output token at these rates: the share of time that prompts leave to decode steps."""
        return np.asarray(step_s / (1 - rate_per_s * self.prompt_s))

    def with_in_flight(self, batch: int, share: float = 1.0) -> Operation:
        """The GPU at a share of the rate that keeps `batch` sequences always in flight."""
        return self._operation(batch, share * float(self.rates_per_s[batch - 1]))

    def at_rate(self, rate_per_s: float) -> Operation:
        """The GPU at this rate, or at the largest possible, with the fewest sequences in flight that sustain it."""
        rates = np.maximum.accumulate(self.rates_per_s)
        batch = int(np.searchsorted(rates, rate_per_s)) + 1
        return self._operation(batch, rate_per_s) if batch <= len(rates) else self.with_in_flight(len(rates))

    def _operation(self, batch: int, rate_per_s: float) -> Operation:
        step_s = float(self.step_s[batch - 1])
        ttft_s, tpot_s = float(self.ttft_s(rate_per_s, step_s)), float(self.tpot_s(rate_per_s, step_s))
        return Operation(batch, rate_per_s, ttft_s, tpot_s, step_s)

    def shares_within(self, limits: Limits) -> Array:
        """[largest batch] The largest share of each of `rates_per_s` within the limits; 0 if an idle GPU exceeds them.

        These solve `ttft_s` and `tpot_s` for the share of time that prompts take.
        """
        most_busy = np.ones(len(self.step_s))
        if limits.ttft_s:
            prompts = np.maximum(0.0, (limits.ttft_s - self.step_s) / self.prompt_s - 1)  # that may be waited for
            most_busy = 2 * prompts / (1 + 2 * prompts)
        if limits.tpot_s:
            most_busy = np.minimum(most_busy, 1 - self.step_s / limits.tpot_s)
        return np.asarray(np.clip(most_busy / (self.rates_per_s * self.prompt_s), 0.0, 1.0))


@dataclass(frozen=True)
class Fleet:
    """As many replicas of one offer as a rate needs."""

    capacity_per_s: float
    """Requests per second of one replica."""
    gpus: int
    """GPUs of one replica."""
    machine_gpus: int
    """GPUs of the machine that must be rented whole."""
    usd_per_gpu_h: float

    def replicas(self, rate_per_s: float) -> int:
        """The replicas that serve a rate, at least 1."""
        return max(1, math.ceil(rate_per_s / self.capacity_per_s - 1e-9))

    def rented_gpus(self, rate_per_s: float) -> int:
        """The GPUs that are rented for a rate, in whole machines."""
        return math.ceil(self.replicas(rate_per_s) * self.gpus / self.machine_gpus) * self.machine_gpus

    def usd_per_h(self, rate_per_s: float) -> float:
        """USD per hour of all rented GPUs, busy or idle."""
        return self.rented_gpus(rate_per_s) * self.usd_per_gpu_h

    def usd_per_request(self, rate_per_s: float) -> float:
        """USD per request, with the idle time of the GPUs."""
        return self.usd_per_h(rate_per_s) / 3600 / rate_per_s
