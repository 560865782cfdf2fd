"""A call in a thread that runs only library code is reported at the line that started the thread."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from planted_faults import tiny_llama

from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder

TOKENS = {"inputs": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 2, "do_sample": False}


def lines_of_calls(begin: Callable[[Any], None]) -> list[str]:
    """The lines of the model calls in `begin`."""
    recorder = Recorder()
    with watched(recorder):
        begin(tiny_llama())
    return [noted.where for noted in recorder.notes]


def next_line() -> int:
    """The number of the line after the caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
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

    assert lines_of_calls(begin) == [f"test_threads.py:{expected}"]


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

    assert lines_of_calls(begin) == [f"test_threads.py:{first}", f"test_threads.py:{second}"]


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
