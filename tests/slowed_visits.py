"""Visits of a cell, changed for a test."""

from __future__ import annotations

from dataclasses import replace

from profiler.facts.visits import Visit


def slowed(visit: Visit, by: float) -> Visit:
    """Return the visit with all of its times `by` times as long."""
    return replace(
        visit,
        prefill_s=None if visit.prefill_s is None else by * visit.prefill_s,
        more_prefill_s=tuple(by * value for value in visit.more_prefill_s),
        decode_s=tuple(by * value for value in visit.decode_s),
        loop_s=None if visit.loop_s is None else by * visit.loop_s,
        issue_s=None if visit.issue_s is None else by * visit.issue_s,
    )
