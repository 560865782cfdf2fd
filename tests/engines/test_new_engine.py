"""A new engine is one class and one entry: it is checked, measured and reported without further edits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import profiler
from profiler.engines.registry import ENGINES, check_engine, engine_names
from profiler.engines.transformers import EagerEngine
from profiler.errors import RequestError


class ToyEngine(EagerEngine):
    """The eager engine under another name."""

    name = "toy"


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, ToyEngine.name, ToyEngine)


def test_messages_name_it() -> None:
    assert "toy" in engine_names()
    with pytest.raises(RequestError, match="toy"):
        check_engine("unknown", on_cuda=False, config=None, longest_context=64)


@pytest.mark.slow
def test_a_run_measures_and_reports_it(profile_tiny: Callable[..., profiler.Run]) -> None:
    run = profile_tiny(engine="toy")
    assert run.document.engine.names == ("toy",)
    assert {(row.engine, row.status) for row in run.results} == {("toy", "ok")}
    assert "toy" in (run.folder / "report.md").read_text()
