"""Seconds of a script: parts add up to its run time, loads and one-time costs are separate, threads count once."""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import slow_except
from hurry import with_effort
from planted_faults import generate, recorded, script, tiny_llama

import profiler
from profiler.device.clock import Clock
from profiler.json_document import json_text
from profiler.why_slow import costs, trials
from profiler.why_slow.costs import conversion_findings
from profiler.why_slow.findings import CallFloor, TriedChange, Untried, judge_calls, new_finding, tried_change
from profiler.why_slow.loop_changes import batching_change
from profiler.why_slow.observations import LineTime, Load, Observations, covered_s, most_at_once
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import call_rows, time_parts, why_document, why_sentences
from profiler.why_slow.trials import once_warm


def parts_of(seen: Observations, floor: CallFloor | None = None) -> dict[str, float]:
    return {part.what.partition(":")[0]: part.seconds for part in time_parts(judge_calls(seen, [], floor))}


def test_each_second_of_a_script_has_one_name() -> None:
    """Two calls take 10 and 8 s. The first has 2 s of one-time costs, and 5 of 16 s are not in forward passes.

    A twentieth of the 40 s is waiting for other processes.
    """
    calls = (
        generate(0, 10.0, warm_s=8.0, forward_s=7.5, sampling_s=1.5, callbacks_s={"Stops": 0.5}),
        generate(1, 8.0, forward_s=5.5, sampling_s=1.5, callbacks_s={"Stops": 0.5}),
    )
    seen = script(
        40.0, *calls, loads=(Load("a", 6.0, "s.py:1"),), text_s=2.0, text_where="s.py:2", overhead_s=0.5,
        between=(LineTime("s.py:9", 3, 1.0),), waited_s=2.0,
    )  # fmt: skip
    parts = parts_of(seen, CallFloor(7.0, 2.0, needless_s=1.0))
    assert parts == pytest.approx(
        {
            "kernels at the roofs of this machine": 5.0,
            "dispatch of kernels by Python and torch, at least": 2.0,
            "work that the tokens do not need": 1.0,
            "waiting for a core that other processes used": 2.0,
            "kernels (modules unknown) slower than the roofs, and dispatch beyond least": 16 - 13 - 2.0 * 18 / 40,
            "sampling": 3.0,
            "your Stops": 1.0,
            "generate's own work": 1.0,
            "one-time costs of first calls": 2.0,
            "loading models": 0.95 * 6.0,
            "tokenizers (s.py": 0.95 * 2.0,
            "the script's code between its forwards (s.py": 0.95 * 1.0,
            "recording these calls": 0.95 * 0.5,
            "imports and the script's other code": 0.95 * (40 - 18 - 9.5),
        }
    )
    assert sum(parts.values()) == pytest.approx(40.0)


def test_no_part_is_longer_than_what_is_left() -> None:
    """By inaccurate measurements, a floor of 5 s and dispatch of 3 s exceed 6 s of forward passes."""
    parts = parts_of(script(6.0, generate(0, 6.0, forward_s=6.0)), CallFloor(8.0, 3.0))
    assert parts == {
        "kernels at the roofs of this machine": 5.0, "dispatch of kernels by Python and torch, at least": 1.0,
    }  # fmt: skip


def test_overlapping_calls_count_once() -> None:
    """Four simultaneous calls of 2 s, half of it in forward passes, count as 1 s and 1 s."""
    calls = tuple(generate(number, 2.0, forward_s=1.0, began_s=0.0) for number in range(4))
    assert parts_of(script(2.0, *calls)) == pytest.approx({"generate's own work": 1.0, "forward passes": 1.0})


BOUND = "at most: the bytes that cross the link, at its measured bandwidth"


@pytest.mark.parametrize(
    ("basis", "parts"),
    [(BOUND, {"weights over the link, at most": 4.0, "the rest of forward passes": 5.0}),
     ("tried: 3 pairs", {"forward passes": 9.0})],
    ids=["a bound", "a trial, whose link was not measured"],
)  # fmt: skip
def test_weights_over_a_link_have_a_row(basis: str, parts: dict[str, float]) -> None:
    """Forward passes take 9 s of 10 s."""
    seen = script(10.0, generate(0, 9.0, forward_s=9.0))
    finding = new_finding("offload", 4.0, "s.py:1", "some weights cross a link", "keep them on the GPU", basis)
    found = time_parts(judge_calls(seen, [], more=[finding]))
    assert {part.what: part.seconds for part in found} == pytest.approx(
        {**parts, "imports and the script's other code": 1.0}
    )


