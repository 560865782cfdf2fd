"""A card's profile as a file."""

from __future__ import annotations

from pathlib import Path

from profiler.errors import RequestError, near_misses
from profiler.loading.request import DTYPES
from profiler.loading.skeleton import quiet_libraries
from profiler.machine.machine import Machine
from profiler.probes.card import installed_formats, measure_card
from profiler.record.profiles import profile_json
from profiler.record.store import replace_file
from profiler.roofs.values import Ceilings

PROFILE_BUDGET_S = 24.0


def write_profile(machine: Machine, ceilings: Ceilings, dtypes: str, out: Path) -> None:
    """Measure a machine's profile under these roofs and write it. Raises RequestError."""
    names = [name.strip() for name in dtypes.split(",") if name.strip()]
    for name in names:
        if name not in DTYPES:
            raise RequestError(f"--out-dtypes {name!r} is unknown; use {', '.join(DTYPES)}.{near_misses(name, DTYPES)}")
    if not out.parent.is_dir():
        raise RequestError(f"--out {out}: there is no folder {out.parent}.")
    with quiet_libraries():
        profile = measure_card(machine, ceilings, names, PROFILE_BUDGET_S, installed_formats())
    replace_file(out, profile_json(profile))
