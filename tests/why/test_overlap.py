"""Of calls from several threads a second counts once; in a thread of library code, their line is where it started."""

from __future__ import annotations

import inspect
import json
import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hurry import with_effort
from planted_faults import recorded, tiny_llama

from profiler.json_document import json_text
from profiler.why_slow import trials
from profiler.why_slow.findings import Untried, judge_calls, tried_change
from profiler.why_slow.loop_changes import batching_change
from profiler.why_slow.observations import Call, CallSettings, Load, Observations, covered_s, most_at_once
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import call_rows, why_document, why_sentences

SETTINGS = CallSettings("float32", attention="sdpa", cache=True)
THREADS = 4


def call(number: int, began_s: float | None, seconds: float) -> Call:
    return Call(number, "generate", "Llama", 1, 8, 0, 4, 4, seconds, "s.py:4", SETTINGS, began_s=began_s)


@pytest.mark.parametrize(
    ("spans", "covered", "at_once"),
    [
        ([(0.0, 1.0), (0.5, 1.0), (2.0, 1.0)], 2.5, 2),
        ([(0.0, 3.0), (1.0, 1.0), (1.5, 1.0), (5.0, 1.0)], 4.0, 3),
        ([(2.0, 1.0), (0.0, 1.0), (1.0, 1.0)], 3.0, 1),  # one after the other, recorded in another order
        ([(None, 1.0), (None, 2.0)], 3.0, 1),
        ([], 0.0, 0),
    ],
)
def test_time_in_calls_is_the_union_of_their_intervals(
    spans: list[tuple[float | None, float]], covered: float, at_once: int
) -> None:
    calls = [call(number, *span) for number, span in enumerate(spans)]
    assert covered_s(calls) == pytest.approx(covered)
    assert most_at_once(calls) == at_once


def test_no_finding_saves_more_than_its_calls_cover() -> None:
    """A change that saves three quarters of four simultaneous calls of 1 s saves 0.75 s of 1 s, not 3 s of 4 s."""
    calls = tuple(call(number, 0.0, 1.0) for number in range(THREADS))
    trial = tried_change("cache-off", (0, 1, 2, 3), ((1.0, 0.25),) * 3, "s.py:4", "use_cache=False", "remove it", "one")
    found = judge_calls(Observations("s.py", 1.5, calls, (), 0.0, "", 0.0), [trial])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(0.75), pytest.approx(0.75))
    assert why_sentences(found)[0] == (
        "s.py spent 1.00 s in 4 calls of generate, up to 4 at once (each second counts once)."
    )
    document = json.loads(json_text(why_document(found)))
    assert (document["calls_s"], document["calls_at_once"]) == (1.0, 4)
    assert call_rows(found)[0][3:5] == ["1.00 s", "1.00 s"]


def test_loads_at_the_same_time_count_once() -> None:
    loads = tuple(Load("a", 2.0, "s.py:9", began_s) for began_s in (0.0, 2.0, 2.5))
    seen = Observations("s.py", 5.0, (), loads, 0.0, "", 0.0)
    assert seen.loads_s == 4.5
    [finding] = judge_calls(seen, []).findings
    assert finding.saves_s == 2.5


class Sleeps:
    """A logits processor that sleeps and counts how many run at the same time."""

    def __init__(self) -> None:
        self.running = self.most = 0

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.1)
        self.running -= 1
        return scores


def test_calls_from_threads_are_repeated_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads sleep four times 0.1 s each: 1.6 s of sleep in 0.4 s of wall time."""
    with_effort(monkeypatch, script_floor=False)
    model, slow, recorder = tiny_llama(), Sleeps(), Recorder()

    def generate() -> None:
        ids = torch.ones(1, 8, dtype=torch.long)
        model.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=[slow])

    with watched(recorder):
        threads = [threading.Thread(target=generate) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen = recorder.seen("s.py")
    assert most_at_once(seen.calls) == THREADS
    assert sum(item.seconds for item in seen.calls) > seen.wall_s > seen.calls_s > 0.4
    [group] = trials.call_groups(recorder, seen, Untried())
    candidate = batching_change(group)
    assert "up to 4 calls at once in threads" in candidate.evidence
    slow.most = 0
    candidate.as_is()
    assert slow.most > 1, "the unchanged calls run in threads"


TOKENS = {"inputs": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 2, "do_sample": False}


def lines_of_calls(begin: Callable[[Any], None]) -> list[str]:
    """The lines of the model calls in `begin`."""
    return [noted.where for noted in recorded(lambda: begin(tiny_llama())).notes]


def next_line() -> int:
    """The number of the line after the caller's line."""
    frame = inspect.currentframe()
    return frame.f_back.f_lineno + 1


def test_a_call_is_at_the_line_that_starts_its_thread() -> None:
    """Chat pages that read TextIteratorStreamer start such threads."""
    expected = 0

    def begin(model: Any) -> None:
        nonlocal expected
        thread = threading.Thread(target=model.generate, kwargs=TOKENS)
        expected = next_line()
        thread.start()
        thread.join()

    assert lines_of_calls(begin) == [f"test_overlap.py:{expected}"]


def test_calls_of_one_worker_are_at_the_lines_that_submit_them() -> None:
    first = second = 0

    def begin(model: Any) -> None:
        nonlocal first, second
        with ThreadPoolExecutor(1) as pool:
            first = next_line()
            one: Future[Any] = pool.submit(model.generate, **TOKENS)
            one.result()
            second = next_line()
            pool.submit(model.generate, **TOKENS).result()

    assert lines_of_calls(begin) == [f"test_overlap.py:{first}", f"test_overlap.py:{second}"]


def test_an_unknown_line_is_said_to_be_that_of_a_library() -> None:
    """If the thread started before the recording, its line is unknown."""
    ready, recorder = threading.Event(), Recorder()
    timer = threading.Timer(3600.0, operator.methodcaller("generate", **TOKENS), [tiny_llama()])
    timer.finished.wait = lambda _seconds: ready.wait()  # type: ignore[method-assign, assignment, misc]
    timer.start()
    with watched(recorder):
        ready.set()
        timer.join()
    assert [noted.where for noted in recorder.notes] == ["a library's own code"]
