"""A card's profile as it is written: what is measured apart is put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import HOST

from profiler.diagnosis.profile import CardProfile
from profiler.job import profiling
from profiler.record.profiles import profile_called, read_profile


def test_small_kernels_stand_beside_what_they_must_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the tokens hand on four times the bytes; what was lost in its dispatch tells nothing. A layer of
    SmolLM2-135M hands hidden states of 576 to its three products and its MLP's two of 1536, and each back."""
    shipped = profile_called("epyc-zen4-2-threads")
    alone = {4: 0.0, 64: 2e-4, 256: 8e-4}

    def card(*_: object) -> CardProfile:
        return shipped

    monkeypatch.setattr(profiling, "measure_card", card)
    monkeypatch.setattr(profiling, "small_alone", lambda machine, dtype: alone)
    profiling.write_profile(HOST, shipped.ceilings, ["float32"], tmp_path / "card.json")
    short, long = read_profile(tmp_path / "card.json").smalls
    assert (short.dtype, short.seconds, long.seconds) == ("float32", 2e-4, 8e-4)
    fastest = max(point.bytes_per_s for point in shipped.ceilings.curve)
    written = 64 * 4.0 * (2 * 576 + 2 * 576 + 2 * 192 + 2 * 1536)
    assert short.traffic_s > written / fastest / 2
    assert long.traffic_s == pytest.approx(4 * short.traffic_s, rel=0.01)
