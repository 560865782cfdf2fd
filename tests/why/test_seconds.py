"""Seconds of a script: parts add up to its run time, loads and one-time costs are separate, threads count once."""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import slow_except
from planted_faults import changes_to, generate, groups_of, recorded, run_watched, script, tiny_llama, tried
from scripts import SCRIPTS
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

from profiler.counting.walk import walk
from profiler.data.ceiling_set import CeilingSet
from profiler.device import contention
from profiler.device.clock import Clock
from profiler.json_document import json_text
from profiler.why_slow import costs, trials
from profiler.why_slow.batch_and_loop_changes import batching_change
from profiler.why_slow.call_record import Callback
from profiler.why_slow.command import explained
from profiler.why_slow.costs import ModuleTimes, conversion_findings, module_times
from profiler.why_slow.findings import CallFloor, SlowModule, Untried, Why, judge_calls
from profiler.why_slow.floor import Subject, floor_of_calls, subject_of
from profiler.why_slow.observations import Call, Load, Observations, OwnLine, Recompilation, most_at_once
from profiler.why_slow.patches import watched
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import call_rows, time_parts, why_document, why_sentences
from profiler.why_slow.repeat_call import Run
from profiler.why_slow.trials import once_warm


def parts_of(seen: Observations, floor: CallFloor | None = None) -> dict[str, float]:
    return {part.what.partition(":")[0]: part.seconds for part in time_parts(judge_calls(seen, [], floor))}


def test_each_second_of_a_script_has_one_name() -> None:
    """Two calls take 10 and 8 s. The first has 2 s of one-time costs, and 5 of 16 s are not in forward passes.

    In 2 of the 40 s, which are in no other part, the script waits for a core.
    """
    at_tokens = {"processors_s": {"TopPLogitsWarper": 1.5}, "callbacks_s": {"Stops": 0.5}}
    calls = generate(0, 10.0, warm_s=8.0, forward_s=7.5, **at_tokens), generate(1, 8.0, forward_s=5.5, **at_tokens)
    seen = script(
        40.0, *calls, loads=(Load("a", 6.0, "s.py:1"),), text_s=2.0, text_where="s.py:2", overhead_s=0.5,
        own_lines=(OwnLine("s.py:9", "pick", "", 1.0),), waited_s=2.0,
    )  # fmt: skip
    parts = parts_of(seen, CallFloor(7.0, 2.0, needless_s=1.0))
    assert parts == pytest.approx(
        {
            "kernels at the ceilings of this machine": 5.0,
            "overhead of Python and torch, at least": 2.0,
            "work that the tokens do not need": 1.0,
            "waiting for a core that other processes used": 2.0,
            "kernels (modules unknown) slower than the ceilings, and overhead beyond that": 11.0 - 8,
            "TopPLogitsWarper, at every token": 3.0,
            "your Stops, at every token": 1.0,
            "generate's own work": 1.0,
            "one-time costs of first calls": 2.0,
            "loading models": 6.0,
            "tokenizers (s.py": 2.0,
            "the script's code at s.py": 1.0,
            "recording these calls": 0.5,
            "imports and the script's other code": 40 - 18 - 9.5 - 2,
        }
    )
    assert sum(parts.values()) == pytest.approx(40.0)


