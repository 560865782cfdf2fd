"""Fixtures of all tests on simulated cards."""

from pathlib import Path

import pytest

from .native import why_not


@pytest.fixture(autouse=True)
def _simulated_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where no card can be simulated, and keep no ceilings."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
