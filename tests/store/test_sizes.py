"""The time to judge a run grows in proportion to its size.

All times are CPU seconds, which other processes hardly change.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from enlarged import enlarge

from profiler.report.write import html_report
from profiler.run.judge_folder import judge_folder

SOURCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-zen4"


@pytest.mark.slow
def test_judging_grows_with_the_cells(tmp_path: Path) -> None:
    """Four times the cells; a comparison of all pairs would take sixteen times as long."""
    took_s = []
    for side in (8, 16):
        folder = enlarge(SOURCE, tmp_path / str(side), side, side)
        begun_s = time.process_time()
        run = judge_folder(folder)
        took_s.append(time.process_time() - begun_s)
        assert len(run.measured) == len(run.results) == 2 * side**2
    page = html_report(run)
    assert took_s[1] < 8 * took_s[0]
    assert "prefill (eager) (144 of 256)" in page
