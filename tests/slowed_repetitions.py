"""Repetitions of a cell, changed for a test."""

from __future__ import annotations

from dataclasses import replace

from profiler.facts.repetitions import Repetition


def slowed(repetition: Repetition, by: float) -> Repetition:
    """Return the repetition with all of its times `by` times as long."""
    return replace(
        repetition,
        prefill_s=None if repetition.prefill_s is None else by * repetition.prefill_s,
        more_prefill_s=tuple(by * value for value in repetition.more_prefill_s),
        decode_s=tuple(by * value for value in repetition.decode_s),
        loop_s=None if repetition.loop_s is None else by * repetition.loop_s,
        issue_s=None if repetition.issue_s is None else by * repetition.issue_s,
    )
