"""Changes are tried by their lines: each does what it says, is timed in turn, and is undone."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from small_models import small_model
from subjects import subject_of
from transformers import GPT2Config, GPT2LMHeadModel

from profiler.errors import RequestError
from profiler.facts.change_ids import ChangeId
from profiler.facts.measurements import NotTried, StepSamples, Trial
from profiler.grid.ranges import make_grid
from profiler.loading.changes import UNWINDOWED, Change, Circumstances, possible_changes
from profiler.loading.load import load
from profiler.loading.request import DTYPES, ModelRequest
from profiler.measure import trials
from profiler.measure.short_model import pattern_of, shortened, stack_of
from profiler.measure.subject import Subject
from profiler.measure.trial_queue import in_turn
from profiler.measure.trials import Switch, arguments_of, circumstances_here, try_changes

CPU = Circumstances(on_gpu=False, dtype="float32", threads=2)
TWO_CELLS = make_grid([6], [1, 2], 8)
Model = tuple[Subject, Any]
"""A loaded model and its config."""


@pytest.fixture(autouse=True)
def no_time_decides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, any change may look slow after one turn, or like the best one. Planted times may decide."""
    if "planted" not in request.fixturenames:
        monkeypatch.setattr(trials, "_SLOWER", math.inf)
        monkeypatch.setattr(trials, "_AN_UNKNOWN_SAVES", 1.0)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[ChangeId, float]:
    """How many times as long a prefill and a step take with each change; no model is called."""
    times: dict[ChangeId, float] = {}

    def call(side: trials.Side, ids: torch.Tensor, new_tokens: int) -> trials.Call:
        forward_s = times[side.change.id] if side.change else 1.0
        forward, none = StepSamples((forward_s,), (0.0,)), StepSamples((), ())
        return trials.Call(forward, forward if new_tokens > 1 else none, ids, forward_s, 0.0)

    monkeypatch.setattr(trials.Side, "call", call)
    return times


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("mixture")
    small_model("Qwen3Moe").save_pretrained(folder)
    return subject_of(str(folder), new_tokens=8)


@pytest.fixture
def two_cells(mixture: Model) -> Model:
    return replace(mixture[0], grid=TWO_CELLS), mixture[1]


def changes_of(model: Model, *ids: ChangeId) -> list[Change]:
    """All changes that are possible here, or those of `ids`."""
    subject, _ = model
    found = possible_changes(circumstances_here(subject, replace(CPU, experts=subject.experts)))
    return [change for change in found if change.id in (ids or ChangeId)]


def tried(model: Model, changes: list[Change], step_s: float = 1e-4, **more: Any) -> list[Any]:
    subject, config = model
    seconds = {key: step_s for cell in subject.grid.cells for key in cell.keys}
    return list(try_changes(subject, config, seconds, changes, 60.0, **more))


STATES: dict[ChangeId, Callable[[Any], object]] = {
    ChangeId.THREADS: lambda model: torch.get_num_threads(),
    ChangeId.EAGER_ATTENTION: lambda model: model.config._attn_implementation,
    ChangeId.EXPERTS: lambda model: model.config._experts_implementation,
    ChangeId.COMPILED_FORWARD: lambda model: model.forward,
    ChangeId.UNWINDOWED: lambda model: model.config.sliding_window,
    ChangeId.WITHOUT_CUDNN: lambda model: torch.backends.cuda.cudnn_sdp_enabled(),
    ChangeId.REPEATED_HEADS: lambda model: transformers.integrations.sdpa_attention.use_gqa_in_sdpa,
}
"""What the statement of each change sets."""