def test_a_part_leaves_out_its_own_waits_for_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 5 s of a logits processor, 3 are waits: it takes 2 s, however much the rest of its call waits."""
    counted, time_s = tmp_path / "schedstat", [0.0]
    counted.write_text("0 0 1")
    monkeypatch.setattr(contention, "SCHEDSTAT_FILE", counted)
    monkeypatch.setattr(contention, "now_s", lambda: time_s[0])

    def penalty() -> None:
        time_s[0] += 5.0
        counted.write_text("0 3000000000 2")

    noted: Any = SimpleNamespace(forward_s=0.0, callbacks_s={})
    Callback(penalty, penalty, noted)()
    assert noted.callbacks_s == {"penalty": 2.0}


def test_samples_leave_out_the_waits_between_calls() -> None:
    """Of 10 s outside of calls, 5 s are waits: half of the 4 s of a line, the 2 s of constructors and the rest."""
    line = OwnLine("s.py:9", "pick", "", 4.0)
    seen = script(20.0, generate(0, 10.0), waited_s=5.0, own_lines=(line,), making_s=2.0, sampled_s=10.0)
    assert parts_of(seen) == {
        "forward passes": 10.0, "waiting for a core that other processes used": 5.0, "the script's code at s.py": 2.0,
        "imports and the script's other code": 2.0, "making models": 1.0,
    }  # fmt: skip


def test_no_part_is_longer_than_what_is_left() -> None:
    """By inaccurate measurements, a floor of 5 s and overhead of 3 s exceed 6 s of forward passes: 1 s is left."""
    seen, floor = script(6.0, generate(0, 6.0, forward_s=6.0)), CallFloor(8.0, 3.0)
    parts = parts_of(seen, floor)
    assert parts == {
        "kernels at the ceilings of this machine": 5.0, "overhead of Python and torch, at least": 1.0,
    }  # fmt: skip
    found = judge_calls(seen, [], floor)
    assert "need 6.00 s on this machine, 1.00 s of it overhead" in why_sentences(found)[0]
    assert (why_document(found).floor_s, why_document(found).floor_overhead_s) == (6.0, 1.0)


def test_forward_passes_and_sampling_are_timed_within_generate() -> None:
    """Both calls have the forward passes of 6 tokens. Only the sampling call has logits processors, by their class."""
    model, ids = tiny_llama(), torch.ones(1, 8, dtype=torch.long)
    ways = {"do_sample": False}, {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7}
    seen = recorded(lambda: [model.generate(ids, max_new_tokens=6, **way) for way in ways]).seen("s.py")
    greedy, sampled = seen.calls
    for call in (greedy, sampled):
        assert call.forwards == 6
        assert call.forward_s is not None
        assert 0 < call.prompt_s < call.forward_s < call.seconds
    warpers = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}
    assert set(sampled.processors_s) - set(greedy.processors_s) == warpers
    assert all(sampled.processors_s[name] > 0 for name in warpers)
    assert sum(part.seconds for part in time_parts(judge_calls(seen, []))) == pytest.approx(seen.wall_s)


COLD_S = 0.2


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
    # Each forward of a loop without a cache has its own shape, and only the first one has one-time costs.
    recorder = recorded(lambda: [model(torch.ones(1, length, dtype=torch.long)) for length in range(4, 12)])
    first, *others = once_warm(recorder, recorder.seen("s.py"), 10.0).calls
    assert first.warm_s is not None
    assert {call.warm_s for call in others} == {None}


class Queue(Clock):
    """The clock of a device on which each forward takes COLD_S, for which the host does not wait."""

    ahead, ready_ns = True, 0

    def mark(self) -> int:
        return max(time.perf_counter_ns(), self.ready_ns)

    def submit(self, *_: object) -> None:
        self.ready_ns = self.mark() + int(COLD_S * 1e9)


@pytest.mark.parametrize("part", slow_except(["text"], ["text", "load", "read"]))
def test_what_has_another_name_is_not_the_scripts_own_code(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script sleeps COLD_S after each forward: in a tokenizer, in a load, or until a device has its token."""
    model, recorder, queue = tiny_llama(), Recorder(), Queue()
    if part == "read":
        monkeypatch.setattr("profiler.why_slow.recorder.OwnClock", lambda: queue)
        model.register_forward_hook(queue.submit)
    within: Callable[..., object] = {
        "text": lambda run: recorder.text(partial(run, None, "a text")),
        "load": lambda run: recorder.load("a model", partial(run)),
        "read": lambda run: run(),
    }[part]
    with watched(recorder), torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.long))
            within(lambda *_: time.sleep(COLD_S))
    found = judge_calls(recorder.seen("s.py"), [])
    assert sum(part.seconds for part in time_parts(found) if part.own_code) < COLD_S / 2


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
def test_time_in_calls_and_in_loads_is_the_union_of_their_intervals(
    spans: list[tuple[float | None, float]], covered: float, at_once: int
) -> None:
    calls = [generate(number, seconds, began_s=began_s) for number, (began_s, seconds) in enumerate(spans)]
    loads = tuple(Load("a", call.seconds, "s.py:1", call.began_s) for call in calls)
    seen = script(5.0, *calls, loads=loads)
    assert (seen.calls_s, seen.loads_s) == (pytest.approx(covered), pytest.approx(covered))
    assert most_at_once(calls) == at_once


