"""Write a GPU profile (`ceilings --out`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from profiler.counting.walk import walk
from profiler.device.machine import Machine
from profiler.device.telemetry import Watch
from profiler.errors import DeviceError, RequestError, near_misses
from profiler.facts.card_profile import CardProfile, SmallPoint, least_of
from profiler.facts.roofs import Ceilings
from profiler.facts.step import ExecutionPath
from profiler.facts.telemetry import busy_share
from profiler.grid.cells import PHASES, Cell, CellKey
from profiler.loading.config import load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.meta_model import build_on_meta, quiet_libraries
from profiler.loading.request import DTYPES
from profiler.loading.source import resolve
from profiler.measure.card_profile import STANDARD_MODEL, installed_formats, measure_card, replay_small_kernels
from profiler.predict.card_profile import fitted_on, profile_json
from profiler.predict.kernel_times import from_memory_s
from profiler.predict.operator_arrays import StepArrays, operator_arrays
from profiler.store.writer import replace_file

PROFILE_BUDGET_S = 24.0
_MOST_PASSES = 3
# If other processes were busy for more than this share of a pass, another pass follows.
_MOST_BUSY_SHARE = 0.25


def profiled_dtypes(dtypes: str, out: Path) -> list[str]:
    """Return the dtypes of a profile from a comma-separated list.

    Raises RequestError for an unknown dtype, or if `out` cannot be written.
    """
    names = [name.strip() for name in dtypes.split(",") if name.strip()]
    for name in names:
        if name not in DTYPES:
            raise RequestError(f"--out-dtypes {name!r} is unknown; use {', '.join(DTYPES)}.{near_misses(name, DTYPES)}")
    if not names:
        raise RequestError(f"--out-dtypes {dtypes!r} names no dtype; use {', '.join(DTYPES)}.")
    if not out.parent.is_dir():
        raise RequestError(f"--out {out}: the folder {out.parent} does not exist; create it first.")
    if out.is_dir():
        raise RequestError(f"--out {out} is a folder; give a file, such as {out / 'card.json'}.")
    return names


def write_profile(machine: Machine, ceilings: Ceilings, names: Sequence[str], out: Path) -> list[str]:
    """Measure the profile of a machine in some dtypes, given its roofs, and write it; return warnings.

    If other processes were busy, it is measured again, and each kernel's shortest time counts. Raises RunError, and
    DeviceError if no roof of memory or of arithmetic could be measured.
    """
    if not ceilings.judges:
        why = next(iter(ceilings.missing.values()))
        raise DeviceError(f"--out {out}: a profile needs this device's roofs, which could not be measured ({why}).")
    passes: list[CardProfile] = []
    busy = 1.0
    while busy > _MOST_BUSY_SHARE and len(passes) < _MOST_PASSES:
        with quiet_libraries(), Watch(machine.source) as watch:
            profile = measure_card(machine, ceilings, names, PROFILE_BUDGET_S, installed_formats())
            smalls = tuple(point for name in names for point in _small_points(machine, profile, name))
        passes.append(replace(profile, smalls=smalls))
        busy = busy_share(watch.readings)
    replace_file(out, profile_json(least_of(passes)))
    if busy <= _MOST_BUSY_SHARE:
        return []
    return [f"other processes were busy in all {len(passes)} passes of the profile: stop them and measure it again."]


def _small_points(machine: Machine, profile: CardProfile, dtype: str) -> list[SmallPoint]:
    """Times of a layer's small kernels in prefills of the standard model, and the time of their memory traffic.

    Prefills of few tokens, whose small kernels may not show next to dispatch, are left out.
    """
    small_s = {tokens: seconds for tokens, seconds in replay_small_kernels(machine, dtype).items() if seconds > 0}
    if not small_s:
        return []
    config = load_config(resolve(STANDARD_MODEL))
    module = build_on_meta(config, DTYPES[dtype])
    steps = StepArrays.of(
        [CellKey("prefill", Cell(batch_size=1, prompt_len=tokens, new_tokens=1)) for tokens in small_s]
    )
    paths = dict.fromkeys(PHASES, ExecutionPath())
    needed = operator_arrays(walk(module), steps, paths, planned_weight_bytes(module))
    device = fitted_on(profile, dtype, config.num_hidden_layers).device
    traffic_s = from_memory_s(needed, device, lambda column: bool(column.heads or column.shape))
    return [
        SmallPoint(dtype, float(each_s) / config.num_hidden_layers, small_s[int(tokens)])
        for tokens, each_s in zip(steps.tokens, traffic_s, strict=True)
    ]
