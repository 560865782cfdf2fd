"""The time to judge a run grows in proportion to its size, and the size of its HTML page is bounded.

All times are CPU seconds, which other processes hardly change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from enlarged import enlarge
from yardstick import yardstick_s

from profiler.counting.preset_counts import preset_counts
from profiler.facts.step import Step
from profiler.facts.telemetry import Reading, Timeline
from profiler.report.write import html_report
from profiler.run.judge_folder import judge_folder

SOURCE = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-zen4"

# Judges a folder and makes its page in a new process. Prints the page's CPU seconds, its bytes and the peak in kB.
PAGE = """
import sys, time
from pathlib import Path
from profiler.run.judge_folder import judge_folder
from profiler.report.write import html_report
run = judge_folder(Path(sys.argv[1]))
begun_s = time.process_time()
page = html_report(run)
took_s = time.process_time() - begun_s
# Not ru_maxrss, which a new process inherits from the test runner.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(took_s, len(page.encode()), peak)
"""


# Judges a folder in a new process. Prints its CPU seconds, the peak in kB and the number of samples.
JUDGED = """
import sys, time
from pathlib import Path
from profiler.run.judge_folder import judge_folder
begun_s = time.process_time()
run = judge_folder(Path(sys.argv[1]))
took_s = time.process_time() - begun_s
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(took_s, peak, sum(result.samples for result in run.results))
"""


@pytest.mark.slow
def test_ten_thousand_cells(tmp_path: Path) -> None:
    """20,000 rows: the page takes a few CPU seconds and under 5 MB, and the whole process under 1 GB."""
    folder = enlarge(SOURCE, tmp_path / "run", 100, 100)
    done = subprocess.run(
        [sys.executable, "-c", PAGE, str(folder)], capture_output=True, text=True, check=True, timeout=550
    )
    seconds, nbytes, peak_kib = map(float, done.stdout.split())
    assert seconds < 330 * yardstick_s()
    assert nbytes < 5e6
    assert 1024 * peak_kib < 1e9


@pytest.mark.slow
def test_a_million_samples_are_judged_in_seconds(tmp_path: Path) -> None:
    """32,000 visits of four cells with 31 times each take 5 CPU seconds and 0.5 GB."""
    folder = enlarge(SOURCE, tmp_path / "run", 2, 2)
    _repeat_visits(folder / "samples.jsonl", times=7999, steps=31)
    done = subprocess.run(
        [sys.executable, "-c", JUDGED, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    seconds, peak_kib, samples = map(float, done.stdout.split())
    assert samples == 4 * 8000 + 4 * (7999 * 30 + 6)
    assert seconds < 500 * yardstick_s()
    assert 1024 * peak_kib < 1e9


def _repeat_visits(file: Path, times: int, steps: int) -> None:
    """Append `times` copies of each visit, with 1 % of noise between visits and within each."""
    visits = [record for record in map(json.loads, file.read_text().splitlines()) if record["kind"] == "visit"]
    noise = np.random.default_rng(0).normal(1, 0.01, (times, steps + 1)).round(4)
    with file.open("a") as more:
        for number, (of_visit, *of_steps) in enumerate(noise.tolist(), start=1):
            for visit in visits:
                decode_s = [visit["decode_s"][0] * of_visit * of_step for of_step in of_steps]
                prefill_s = visit["prefill_s"] * of_visit
                copy = {"round": number, "prefill_s": prefill_s, "decode_s": decode_s}
                more.write(json.dumps(visit | copy) + "\n")


def test_ten_thousand_cells_are_counted_at_once() -> None:
    """Both phases of 100 batches by 100 prompts, each in one call; a cell equals the cell counted separately."""
    preset = preset_counts("smollm2-135m")
    assert preset is not None
    work = preset.work
    batches, prompts = np.arange(1, 101)[:, None], 8 * np.arange(1, 101)[None, :]
    begun_s = time.process_time()
    prefills, decodes = work.work(Step(batches, prompts, 0)), work.work(Step(batches, 1, prompts))
    assert time.process_time() - begun_s < 33 * yardstick_s()
    assert np.shape(prefills.model_flops) == np.shape(decodes.model_flops) == (100, 100)
    cell = work.work(Step(7, 1, 8 * 50))
    assert (decodes.model_flops[6, 49], decodes.model_bytes[6, 49]) == (cell.model_flops, cell.model_bytes)


def test_judging_grows_with_the_cells_and_the_page_hardly(tmp_path: Path) -> None:
    """Four times the cells; a comparison of all pairs would take sixteen times as long."""
    took_s, pages = [], []
    for side in (8, 16):
        folder = enlarge(SOURCE, tmp_path / str(side), side, side)
        begun_s = time.process_time()
        run = judge_folder(folder)
        took_s.append(time.process_time() - begun_s)
        assert len(run.measured) == len(run.results) == 2 * side**2
        pages.append(html_report(run))
    assert took_s[1] < 8 * took_s[0]
    assert len(pages[1]) < 2 * len(pages[0])
    columns = json.loads(pages[1].split('id="rows">')[1].split("</script>")[0])
    assert {len(column["at"]) for column in columns} == {512}, "the page sorts all rows"
    assert "200 of 512 rows" in pages[1]
    assert "prefill (eager) (144 of 256)" in pages[1]


def test_a_row_of_a_judgement_takes_little_memory(tmp_path: Path) -> None:
    """13 kB per row at the peak, so 20,000 rows take 0.3 GB; 30 kB if each row had its own tables."""
    folders = {side: enlarge(SOURCE, tmp_path / str(side), side, side) for side in (4, 12)}
    judge_folder(folders[4])
    peaks = {}
    for side, folder in folders.items():
        tracemalloc.start()
        judge_folder(folder)
        peaks[side] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (peaks[12] - peaks[4]) / (2 * 12**2 - 2 * 4**2) < 20_000


def test_readings_of_a_span_are_found_without_a_look_at_all() -> None:
    """A hundred times the readings, with as many in each span; a linear search would take a hundred times as long."""
    took_s = []
    for count in (10**3, 10**5):
        timeline = Timeline([Reading(clock_hz=1e9, at_unix_s=float(moment)) for moment in range(count)])
        spans = [(count * share / 1000 + 0.5, 3.0) for share in range(500)]
        best_s = float("inf")
        for _ in range(3):
            begun_s = time.process_time()
            assert {timeline.active([span]).clock_hz for span in spans} == {1e9}
            best_s = min(best_s, time.process_time() - begun_s)
        took_s.append(best_s)
    assert took_s[1] < 20 * took_s[0]