def test_no_finding_saves_more_than_its_calls_cover() -> None:
    """A change that saves three quarters of four simultaneous calls of 1 s saves 0.75 s of 1 s, not 3 s of 4 s.

    A half of each call in forward passes is half a second.
    """
    calls = tuple(generate(number, 1.0, forward_s=0.5, began_s=0.0) for number in range(THREADS))
    seen = script(1.0, *calls)
    assert parts_of(seen) == pytest.approx({"generate's own work": 0.5, "forward passes": 0.5})
    found = judge_calls(seen, [tried(0.75, 0, 1, 2, 3)])
    [finding] = found.findings
    assert (finding.saves_s, finding.share) == (pytest.approx(0.75), pytest.approx(0.75))
    document = json.loads(json_text(why_document(found)))
    assert (document["calls_s"], document["calls_at_once"]) == (1.0, 4)
    assert call_rows(found)[0][3:5] == ["1.00 s", "1.00 s"]


def test_calls_from_threads_are_repeated_in_threads() -> None:
    """Four threads sleep four times 0.1 s each: 1.6 s of sleep in 0.4 s of wall time."""
    model, recorder, ran_in = tiny_llama(), Recorder(), set[int]()

    def slow(_ids: Any, scores: Any) -> Any:
        ran_in.add(threading.get_ident())
        time.sleep(0.1)
        return scores

    def generate() -> None:
        ids = torch.ones(1, 8, dtype=torch.long)
        model.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=[slow])

    with watched(recorder), ThreadPoolExecutor(THREADS) as pool:
        for _ in range(THREADS):
            pool.submit(generate)
    seen = recorder.seen("s.py")
    assert most_at_once(seen.calls) == THREADS
    assert sum(item.seconds for item in seen.calls) > seen.wall_s > seen.calls_s > 0.4
    [group] = trials.call_groups(recorder, seen, Untried())
    candidate = batching_change(group)
    assert "up to 4 calls at once in threads" in candidate.evidence
    ran_in.clear()
    candidate.as_is()
    assert len(ran_in) > 1, "the unchanged calls run in threads"


def test_a_call_is_at_the_line_that_starts_its_thread_or_submits_it() -> None:
    """Chat pages that read TextIteratorStreamer start such threads. One worker has calls of two lines."""
    options = {"inputs": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 2, "do_sample": False}

    def begin(model: Any) -> None:
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            one: Future[Any] = pool.submit(model.generate, **options)
            one.result()
            pool.submit(model.generate, **options).result()

    notes = recorded(lambda: begin(tiny_llama())).notes
    first = begin.__code__.co_firstlineno
    assert [noted.where for noted in notes] == [f"test_seconds.py:{first + after}" for after in (2, 5, 7)]


