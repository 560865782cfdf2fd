"""Measured roofs kept for a day, for the very same device and software."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from profiler.machine.device import Device
from profiler.roofs.values import Ceilings

_KEPT_S = 24 * 3600.0
# Counted up whenever a roof comes to be measured in another way: what was kept before is then none.
_METHOD = 2
_CEILINGS = TypeAdapter(Ceilings)


def cached(
    measure: Callable[[Ceilings | None], Ceilings], info: Device, software: Mapping[str, str], *, fresh: bool
) -> Ceilings:
    """`measure` of what is kept for this device and software if that is under a day old, else of nothing; kept again.

    A cache that cannot be read or written is as good as none.
    """
    path = _folder() / f"{_key(info, software)}.json"
    measured = measure(None if fresh else _read(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(_CEILINGS.dump_json(measured))
        draft.replace(path)
    except OSError:
        pass
    return measured


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "roofscope" / "ceilings"


def _key(info: Device, software: Mapping[str, str]) -> str:
    facts = {"device": {**asdict(info), "datasheet": None}, "software": dict(software), "method": _METHOD}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Ceilings | None:
    try:
        kept = _CEILINGS.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return kept if 0 <= time.time() - kept.measured_at_unix_s < _KEPT_S else None
