"""The times of a real model's steps: their parts add up, and two runs in a row agree."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from hurry import with_effort

import profiler

pytestmark = [pytest.mark.timing, pytest.mark.slow]


@pytest.fixture(scope="module")
def profiled(short_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], profiler.Run]]:
    """Profile six layers of SmolLM2-135M, each cell four times, with briefly measured ceilings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("roofs")))
        patch.setattr("profiler.roofs.measure.measure_host_pace", lambda *_: None)
        with_effort(patch, rounds=4, more_prefills_s=0.2)
        yield lambda: profiler.profile(
            str(short_folder), prompt_lens=[64, 128], batch_sizes=[1, 2], new_tokens=16, no_trials=True,
            out=tmp_path_factory.mktemp("runs") / "run",
        )  # fmt: skip


@pytest.fixture(scope="module")
def run(profiled: Callable[[], profiler.Run]) -> profiler.Run:
    return profiled()


def test_the_time_breakdown_explains_the_step(run: profiler.Run) -> None:
    """The unexplained time is below 20 % in at least 4 of 5 quiet cells."""
    cells = run.cells
    quiet = cells[cells["noise"] == "quiet"]
    if quiet.empty:
        pytest.skip("this machine was too noisy for any cell to be quiet")
    left = (quiet["unexplained_s"] / quiet["latency_s"]).abs()
    assert (left < 0.20).mean() >= 0.8


def test_two_runs_in_a_row_agree(run: profiler.Run, profiled: Callable[[], profiler.Run]) -> None:
    """At least 9 of 10 cells are neither slower nor faster by `compare`, where it judges them: in up to three runs."""
    before, cells = run, pd.DataFrame()
    for _ in range(2):
        after = profiled()
        changes = profiler.compare(before.folder, after.folder)
        cells, before = pd.concat([cells, changes[changes["because"] == ""]]), after
        agree = ~cells["verdict"].isin(["slower", "faster"])
        if len(cells) >= 8 and agree.mean() >= 0.9:
            return
    if len(cells) < 8:
        pytest.skip("this machine is too noisy for any claim to be made")
    assert agree.mean() >= 0.9, str(cells)
