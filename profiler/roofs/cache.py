"""Measured roofs kept for a day, for the very same device and software."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from profiler.machine.kept import keep, kept_file
from profiler.machine.machine import Machine
from profiler.roofs.values import Ceilings

_KEPT_S = 24 * 3600.0
# Counted up whenever a roof comes to be measured in another way: what was kept before is then none.
_METHOD = 4
# What the device tells of itself that its roofs hang on: a card of the same name, or the same card, may have another.
_SETTINGS = ("driver", "power_limit_w")
_CEILINGS = TypeAdapter(Ceilings)


def cached(
    measure: Callable[[Ceilings | None], Ceilings], machine: Machine, software: Mapping[str, str], *, fresh: bool
) -> Ceilings:
    """`measure` of what is kept for this device and software if that is under a day old, else of nothing; kept again.

    Two cards never share what is kept, nor one card under two drivers or power limits. A cache that cannot be read or
    written is as good as none.
    """
    settings = machine.source.facts()
    facts = {
        "device": {**asdict(machine.info), "datasheet": None},
        "settings": {name: settings.get(name) for name in _SETTINGS},
        "software": dict(software),
        "method": _METHOD,
    }
    path = kept_file("ceilings", facts)
    measured = measure(None if fresh else _read(path))
    if not machine.source.failures:  # they lack the clocks that it did not report
        keep(path, _CEILINGS.dump_json(measured))
    return measured


def _read(path: Path) -> Ceilings | None:
    try:
        kept = _CEILINGS.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return kept if 0 <= time.time() - kept.measured_at_unix_s < _KEPT_S else None