def test_forward_passes_and_sampling_are_timed_within_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both calls have the forward passes of 6 tokens. Only the sampling call has logits processors."""
    with_effort(monkeypatch, script_floor=False, script_least_s=0.0, script_most_s=0.0)
    model, ids = tiny_llama(), torch.ones(1, 8, dtype=torch.long)
    with profiler.why() as watching:
        model.generate(ids, max_new_tokens=6, do_sample=False)
        model.generate(ids, max_new_tokens=6, do_sample=True, top_k=5, top_p=0.9, temperature=0.7)
    greedy, sampled = watching.found.seen.calls
    for call in (greedy, sampled):
        assert call.forwards == 6
        assert call.forward_s is not None
        assert 0 < call.prompt_s < call.forward_s < call.seconds
    assert sampled.sampling_s > greedy.sampling_s
    assert sum(part.seconds for part in time_parts(watching.found)) == pytest.approx(watching.found.seen.wall_s)


COLD_S = 0.2


def tried(saving: float, *numbers: int) -> TriedChange:
    return tried_change(
        "grad-on", numbers, ((1.0, 1 - saving),) * 5, "s.py:4", "gradients are recorded", "no grad", "one"
    )


def test_savings_and_shares_refer_to_warm_calls() -> None:
    """Calls take 10, 8 and 1 s, and 1, 2 and 1 s once warm. Half of a warm call is saved: 2 s, or 50 % of 4 s."""
    calls = (generate(0, 10.0, warm_s=1.0), replace(generate(1, 8.0, warm_s=2.0), prompt_len=9), generate(2, 1.0))
    found = judge_calls(script(19.0, *calls), [tried(0.5, 0, 1, 2)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(2.0), pytest.approx(0.5))
    assert "Percentages refer to 4.00 s: warm calls and tokenizers." in why_sentences(found)
    assert why_sentences(found)[-1] == (
        "First calls at s.py:4 took 18.0 s, and 3.00 s once warm. The rest is a one-time cost, which no finding saves"
        " and no percentage includes."
    )


def test_a_first_call_faster_than_its_repeat_counts_in_full() -> None:
    seen = script(2.0, generate(0, 1.0, warm_s=1.2))
    assert seen.steady_s == seen.calls_s == 1.0
    assert judge_calls(seen, []).first_calls == []


def test_first_calls_are_repeated() -> None:
    """The model sleeps for COLD_S only in the first call. A later call of its shape replaces the repeat."""
    model = tiny_llama()
    left_s = [COLD_S]
    model.model.register_forward_pre_hook(lambda *_: time.sleep(left_s.pop() if left_s else 0.0))
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in (4, 4, 5)])
    seen = recorder.seen("s.py")
    first, second, _ = once_warm(recorder, seen, 10.0).calls
    assert first.seconds >= COLD_S > 2 * first.steady_s
    assert second.warm_s is None
    first, *others = once_warm(recorder, seen, 0.0).calls
    assert first.warm_s == pytest.approx(second.seconds)
    assert {call.warm_s for call in others} == {None}, "there was no time"


def test_only_the_first_forward_of_a_loop_is_repeated() -> None:
    """Each forward of a loop without a cache has its own shape, and only the first one has one-time costs."""
    model = tiny_llama()
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in range(4, 12)])
    first, *others = once_warm(recorder, recorder.seen("s.py"), 10.0).calls
    assert first.warm_s is not None
    assert {call.warm_s for call in others} == {None}


@pytest.mark.slow
def test_other_shapes_are_repeated_until_one_has_no_one_time_costs() -> None:
    """Of five shapes, the first and fourth are cold. The fourth is the slowest of the others, and the fifth is next."""
    model = tiny_llama()
    naps_s = [COLD_S, 0.02, 0.02, COLD_S, 0.1]
    model.model.register_forward_pre_hook(lambda *_: time.sleep(naps_s.pop(0) if naps_s else 0.1))
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in (4, 9, 6, 8, 5)])
    calls = once_warm(recorder, recorder.seen("s.py"), 10.0).calls
    assert [call.number for call in calls if call.warm_s is not None] == [0, 3, 4]


class Queue(Clock):
    """The clock of a device on which each forward takes COLD_S, for which the host does not wait."""

    ahead, ready_ns = True, 0

    def mark(self) -> int:
        return max(time.perf_counter_ns(), self.ready_ns)

    def submit(self, *_: object) -> None:
        self.ready_ns = self.mark() + int(COLD_S * 1e9)


@pytest.mark.parametrize("part", slow_except(["text"], ["text", "load", "read"]))
def test_what_has_another_name_is_not_the_scripts_code_between_forwards(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script sleeps COLD_S after each forward: in a tokenizer, in a load, or until a device has its token."""
    model, recorder, queue = tiny_llama(), Recorder(), Queue()
    if part == "read":
        monkeypatch.setattr("profiler.why_slow.recorder.clock_for", lambda _: queue)
        model.register_forward_hook(queue.submit)
    within: Callable[..., object] = {
        "text": lambda run: recorder.text(run, ("a text",), {}),
        "load": lambda run: recorder.load("a model", run, (), {}),
        "read": lambda run: run(),
    }[part]
    with watched(recorder), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.long))
            within(lambda *_: time.sleep(COLD_S))
    [between] = recorder.seen("s.py").between
    assert between.seconds < COLD_S / 2