QUANTISED = SimpleNamespace(pre_quantized=False, quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
SAVED = SimpleNamespace(pre_quantized=True, quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
PACKED = SimpleNamespace(pre_quantized=True, packed_modules={"q_proj": None})


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
    recorder, model = Recorder(), torch.nn.Linear(8, 8)
    model.hf_quantizer = quantizer
    recorder.load("org/model", partial(lambda **_: model, **named))
    assert [load.conversion for load in recorder.loads] == [conversion]
    assert recorder.loaded_models == [model]


def observed(conversion: str) -> Observations:
    """Three loads of 4 s and a call of 8 s."""
    loads = tuple(Load("a.gguf", 4.0, "s.py:9", 4.0 * turn, conversion, "load another") for turn in range(3))
    return script(20.0, generate(0, 8.0), loads=loads)


def test_the_first_load_is_compared_with_a_read_and_later_ones_are_reloads() -> None:
    """The saving excludes the time to write and read the weights. Without the model, the whole load is a bound."""
    seen = observed("GGUF weights are unpacked")
    [load] = conversion_findings(seen, [torch.nn.Linear(1024, 1024), None, None])
    assert 0 <= load.saves_s < 4.0
    [bound] = conversion_findings(seen, [None] * 3)
    found = judge_calls(seen, [], more=[bound])
    assert [(item.id, item.saves_s, item.basis) for item in found.findings] == [
        ("reloads", 8.0, "measured"),
        ("slow-load", 4.0, "at most"),
    ]
    assert list(conversion_findings(observed(""), [None] * 3)) == []


# At this low bandwidth only bytes count. The others are the overhead of a prefill and of a decode step.
BYTES_PER_S, PREFILL_S, DECODE_S = 1e6, 5.0, 2.0
CALL = generate(0, 60.0)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    ceilings = CeilingSet("here", BYTES_PER_S, {"float32": 1e18})
    monkeypatch.setattr("profiler.why_slow.floor.here_ceilings", lambda *_, **__: ceilings)
    monkeypatch.setattr("profiler.why_slow.floor.least_overhead_s", lambda *_: (PREFILL_S, DECODE_S))
    return tiny_llama(num_hidden_layers=2, tie_word_embeddings=False)


def floor_of(model: Any, *calls: Call) -> CallFloor:
    return floor_of_calls(calls, {"Llama": subject_of(model)}, {})


def test_a_generate_is_a_prefill_and_a_step_per_further_token(model: Any) -> None:
    """8 tokens and 4 new ones need a prefill, and three steps with 8, 9 and 10 tokens in the cache."""
    found = floor_of(model, CALL)
    assert found.overhead_s == pytest.approx(PREFILL_S + 3 * DECODE_S)
    # In float32, a step reads all weights but the embedding table. A token has 2 layers x 2 x 32 keys and values.
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 32 * 64
    # A prefill reads no cache; a step reads it, including its own token.
    kv = 2 * 2 * 32 * (8 + 8 + 9 + 10 + 3)
    device_s = 4 * (4 * weights + kv + 11 * 32 + 4 * 64) / BYTES_PER_S
    assert found.seconds == pytest.approx(device_s + found.overhead_s, rel=0.02)


def test_a_generate_with_a_cache_computes_only_the_tokens_that_it_lacks(model: Any) -> None:
    """6 of 8 tokens are in the cache: the first step computes 2, as a forward does that gets only these."""
    kept = floor_of(model, replace(CALL, context_len=6, new_tokens=1))
    forward = replace(CALL, kind="forward", prompt_len=2, context_len=6, new_tokens=0)
    assert kept.seconds == pytest.approx(floor_of(model, forward).seconds)
    assert kept.seconds < floor_of(model, replace(CALL, new_tokens=1)).seconds


def test_repeated_work_of_a_faulty_script_is_not_in_its_floor(model: Any) -> None:
    """A half-padded prompt of 16 tokens, and a loop without a cache over 8 to 11 tokens, need the same tokens."""
    expected_s = floor_of(model, CALL).seconds
    padded = replace(CALL, prompt_len=16, padding=0.5)
    assert floor_of(model, padded).seconds == pytest.approx(expected_s)
    loop = [replace(CALL, kind="forward", prompt_len=8 + step, new_tokens=0) for step in range(4)]
    assert floor_of(model, *loop).seconds == pytest.approx(expected_s)


def test_overhead_overlaps_with_a_gpu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host runs ahead, a step takes the longer of 0.08 s on the device and 2 s on the host."""
    ahead = SimpleNamespace(device=torch.device("cpu"), clock=SimpleNamespace(ahead=True))
    monkeypatch.setattr("profiler.why_slow.floor.machine_for", lambda _: ahead)
    assert floor_of(model, CALL).seconds == pytest.approx(PREFILL_S + 3 * DECODE_S)


IDS = torch.ones(4, 8, dtype=torch.long)
MEMORY, COMPUTE = (1.0, {"float32": 1e18}), (1e18, {"float32": 1.0})
"""(bytes/s, FLOP/s) of a device on which only one of them counts."""


def generated(model: Any, ids: torch.Tensor = IDS[:1], **options: Any) -> None:
    model.generate(ids, max_new_tokens=4, do_sample=False, **options)


HALF = torch.tensor([[0] * 4 + [1] * 4] * 4)
HEAD, LAYER = 4096 * 32, 4 * 32 * 32 + 3 * 32 * 64


@pytest.mark.parametrize(
    ("change", "ceilings", "run", "about", "room"),
    [
        # A step of four beams reads the weights once, and computes four times as much.
        ("beams", MEMORY, partial(generated, num_beams=4), 0.0, 0.1),
        ("beams", COMPUTE, partial(generated, num_beams=4), 0.75, 0.01),
        # Four prompts of one length: a batch reads a quarter of the weights, and computes as much.
        ("one-by-one", MEMORY, lambda model: [generated(model, ids) for ids in IDS.split(1)], 0.75, 0.05),
        ("one-by-one", COMPUTE, lambda model: [generated(model, ids) for ids in IDS.split(1)], 0.0, 0.01),
        # Half of 8 tokens is padding; three of the four steps compute one token per row, with it or without.
        ("padding", MEMORY, partial(generated, ids=IDS, attention_mask=HALF), 0.0, 0.1),
        ("padding", COMPUTE, partial(generated, ids=IDS, attention_mask=HALF), 4 / (8 + 3), 0.02),
        # At 8 positions 7 of 8 rows of the head are not read; the layer's weights are needed for all 8.
        ("all-logits", COMPUTE, lambda model: model(IDS).logits[:, -1].argmax(-1).tolist(),
         7 * HEAD / (8 * HEAD + 8 * LAYER), 0.01),
    ],
)  # fmt: skip
def test_a_change_saves_what_the_ceilings_say(
    change: str, ceilings: Any, run: Any, about: float, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the wide model is in its weights: 32 times more of them than keys and values of a short text."""
    monkeypatch.setattr("profiler.why_slow.floor.here_ceilings", lambda *_, **__: CeilingSet("here", *ceilings))
    monkeypatch.setattr("profiler.why_slow.floor.least_overhead_s", lambda *_: (0.0, 0.0))
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    model = tiny_llama(**{"vocab_size": 4096} if change == "all-logits" else wide)
    subjects = {"LlamaForCausalLM": subject_of(model)}
    found = changes_to(lambda: run(model), lambda recorder: floor_of_calls(recorder.seen("s.py").calls, subjects, {}))
    assert found[change].about == pytest.approx(about, abs=room)


CEILINGS = CeilingSet("a device, measured", 1e9, {"float32": 1e12})


def times_of(model: Any, run: Any) -> ModuleTimes:
    [group] = groups_of(run)
    found = module_times(group, lambda _: True, Subject(walk(model), CEILINGS, "float32", None, overlaps=False))
    assert found is not None
    return found


def test_the_ceilings_are_those_of_the_shapes() -> None:
    """up_proj [64, 32]: 8,192 bytes of weights at 1 GB/s. Attention: keys and values of 2 x 2 heads x 8 x 16."""
    model = tiny_llama()
    found = times_of(model, lambda: model(IDS[:2], use_cache=False))
    assert found.ceiling_s["model.layers.0.mlp.up_proj"] == pytest.approx(8192e-9)
    assert found.ceiling_s["model.layers.0.self_attn"] == pytest.approx(2 * 2 * 2 * 8 * 16 * 4 * 1e-9)
    assert sum(found.own_s.values()) <= found.group.seconds


class Takes(torch.nn.Module):
    """A module that takes so many seconds at its first call, and at later ones. Only modules turn its clock."""

    def __init__(self, clock: Mock, first_s: int, later_s: int) -> None:
        super().__init__()
        self.clock, self.seconds = clock, itertools.chain([first_s], itertools.repeat(later_s))

    def forward(self, ids: Any) -> Any:
        self.clock.mark.return_value += next(self.seconds) * 10**9
        return ids


@pytest.mark.parametrize(("own_call_s", "named"), [(31.0, {"Slower": 19.0, "Takes": 12.0}), (17.0, {"Slower": 19.0})])
def test_noise_of_a_repeated_prompt_is_not_multiplied(own_call_s: float, named: dict[str, float]) -> None:
    """Four tokens stand for ten: 3 + 9 x 1 s and 1 + 9 x 2 s. The prompt of the difference is not run: it is the same.

    If the script's own call took 14 s less than the repetition, 12 s are within the noise.
    """
    clock, slower = Mock(wraps=Clock(), ahead=False), type("Slower", (Takes,), {})
    clock.mark.return_value = 0
    model = torch.nn.Sequential(Takes(clock, 3, 1), slower(clock, 1, 2))
    parts = Run(Mock(side_effect=AssertionError), weight=-2.0), Run(lambda: [model(1) for _ in range(4)], weight=3.0)
    call = replace(generate(0, own_call_s), new_tokens=10)
    group: Any = SimpleNamespace(
        model=model, calls=[call], middle=(call, SimpleNamespace(clock=clock)), seconds=31.0,
        repeated=lambda: Run(lambda: None, shortened=lambda _: parts),
    )  # fmt: skip
    found = module_times(group, lambda seconds: not seconds)
    assert found is not None
    assert {each.name: each.beyond_s for each in found.slowest()} == pytest.approx(named)


SEEN = script(12.0, generate(0, 10.0))


def test_reading_weights_is_that_of_a_part_if_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 weights of 4 bytes take 2 s; a quarter of them takes as long, so that all take 8 s."""
    model = torch.nn.Linear(8, 8, bias=False)
    monkeypatch.setattr(costs, "now_s", Mock(side_effect=[0.0, 2.0, 5.0, 7.0]))
    assert costs.read_weights_s(model) == 2.0
    monkeypatch.setattr(costs, "_MOST_BYTES", 64)
    assert costs.read_weights_s(model) == 8.0
    monkeypatch.setattr(costs.tempfile, "TemporaryDirectory", Mock(side_effect=OSError("No space left on device")))
    assert costs.read_weights_s(model) is None


@pytest.mark.parametrize(
    ("trials", "not_tried", "floor_s", "start", "share"),
    [
        (2, (), 8.0, "Nothing to change of 2 tried: 80 %", ""),
        (2, (), 4.0, "Nothing to change of 2 tried, and the floor is", "40 %"),
        (0, (), 4.0, "Nothing to change, and the floor is", "40 %"),
        (1, ("dtype: no memory",), 4.0, "Nothing was found in 1 trial, and others could not be made", ""),
        (0, ("dtype: no memory",), 4.0, "Nothing could be tried", ""),
    ],
)
def test_an_answer_without_a_finding_says_what_was_tried(
    trials: int, not_tried: tuple[str, ...], floor_s: float, start: str, share: str
) -> None:
    """The calls take 10 s; from 70 % of that on, the floor is near."""
    *_, last = why_sentences(Why(SEEN, (), CallFloor(floor_s, 0.1), (tried(0.0, 0),) * trials, not_tried))
    assert last.startswith(start)
    assert share in last


@pytest.mark.parametrize(("code_s", "is_named"), [(6.0, True), (2.0, False)])
def test_the_scripts_own_code_is_named_if_it_takes_longer_than_a_finding_saves(code_s: float, is_named: bool) -> None:
    lines = (OwnLine("s.py:7", "pick", "difflib.get_close_matches", code_s / 2), OwnLine("s.py:8", "", "", code_s / 2))
    seen = replace(SEEN, wall_s=20.0, own_lines=lines)
    imports = replace(seen, wall_s=400.0, waited_s=20.0)
    for each in (seen, imports):
        first = why_sentences(judge_calls(each, [], CallFloor(1.0, 0.1)))[0]
        assert ("own code takes 6.00 s" in first and "s.py:7" in first) == is_named


@pytest.mark.parametrize(("code_s", "has_torch", "lines"), [(8.0, True, 2), (0.9, True, 0), (8.0, False, 0)])
def test_a_script_without_a_language_model_has_its_most_expensive_line(
    code_s: float, has_torch: bool, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of the code's time are at s.py:7. Other code that is compiled again is no call of a model."""
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch")
    code = OwnLine("s.py:7", "rank", "torch.Module._call", 0.75 * code_s), OwnLine("s.py:8", "", "", 0.25 * code_s)
    seen = script(20.0, own_lines=code, recompilations=(Recompilation(1.0, "another size"),))
    recorder: Any = SimpleNamespace(seen=lambda *_, **__: seen, foreign=Mock(cores=lambda: None))
    found = explained(recorder, "s.py")
    sentences = why_sentences(found) if found else []
    assert len(sentences) == lines
    if sentences:
        where = "6.00 s of it at s.py:7, in rank: torch.Module._call"
        assert sentences[0] == f"The script's own code takes 8.00 s of 8.00 s without imports, {where}."
        assert sentences[1].startswith("s.py called no language model in its own process")


def test_a_slow_module_is_named_on_a_busy_machine() -> None:
    """The convolution takes 6 of 10 s of the calls, besides 36 s of waits, which the second sentence names once."""
    slow = SlowModule("Conv", "tower.conv", "own.py:3", 6.0, 0.0, "s.py:4")
    busy = replace(SEEN, wall_s=48.0, waited_s=36.0)
    for seen, words in ((SEEN, ";"), (busy, ", without the 36.0 s in which the script waited for a core;")):
        first, second, *_ = why_sentences(judge_calls(seen, [], CallFloor(1.0, 0.1), modules=[slow]))
        assert first.startswith("Conv (tower.conv, own.py:3) takes 6.00 s of 10.0 s beyond its ceiling")
        assert second.startswith(f"s.py spent 10.0 s in 1 call of generate{words}")


@pytest.mark.slow
@pytest.mark.parametrize("is_slow", [True, False], ids=["slow", "fast"])
def test_a_slow_tower_is_named_in_the_first_sentence(is_slow: bool, tmp_path: Path) -> None:
    """256 patches go one by one through a convolution, or together. The floor counts the tower either way."""
    source = SCRIPTS["slow_tower"]
    fault = "patch_embed.proj.__class__ = SlowConv3d"
    assert fault in source
    script = tmp_path / "tower.py"
    script.write_text(source if is_slow else source.replace(fault, "patch_embed.proj.__class__ = nn.Conv3d"))
    found = explained(run_watched(script, tmp_path), "tower.py", budget_s=60.0)
    assert found.floor.left_out == ()
    first = why_sentences(found)[0]
    assert first.startswith("SlowConv3d (model.visual.patch_embed.proj, tower.py:") == is_slow
    assert ("visual" in first) == is_slow


def test_an_encoder_is_outside_of_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a step is that of the decoder; the encoder's ceiling is added, or the answer leaves it out in
    words."""
    monkeypatch.setattr("profiler.why_slow.floor.here_ceilings", lambda *_, **__: CEILINGS)
    monkeypatch.setattr("profiler.why_slow.floor.least_overhead_s", lambda *_: (0.0, 0.0))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).eval()
    subject = subject_of(model)
    assert "encoder" in subject.outside
    assert not [item.name for item in subject.work.operators if item.name.startswith("encoder.")]
    times = times_of(model, lambda: model.generate(IDS[:2], max_new_tokens=3, do_sample=False))
    encoder_s = times.ceiling_within(("encoder.",))
    assert encoder_s >= 8192e-9  # one matrix of 32 x 64
    without, with_encoder = (
        floor_of_calls(times.group.calls, {"T5ForConditionalGeneration": subject}, {0: more_s})
        for more_s in (None, encoder_s)
    )
    assert with_encoder.seconds - without.seconds == pytest.approx(encoder_s)
    assert ("encoder" in without.left_out, with_encoder.left_out) == (True, ())


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_picture_has_the_floor_of_its_patches_or_none(is_counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 x 32 pixels are 16 patches of 8 x 8, which attend with a class token; only that is classified."""
    monkeypatch.setattr("profiler.why_slow.floor.here_ceilings", lambda *_, **__: CeilingSet("here", *COMPUTE))
    if not is_counted:
        monkeypatch.setattr("profiler.why_slow.trials.module_times", lambda *_: None)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)).eval()
    recorder = recorded(lambda: [model(pixel_values=torch.rand(2, 3, 32, 32)) for _ in range(8)])
    monkeypatch.setattr(trials, "try_changes", lambda *_: [])
    found = explained(recorder, "s.py")
    assert call_rows(found)[0][1:3] == ["8", "forward 2"]
    layer = 2 * 17 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 17**2 * 32
    picture = 2 * 16 * 3 * 8**2 * 32 + 2 * layer + 2 * 32 * 10
    floor = (found.floor.seconds, found.floor.overhead_s) if found.floor else None
    assert floor == ((pytest.approx(16 * picture), None) if is_counted else None)
