"""The script's own lines by samples, and what `generate` runs at every token, by its class and its lines."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from planted_faults import generate, recorded, script, tiny_llama, tried

from profiler.why_slow.findings import judge_calls
from profiler.why_slow.observations import Observations
from profiler.why_slow.render import time_parts

IDS = torch.ones(1, 8, dtype=torch.long)
FEW = {"max_new_tokens": 4, "do_sample": False}
NAP_S = 0.06


def line_of(function: Callable[..., Any], after: int = 1) -> str:
    return f"test_own_lines.py:{function.__code__.co_firstlineno + after}"


def nap(*_: object, **__: object) -> None:
    time.sleep(NAP_S)


def busy() -> None:
    """Four milliseconds of Python alone, less than Python's usual turns of threads."""
    until_s = time.perf_counter() + 0.004
    while time.perf_counter() < until_s:
        pass


def seen_in(run: Callable[[], object]) -> Observations:
    return recorded(run).seen("s.py")


@pytest.mark.parametrize(("code", "times"), [(nap, 4), (busy, 200)])
def test_code_between_forwards_is_named_by_its_line(code: Callable[[], None], times: int) -> None:
    model = tiny_llama()

    def run() -> None:
        for _ in range(times):
            model(IDS)
            code()

    # A bar of tqdm leaves such a thread behind.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    seen = seen_in(run)
    first, *others = [part for part in time_parts(judge_calls(seen, [])) if part.own_code]
    assert f", in {code.__name__}" in first.what
    assert first.seconds > 2 * sum(part.seconds for part in others)
    assert sum(line.seconds for line in seen.own_lines if line.function == code.__name__) > 0.03


def test_a_line_has_what_it_calls_in_a_library() -> None:
    def run() -> None:
        threading.Event().wait(2 * NAP_S)

    [line] = [line for line in seen_in(run).own_lines if line.where == line_of(run)]
    assert line.words == f"{line_of(run)}, in {run.__qualname__}: threading.Event.wait"
    assert line.seconds > NAP_S / 2


def in_two_lines() -> None:
    time.sleep(NAP_S)
    time.sleep(3 * NAP_S)


class Made(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nap()


def test_lines_of_a_function_are_added_and_making_a_model_is_no_code_of_the_script() -> None:
    """`in_two_lines` sleeps for 4 naps, 3 of them at its second line; a constructor sleeps for 2."""
    seen = seen_in(lambda: [in_two_lines(), Made(), Made()])
    [line] = [line for line in seen.own_lines if line.function in ("in_two_lines", "nap")]
    assert line.where == line_of(in_two_lines, 2)
    assert line.seconds > 3.5 * NAP_S
    assert seen.making_s > NAP_S
    assert [part.own_code for part in time_parts(judge_calls(seen, [])) if part.what == "making models"] == [False]


def test_code_in_a_models_call_and_waits_for_one_are_no_code_of_the_script() -> None:
    model = tiny_llama()
    model.register_forward_pre_hook(nap)

    def run() -> None:
        model(IDS)
        thread = threading.Thread(target=model, args=(IDS,))
        thread.start()
        thread.join()

    lines = [line for line in seen_in(run).own_lines if line.function in (run.__qualname__, "nap")]
    assert sum(line.seconds for line in lines) < NAP_S


def allowed(_row: int, ids: torch.Tensor) -> list[int]:
    nap()
    return [int(ids[-1]), 5]


class Stops:
    def __call__(self, ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        nap()
        return torch.zeros(len(ids), dtype=torch.bool)


def biased(_by: float, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    nap()
    return scores


class Prints:
    def put(self, _tokens: torch.Tensor) -> None:
        nap()

    def end(self) -> None:
        pass


CALLBACKS: dict[str, tuple[dict[str, Any], str, Callable[..., Any]]] = {
    # options of generate, words, and the script's function
    "a function of allowed tokens": (
        {"prefix_allowed_tokens_fn": allowed},
        "PrefixConstrainedLogitsProcessor (prefix_allowed_tokens_fn) at every token, with allowed in it", allowed,
    ),
    "a criterion": ({"stopping_criteria": [Stops()]}, "your Stops at every token", Stops.__call__),
    "a partial function": ({"logits_processor": [partial(biased, 2.0)]}, "your biased at every token", biased),
    "a streamer": ({"streamer": Prints()}, "your Prints at every token", Prints.put),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLBACKS)
def test_what_generate_runs_at_every_token_has_its_seconds_and_the_line_of_the_script(kind: str) -> None:
    """`nap` sleeps for each of the 4 tokens, within what is named; a sleep on a busy machine ends with a wait."""
    options, words, function = CALLBACKS[kind]
    model = tiny_llama()
    seen = seen_in(lambda: model.generate(IDS, **FEW, **options))
    [finding] = judge_calls(seen, []).findings
    assert finding.evidence == f"generate runs {words}"
    assert finding.where == line_of(function, 0)
    assert 0.9 * 4 * NAP_S <= finding.saves_s <= seen.calls_s
    assert not [line for line in seen.own_lines if line.function == "nap"], "callbacks are no code between calls"


@pytest.mark.parametrize(("seconds", "is_found"), [(2.0, True), (0.5, False)])
def test_an_option_that_takes_a_tenth_of_the_time_is_named(seconds: float, is_found: bool) -> None:
    """Sampling as such is wanted. What trials leave out stays: half of the rest of 10 s is saved."""
    at_tokens = {"NoBadWordsLogitsProcessor": seconds, "TopPLogitsWarper": 3.0}
    seen = script(10.0, generate(0, 10.0, processors_s=at_tokens, callbacks_s={"Prints": 1.0}, left_out_s=1.0))
    findings = {item.id: item for item in judge_calls(seen, [tried(0.5, 0)]).findings}
    assert findings["grad-on"].saves_s == pytest.approx(4.5)
    found = findings["callbacks"]
    option = "NoBadWordsLogitsProcessor (bad_words_ids) and "
    assert found.evidence == f"generate runs {option if is_found else ''}your Prints at every token"
    assert found.saves_s == 1.0 + seconds * is_found
    assert found.change.startswith("shorten the list" if is_found else "do less in it")


def test_what_generate_needs_anyway_is_no_finding() -> None:
    model = tiny_llama()
    assert judge_calls(seen_in(lambda: model.generate(IDS, **FEW)), []).findings == ()