THREADS = 4


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
    calls = [generate(number, seconds, began_s=began_s) for number, (began_s, seconds) in enumerate(spans)]
    assert covered_s(calls) == pytest.approx(covered)
    assert most_at_once(calls) == at_once


def test_no_finding_saves_more_than_its_calls_cover() -> None:
    """A change that saves three quarters of four simultaneous calls of 1 s saves 0.75 s of 1 s, not 3 s of 4 s."""
    calls = tuple(generate(number, 1.0, began_s=0.0) for number in range(THREADS))
    found = judge_calls(script(1.5, *calls), [tried(0.75, 0, 1, 2, 3)])
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
    seen = script(5.0, loads=loads)
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


def lines_of_calls(begin: Callable[[Any], None]) -> list[int]:
    """The lines of the model calls in `begin`, counted from its `def`."""
    notes = recorded(lambda: begin(tiny_llama())).notes
    return [int(noted.where.removeprefix("test_seconds.py:")) - begin.__code__.co_firstlineno for noted in notes]


def test_a_call_is_at_the_line_that_starts_its_thread() -> None:
    """Chat pages that read TextIteratorStreamer start such threads."""

    def begin(model: Any) -> None:
        thread = threading.Thread(target=model.generate, kwargs=TOKENS)
        thread.start()
        thread.join()

    assert lines_of_calls(begin) == [2]


def test_calls_of_one_worker_are_at_the_lines_that_submit_them() -> None:
    def begin(model: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            one: Future[Any] = pool.submit(model.generate, **TOKENS)
            one.result()
            pool.submit(model.generate, **TOKENS).result()

    assert lines_of_calls(begin) == [2, 4]


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


QUANTISED = SimpleNamespace(pre_quantized=False, quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
SAVED = SimpleNamespace(pre_quantized=True, quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
PACKED = SimpleNamespace(pre_quantized=True, packed_modules={"q_proj": None})


class Model(torch.nn.Linear):
    """A model of 4 MiB with a quantizer."""

    def __init__(self, quantizer: Any) -> None:
        super().__init__(1024, 1024, bias=False)
        self.hf_quantizer = quantizer


@pytest.mark.parametrize(
    ("quantizer", "named", "conversion"),
    [
        (None, {}, ""),
        (None, {"gguf_file": "model.gguf"}, "GGUF weights are unpacked"),
        (PACKED, {"gguf_file": "model.gguf"}, ""),
        (QUANTISED, {}, "weights are quantised (bitsandbytes)"),
        (SAVED, {}, ""),
    ],
)
def test_what_a_load_does_to_the_weights(quantizer: Any, named: dict[str, str], conversion: str) -> None:
    recorder = Recorder()
    model = recorder.load("org/model", lambda **_: Model(quantizer), (), named)
    assert [load.conversion for load in recorder.loads] == [conversion]
    assert recorder.loaded_models == [model]


def observed(conversion: str) -> Observations:
    """Three loads of 4 s and a call of 8 s."""
    loads = tuple(Load("a.gguf", 4.0, "s.py:9", 4.0 * turn, conversion, "load another") for turn in range(3))
    return script(20.0, generate(0, 8.0), loads=loads)


def test_the_first_load_is_compared_with_a_read_and_later_ones_are_reloads() -> None:
    """The saving excludes the time to write and read the weights. Without the model, the whole load is a bound."""
    seen = observed("GGUF weights are unpacked")
    [load] = conversion_findings(seen, [Model(None), None, None])
    assert 0 <= load.saves_s < 4.0
    [bound] = conversion_findings(seen, [None] * 3)
    found = judge_calls(seen, [], more=[bound])
    assert [(item.id, item.saves_s, item.is_bound) for item in found.findings] == [
        ("reloads", 8.0, False),
        ("slow-load", 4.0, True),
    ]
    assert why_sentences(found)[2] == (
        "2. GGUF weights are unpacked at every start: at most 4.00 s (20 %). Load another (s.py:9). [at most]"
    )
    assert list(conversion_findings(observed(""), [None] * 3)) == []


def test_part_of_the_weights_represents_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 of 32 MiB are written and read in half a second."""
    written: list[int] = []
    write = Path.write_bytes
    monkeypatch.setattr(costs, "_MOST_BYTES", 8 << 20)
    monkeypatch.setattr(Path, "write_bytes", lambda file, data: (written.append(len(data)), write(file, data)))
    clock = iter((1.0, 1.5))
    monkeypatch.setattr(costs, "now_s", lambda: next(clock))
    assert costs.read_weights_s(torch.nn.Sequential(*(Model(None) for _ in range(8)))) == 2.0
    assert written == [8 << 20]


def test_without_room_for_the_file_the_load_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert costs.read_weights_s(Model(None)) is None
