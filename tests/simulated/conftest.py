"""For every test on a simulated card."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_kept_roofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated roof must never be kept beside measured ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