def test_a_statement_does_what_it_says_and_is_undone(mixture: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if what is measured fails."""
    subject, _ = mixture
    monkeypatch.setattr(subject.loaded.config, "sliding_window", 4)
    model, threads = subject.loaded.module, torch.get_num_threads()
    gpu = replace(CPU, on_gpu=True, capability=7.5, kernel="math", grouped_heads=True, dtype="float16")
    cudnn = replace(gpu, capability=9.0, kernel="cudnn", dtype="bfloat16")
    here = replace(CPU, threads=threads, cores=threads + 1, experts=subject.experts)
    found = {change.id: change for each in (here, gpu, cudnn) for change in possible_changes(each) if change.statement}
    found |= {UNWINDOWED.id: UNWINDOWED}
    assert found.keys() == STATES.keys()
    for change in found.values():
        state = STATES[change.id]
        before = state(model)
        with suppress(KeyboardInterrupt), Switch(change, model).on():
            assert state(model) != before, change.line
            raise KeyboardInterrupt
        assert state(model) == before, change.line


def test_the_arguments_of_a_line_are_those_with_which_the_profiler_loads(mixture: Model) -> None:
    """A checkpoint is loaded by from_pretrained with the line's own arguments."""
    subject, config = mixture
    for change in (change for change in changes_of(mixture) if change.loads):
        arguments = arguments_of(change.loading)
        assert arguments["dtype"] is DTYPES[change.dtype]
        if change.id is ChangeId.FORMAT:
            request = replace(subject.request, dtype=DTYPES[change.dtype], quant=change.value)
            own = load(request, config).module.config.quantization_config
            assert arguments["quantization_config"].to_dict() == own.to_dict()


def test_a_checkpoint_is_loaded_with_the_line(mixture: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    spied = Mock(side_effect=transformers.PreTrainedModel.from_pretrained.__func__)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(spied))
    [bfloat16] = [change for change in changes_of(mixture) if change.value == "bfloat16"]
    found = tried(mixture, [bfloat16])
    assert [trial.key.phase for trial in found] == ["prefill", "decode"]
    assert [call.kwargs["dtype"] for call in spied.call_args_list] == [torch.float32, torch.bfloat16]


def test_no_side_always_comes_first() -> None:
    ran: list[str] = []
    pairs = in_turn(lambda: ran.append("plain"), lambda: ran.append("changed"), lambda pairs: len(pairs) == 3)
    assert ran == ["plain", "changed", "changed", "plain", "plain", "changed"]
    assert len(pairs) == 3


def test_both_phases_are_timed_in_turn_and_tokens_compared(mixture: Model) -> None:
    model = mixture[0].loaded.module
    attributes = set(vars(model))
    changes = changes_of(mixture, ChangeId.STATIC_CACHE, ChangeId.EAGER_ATTENTION)
    found = tried(mixture, changes)
    timed = {(trial.line, trial.key.phase) for trial in found}
    assert timed == {(change.line, phase) for change in changes for phase in ("prefill", "decode")}
    for trial in found:
        assert (trial.layers, trial.of_layers) == (1, 2), "the first layer after the head runs cold"
        assert (trial.tokens, trial.same_tokens) == (8, 8)
        # of 8 tokens the first is the prefill's, and three steps are warm; each call is followed by two prefills
        assert len(trial.before.layers_s) == len(trial.after.layers_s) == 3 * (3 if trial.key.phase == "prefill" else 4)
    assert set(vars(model)) == attributes, "transformers keeps the static cache on the model"


def test_what_fails_is_left_out_and_said(mixture: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported request is no failure."""
    broken = Change(ChangeId.THREADS, "a misspelt switch", statement="torch.set_num_thread(1)", undoing="pass")
    refused = Change(ChangeId.DTYPE, "other weights", loading="dtype=torch.float16", value="float16", dtype="float16")
    failed: list[str] = []

    def load_plain(request: ModelRequest, config: Any) -> Any:
        if request.dtype is torch.float16:
            raise RequestError("no such weights")
        return load(request, config)

    monkeypatch.setattr(trials, "load", load_plain)
    assert tried(mixture, [broken, refused], on_failure=lambda name, _: failed.append(name)) == []
    assert failed == ["a misspelt switch"]


@pytest.mark.parametrize(("times", "turns", "cells"), [(1.4, 3, 2), (1.6, 1, 1)])
def test_a_clearly_slower_change_has_one_turn_at_one_cell(
    two_cells: Model, planted: dict[ChangeId, float], times: float, turns: int, cells: int
) -> None:
    planted[ChangeId.EAGER_ATTENTION] = times
    found = tried(two_cells, changes_of(two_cells, *planted))
    assert [len(trial.after.layers_s) for trial in found if trial.key.phase == "decode"] == [turns] * cells


@pytest.mark.parametrize(("times", "confirmed"), [(0.9, ["a static cache"]), (0.97, [])])
def test_what_saves_most_is_confirmed_on_the_whole_model(
    two_cells: Model, planted: dict[ChangeId, float], times: float, confirmed: list[str]
) -> None:
    """At the smallest cell; unless it saves less than a twentieth of the step."""
    planted |= {ChangeId.STATIC_CACHE: times, ChangeId.EAGER_ATTENTION: 0.98}
    found = tried(two_cells, changes_of(two_cells, *planted))
    whole = [trial for trial in found if trial.layers == trial.of_layers and trial.key.phase == "decode"]
    assert [trial.form for trial in whole] == confirmed
    assert all(trial.key.cell == TWO_CELLS.cells[0] for trial in whole)


def test_what_has_no_time_is_named_with_its_need(mixture: Model) -> None:
    """Seven calls of a prefill and eight steps, and twelve prefills more, of an hour each take 75 hours."""
    [eager] = changes_of(mixture, ChangeId.EAGER_ATTENTION)
    [found] = tried(mixture, [eager], step_s=3600.0)
    assert found == NotTried("eager attention", eager.line, ChangeId.EAGER_ATTENTION, pytest.approx(75 * 3600))


def test_what_promises_most_per_second_is_tried_first_and_nothing_twice(mixture: Model) -> None:
    changes = changes_of(mixture, ChangeId.EXPERTS, ChangeId.STATIC_CACHE)
    found = tried(mixture, changes, savings_s={(ChangeId.EXPERTS, "eager"): 1.0})
    assert found[0].form == "eager experts"
    assert tried(mixture, changes, earlier=found) == []


def test_calls_stay_within_a_table_of_positions(tmp_path: Path) -> None:
    """GPT-2's table has 64 rows, and the cell's 59 + 5 tokens take all of them."""
    config = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, vocab_size=100)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model, failed = subject_of(str(tmp_path), prompt_lens=[59], batch_sizes=[1], new_tokens=5), list[str]()
    changes = [change for change in changes_of(model) if not change.preparing_s and not change.loads]
    found = tried(model, changes, on_failure=lambda name, _: failed.append(name))
    assert failed == []
    assert "eager attention" in {trial.form for trial in found if isinstance(trial, Trial)}


@pytest.mark.parametrize(("kind", "layers"), [("Llama", 5), ("Gemma3", 18), ("DeepseekV2", 4)])
def test_a_short_model_holds_every_kind_of_layer_and_a_longer_one_has_more_of_them(kind: str, layers: int) -> None:
    """Gemma 3 attends fully in every sixth layer, and the first of DeepSeek's has no experts."""
    model = small_model(kind, num_hidden_layers=layers)
    pattern = pattern_of(model, model.config)
    assert pattern is not None
    assert pattern.layers == layers
    short = pattern.first + pattern.period
    assert short < pattern.long(0) <= pattern.long(1000) == layers

    def kinds(of: Any) -> set[tuple[object, ...]]:
        attention = getattr(model.config, "layer_types", None) or ["full_attention"] * layers
        stack = stack_of(of, of.config) or ()
        return {(attention[number], type(layer.mlp)) for number, layer in enumerate(stack)}

    for length in (short, pattern.long(0)):
        cut = type(model)(shortened(model.config, length))
        assert len(stack_of(cut, cut.config) or ()) == length
        assert kinds(cut) == kinds(model)
        with torch.inference_mode():
            assert cut(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 128)
    assert len(stack_of(model, model.config) or ()) == layers, "the model itself is not cut"
