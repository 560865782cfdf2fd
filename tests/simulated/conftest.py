"""Fixtures of all tests on simulated cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from .native import why_not


@pytest.fixture(scope="session", autouse=True)
def _a_card_can_be_simulated() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _no_kept_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
