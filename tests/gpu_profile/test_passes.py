"""The written profile of a GPU joins separate measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import HOST, XEON_PROFILE

from profiler.facts.telemetry import Reading, busy_share
from profiler.gpu_profile import measure as profiling
from profiler.gpu_profile.profile import GpuProfile, least_of, read_profile


@pytest.mark.slow
def test_small_kernels_are_next_to_what_they_must_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the tokens move four times the bytes; a prefill whose time is lost in its dispatch is skipped.

    A layer of SmolLM2-135M passes hidden states of 576 to its three products, and to the two of its MLP, of 1536. It
    gets each back.
    """
    shipped = read_profile(XEON_PROFILE)
    alone = {4: 0.0, 64: 2e-4, 256: 8e-4}
    monkeypatch.setattr(profiling, "measure_profile", lambda *_: shipped)
    monkeypatch.setattr(profiling, "replay_small_kernels", lambda machine, dtype: alone)
    profiling.write_profile(HOST, shipped.ceilings, ["float32"], tmp_path / "card.json")
    short, long = read_profile(tmp_path / "card.json").smalls
    assert (short.dtype, short.seconds, long.seconds) == ("float32", 2e-4, 8e-4)
    fastest = max(point.bytes_per_s for point in shipped.ceilings.curve)
    written = 64 * 4.0 * (2 * 576 + 2 * 576 + 2 * 192 + 2 * 1536)
    assert short.traffic_s > written / fastest / 2
    assert long.traffic_s == pytest.approx(4 * short.traffic_s, rel=0.01)


def slowed(profile: GpuProfile, number: int, times: float) -> GpuProfile:
    """Return a pass in which a neighbour slowed one product and the dispatch of one layer."""
    products, dispatches = list(profile.products), list(profile.dispatches)
    products[number] = replace(products[number], seconds=times * products[number].seconds)
    dispatches[number] = replace(dispatches[number], layer_s=times * dispatches[number].layer_s)
    return replace(profile, products=tuple(products), dispatches=tuple(dispatches))


def test_of_several_passes_each_kernels_least_time_stands() -> None:
    shipped = least_of([read_profile(XEON_PROFILE)])
    assert least_of([slowed(shipped, 0, 30.0), slowed(shipped, 1, 30.0)]) == shipped
    assert least_of([slowed(shipped, 0, 30.0)]) != shipped
    formats = replace(shipped, products=shipped.products[:-3])
    assert least_of([formats, shipped]) == shipped, "a pass may have products that another skipped for lack of time"


@pytest.mark.parametrize(("quiet_from", "passes"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_busy_pass_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_from: int, passes: int
) -> None:
    shipped = least_of([read_profile(XEON_PROFILE)])
    taken: list[GpuProfile] = []

    def card(*_: object) -> GpuProfile:
        taken.append(shipped if len(taken) >= quiet_from else slowed(shipped, len(taken) % 2, 30.0))
        return taken[-1]

    @contextmanager
    def watched(_: object) -> Iterator[SimpleNamespace]:
        busy = Reading(busy_cores_elsewhere=0.0 if len(taken) >= quiet_from else 1.0)
        yield SimpleNamespace(readings=[busy] * 4)

    monkeypatch.setattr(profiling, "measure_profile", card)
    monkeypatch.setattr(profiling, "replay_small_kernels", lambda machine, dtype: {})
    monkeypatch.setattr(profiling, "Watch", watched)
    warnings = profiling.write_profile(HOST, shipped.ceilings, ["float32"], tmp_path / "card.json")
    assert len(taken) == passes
    assert bool(warnings) == (quiet_from == 9)
    profile = read_profile(tmp_path / "card.json")
    assert (profile.products == shipped.products) == (passes > 1 or quiet_from == 0)


def test_a_neighbour_is_one_that_takes_a_core_or_computes_on_the_card() -> None:
    quiet, busy = Reading(busy_cores_elsewhere=0.1), Reading(busy_cores_elsewhere=1.0)
    assert busy_share([quiet, quiet, quiet, busy]) == 0.25
    assert busy_share([Reading(other_processes=1), Reading(other_processes=0)]) == 0.5
    assert busy_share([]) == 0.0
