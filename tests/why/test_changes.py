"""Changes, each on the smallest model where it applies; the script's model stays as it was."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hurry import with_effort
from loaded import loaded
from planted_faults import LowRank, changes_to, groups_of, tiny_llama, with_linears
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, ViTConfig, ViTForImageClassification

import profiler
from profiler.device.clock import now_s
from profiler.measure.linears import dense_copies, packed_linears, replaced
from profiler.why_slow import change_registry, trials
from profiler.why_slow.findings import TRIALS_SHARE, TriedChange, Untried, is_settled, pairs_agree
from profiler.why_slow.model_changes import unmerged_adapters
from profiler.why_slow.observations import Call, CallSettings
from profiler.why_slow.repeat_call import Candidate, RepeatedCall, Run
from profiler.why_slow.trials import TrialPlan, plan_trial, run_trial
from profiler.why_slow.watched_calls import GENERATE, GENERATE_BATCH

IDS = torch.ones(2, 8, dtype=torch.long)
LINEARS_OF_A_LAYER = 7


class WordLinear(nn.Module):
    """A linear of 4-bit integers in words of 32 bits, as in GPTQ, that unpacks them in every call."""

    def __init__(self, linear: nn.Linear, times: int = 1) -> None:
        super().__init__()
        self.in_features, self.out_features, self.times = linear.in_features, linear.out_features, times
        self.register_buffer("qweight", torch.zeros(linear.in_features // 8, linear.out_features, dtype=torch.int32))
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            parts = [(self.qweight >> (4 * place)) & 15 for place in range(8)]
            weight = torch.cat(parts, 0).to(x.dtype)
        return x @ weight


@pytest.mark.parametrize(
    ("name", "library"),
    [("WordLinear", "torch"), ("nf4", "bitsandbytes"), ("int8", "bitsandbytes"), ("int8wo", "torchao")],
)
def test_dense_linears_take_the_place_of_packed_ones(name: str, library: str, tiny_folder: Path) -> None:
    pytest.importorskip(library)
    if name == "WordLinear":
        model = with_linears(tiny_llama(num_hidden_layers=2), WordLinear)
    else:
        model = loaded(tiny_folder, torch.bfloat16, quant=name).module
    linears = packed_linears(model)
    assert [each.format for each in linears] == [name] * 2 * LINEARS_OF_A_LAYER
    before = [each.module for each in linears]
    copies = dense_copies(linears, model.dtype, 1e9)
    with torch.no_grad(), replaced(linears, copies):
        assert packed_linears(model) == [], "a dense model has none"
        assert model(IDS).logits.isfinite().all()
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
        assert model.model.layers[0].mlp.up_proj.weight.shape == (
            model.config.intermediate_size, model.config.hidden_size,
        )  # fmt: skip
    assert [each.module for each in packed_linears(model)] == before


def test_layers_share_dense_weights_where_memory_is_short() -> None:
    """With memory for half of the float32 weights, four layers share the dense weights of two."""
    linears = packed_linears(with_linears(tiny_llama(num_hidden_layers=4), WordLinear))
    weights = sum(each.module.in_features * each.module.out_features for each in linears)
    copies = dense_copies(linears, torch.float32, 4 * weights / 2)
    assert sum(copy.weight.numel() for copy in set(copies)) == weights / 2
    assert len(set(dense_copies(linears, torch.float32, 1.0))) == len({each.shape for each in linears})


@pytest.mark.ci
def test_a_slow_format_is_found_with_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with_effort(monkeypatch, script_floor=False, script_least_s=60.0, script_repeats=1)
    model = with_linears(tiny_llama(num_hidden_layers=2), partial(WordLinear, times=50))
    with profiler.why() as watching:
        model.generate(IDS, max_new_tokens=4, do_sample=False)
    first = watching.found.findings[0]
    assert first.id == "slow-format"
    assert "weights are packed (WordLinear), their kernel is aten::" in first.evidence
    assert isinstance(model.model.layers[0].mlp.up_proj, WordLinear), "the script's model is unchanged"


class Bottleneck(LowRank):
    """An adapter with an activation, which has no equal weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x).relu())


def test_what_has_no_equal_weight_is_no_adapter() -> None:
    assert list(unmerged_adapters(with_linears(tiny_llama(), Bottleneck))) == []
    assert len(list(unmerged_adapters(with_linears(tiny_llama(), LowRank)))) == LINEARS_OF_A_LAYER


def generate(model: Any, ids: torch.Tensor = IDS, **options: Any) -> None:
    model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, do_sample=False, **options)


def generate_each(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> None:
    for prompt in prompts:
        ids = torch.tensor([prompt])
        model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, **options})


@pytest.mark.parametrize(
    ("script", "change"),
    [
        (lambda model: generate(model, use_cache=False), "cache-off"),
        (lambda model: generate(model, output_scores=True, output_logits=True), "extra-outputs"),
        (lambda model: generate(model, num_beams=3, num_return_sequences=2), "beams"),
        (lambda model: generate(model, IDS[:1], assistant_model=tiny_llama()), "assistant"),
        (lambda model: generate_each(model, [[1, 2, 3]] * 4, do_sample=True), "one-by-one"),
        (lambda model: [model(IDS[:1, :length], use_cache=False) for length in range(3, 9)], "cache-off"),
    ],
)
def test_the_options_that_are_printed_are_those_that_ran(script: Callable[[Any], object], change: str) -> None:
    model = tiny_llama()
    found = changes_to(lambda: script(model))[change]
    ran: list[dict[str, Any]] = []
    for name in ("generate", "forward"):
        method = getattr(model, name)
        setattr(model, name, lambda *args, _of=method, **named: (ran.append(named), _of(*args, **named))[1])
    found.changed()
    printed = dict(re.findall(r"(\w+)=(\w+)", found.change))
    left_out = re.findall(r"leave out (\w+)", found.change)
    assert printed or left_out
    assert all(str(ran[0][name]) == value for name, value in printed.items())
    assert not set(left_out) & set(ran[0])


def state(model: Any) -> tuple[object, ...]:
    config = model.config
    head = model.get_output_embeddings().weight
    return model.training, config._attn_implementation, config._experts_implementation, head.requires_grad, model.dtype


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: tiny_llama().train(), "train-mode"),
        (lambda: tiny_llama(attn_implementation="eager"), "slow-attention"),
        (lambda: tiny_llama().requires_grad_(False), "frozen-weights"),
        (tiny_llama, "wide-dtype"),
    ],
)
def test_the_line_that_is_printed_is_the_one_that_ran(make: Callable[[], Any], change: str) -> None:
    """On another model, the printed code sets what the trial's model has."""
    model, by_hand = make(), make()
    seen: list[tuple[object, ...]] = []
    model.register_forward_pre_hook(lambda each, _args: seen.append(state(each)))
    found = changes_to(lambda: model(IDS))[change]
    seen.clear()
    with found.within(), torch.no_grad():
        found.changed()
    line = re.search(r"model\.(?:\w+\([^()]*\)\.?)+", found.change)
    eval(line[0], {"model": by_hand, "torch": torch})  # a change in place
    assert seen == [state(by_hand)] != [state(make())]


def test_trials_leave_a_model_and_torch_as_the_script_left_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the model is in eval mode, and the script has set its threads after the call."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(threads + 2)), raising=False)
    model = tiny_llama().train()
    model.model.layers[0].eval()
    found = changes_to(lambda: model(IDS))
    modes = [each.training for each in model.modules()]
    torch.set_num_threads(threads + 1)
    for name in ("train-mode", "threads"):
        with found[name].within():
            assert (torch.get_num_threads() == threads + 2) == (name == "threads")
            assert model.training == (name == "threads")
    assert ([each.training for each in model.modules()], torch.get_num_threads()) == (modes, threads + 1)
    torch.set_num_threads(threads)


def test_a_call_is_repeated_with_its_autocast_and_its_kernels_of_attention() -> None:
    """Only the change to attention enables the fused kernels, which the script has switched off."""
    model = tiny_llama()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            model(IDS)

    found = changes_to(run)["slow-attention"]
    seen: list[tuple[torch.dtype, bool]] = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda _module, _args, output: seen.append((output.dtype, torch.backends.cuda.flash_sdp_enabled()))
    )
    found.as_is()
    with found.within():
        found.changed()
    found.as_is()
    assert seen == [(torch.bfloat16, False), (torch.bfloat16, True), (torch.bfloat16, False)]
    assert (torch.is_autocast_enabled("cpu"), torch.backends.cuda.flash_sdp_enabled()) == (False, True)


def test_a_copy_of_the_model_lives_as_long_as_its_trial() -> None:
    model = tiny_llama()
    found = changes_to(lambda: model(IDS))["wide-dtype"]
    called: list[weakref.ref[Any]] = []
    model.register_forward_pre_hook(lambda module, _: called.append(weakref.ref(module)))  # which a copy has, too
    run_trial(plan_trial(found, 10.0), now_s() + 10.0)
    assert {module() for module in called} - {model} == {None}


def test_a_copy_in_another_dtype_gets_features_in_it() -> None:
    """The script passes sounds or images in the dtype of its model. The copy in bfloat16 gets them in bfloat16."""
    model = tiny_llama()
    found = changes_to(lambda: model(inputs_embeds=torch.randn(1, 4, 32)))["wide-dtype"]
    assert found.changed().logits.dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_no_copy_is_tried_of_a_model_whose_layers_run_functions() -> None:
    """The function of a layer's copy would compute with the weights of the script's own layer."""
    model, untried = tiny_llama(), Untried()
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **named: own(*args, **named)
    [group] = groups_of(lambda: model(IDS))
    assert "wide-dtype" not in {each.id for each in change_registry.candidates(group, untried)}
    assert any("forward was replaced by a function" in line for line in untried.lines(1.0))


DOCUMENT = list(range(1, 61)) + list(range(1, 21))
QUESTIONS = [[*DOCUMENT, *range(40, 40 + length)] for length in (4, 6, 5, 5)]


def test_a_document_is_computed_once_for_all_questions() -> None:
    """Prompts have 80 tokens of a document and about 5 of a question. Only the first has to compute the document."""
    model = tiny_llama()
    found = changes_to(lambda: generate_each(model, QUESTIONS))["shared-prefix"]
    # 84 + 86 + 85 + 85 tokens. The second question begins with the four tokens of the first, and so on.
    assert found.evidence == "74 % of the tokens of 4 prompts are those of the prompt before, computed again"
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 84, 4), torch.zeros(1, 2, 84, 4), 0)
    eval(found.change.split(": ")[1], {"past_key_values": cache, "n": 80})
    assert cache.get_seq_length() == 80
    computed: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _module, args, _output: computed.append(args[0].shape[1]))
    found.as_is()
    assert computed == [84, 1, 1, 86, 1, 1, 85, 1, 1, 85, 1, 1]
    found.changed()
    for _ in range(2):  # the cache is cropped for each run
        computed.clear()
        found.changed()
        assert computed == [84, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ([prompt[40:] for prompt in QUESTIONS], dict),
        (
            [[0] * 80 + prompt[80:84] for prompt in QUESTIONS],
            lambda: {"attention_mask": (torch.arange(84) > 79).long()[None]},
        ),
        ([DOCUMENT[: 64 + 8 * turn] for turn in range(3)], lambda: {"past_key_values": DynamicCache()}),
    ],
    ids=["few tokens", "padding", "a cache"],
)
def test_other_prompts_share_nothing(prompts: list[list[int]], options: Callable[[], dict[str, Any]]) -> None:
    model = tiny_llama()
    assert "shared-prefix" not in changes_to(lambda: generate_each(model, prompts, **options()))


def test_texts_are_tried_as_one_batch() -> None:
    """Six texts of 3 to 8 tokens, each with a mask and labels, become a batch of 6 x 8 padded on the right."""
    model = tiny_llama()

    def run() -> None:
        for length in (8, 3, 6, 4, 7, 5):
            ids = torch.arange(length)[None]
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)

    batched = changes_to(run)["one-by-one"]
    assert batched.evidence == "6 texts are passed one by one"
    assert "with an attention mask" in batched.change
    passed: list[dict[str, torch.Tensor]] = []
    model.register_forward_pre_hook(lambda _, args, named: passed.append(named), with_kwargs=True)
    assert batched.changed().logits.shape[:2] == (6, 8)
    [named] = passed
    assert set(named) == {"input_ids", "attention_mask"}
    assert named["attention_mask"].sum(1).tolist() == [8, 3, 6, 4, 7, 5]
    assert named["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_pictures_of_one_shape_are_tried_as_one_batch() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=16)).eval()
    pictures = torch.rand(3, 1, 3, 32, 32)
    stacked = changes_to(lambda: [model(pixel_values=each) for each in pictures])["one-by-one"]
    assert stacked.evidence == "3 pixel_values of one shape are passed one by one"
    alone = torch.cat([model(pixel_values=each).logits for each in pictures])
    torch.testing.assert_close(stacked.changed().logits, alone)
    further = torch.rand(1, 3, 64, 64)
    uneven = changes_to(lambda: [model(each, interpolate_pos_encoding=True) for each in [*pictures, further]])
    assert "one-by-one" not in uneven
    assert "one-by-one" not in changes_to(lambda: [model(torch.rand(2, 3, 32, 32)) for _ in range(3)])


@pytest.mark.parametrize(
    ("options", "change", "rows"),
    [
        ({"do_sample": True}, "pass num_return_sequences=4, and the prompt once", 4),
        ({"do_sample": True, "num_beams": 2}, "pass 4 at a time, padded on the left", 4),
        ({}, "pass it once, and use its answer again: without sampling, all are the same", 1),
    ],
)
def test_answers_to_one_prompt_are_computed_in_one_call(options: dict[str, Any], change: str, rows: int) -> None:
    """transformers refuses `num_return_sequences` without sampling, and more of them than beams."""
    model, ids = tiny_llama(), torch.ones(1, 8, dtype=torch.long)

    def once(**more: Any) -> Any:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, **options | more)

    found = changes_to(lambda: [once() for _ in range(4)])["one-by-one"]
    assert found.evidence == "the same prompt is passed 4 times, one by one"
    assert found.change == change
    assert len(found.changed()) == rows  # type: ignore[arg-type]
    if "num_return_sequences" in change:
        assert len(once(num_return_sequences=rows)) == rows


def test_prompts_of_a_model_that_is_loaded_again_are_no_batch() -> None:
    """A handler that loads the model for each request has no second prompt to batch."""
    ids = torch.ones(1, 4, dtype=torch.long)
    kept = [tiny_llama() for _ in range(4)]
    assert "one-by-one" not in changes_to(lambda: [model(ids) for model in kept])
    assert "one-by-one" not in changes_to(lambda: [tiny_llama()(ids) for _ in range(4)])
    assert "one-by-one" in changes_to(lambda: [kept[0](ids) for _ in range(4)])


SETTINGS = CallSettings(cache=False)


def planned(new_tokens: int, seconds: float = 1.0, prompt_s: float = 0.0, *, batched: bool = False) -> Run:
    call = Call(0, "generate", "Llama", 1, 8, 0, new_tokens, 1, seconds, "s.py:4", SETTINGS, prompt_s=prompt_s)
    noted: Any = SimpleNamespace(watched=GENERATE_BATCH if batched else GENERATE)
    return RepeatedCall(noted, call, tiny_llama).as_run


def candidate(seconds: float, new_tokens: int = 0, prompt_s: float = 0.0, **more: Any) -> Candidate:
    run = planned(new_tokens, seconds, prompt_s) if new_tokens else Run(lambda: None)
    group: Any = SimpleNamespace(seconds=100.0, calls=())
    return Candidate(group, "beams", "four beams", "one", "s.py:4", run, run, seconds, **more)


CANDIDATES = {
    "a forward": candidate(1.0),
    "a short forward": candidate(0.1),
    "a forward next to nothing else": candidate(1.0, alone=True),
    "a long generate": candidate(10.9, 100, prompt_s=1.0),
    "a generate of which much is its prompt": candidate(6.0, 16, prompt_s=4.0),
    "a compilation": candidate(2.0, 100, prompt_s=0.1, once_s=40.0),
}


def tried_with(
    candidates: Sequence[Candidate], budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Candidate], Untried]:
    """The candidates whose trials are begun within a budget, in this order, and what is left out."""
    ran, untried = list[Candidate](), Untried()

    def run(plan: TrialPlan, _deadline_s: float) -> TriedChange:
        ran.append(plan.candidate)
        return TriedChange(plan.candidate.id, (len(ran),), ((1.0, 0.5),) * 5, "", "", "", "")

    monkeypatch.setattr(trials, "run_trial", run)
    monkeypatch.setattr(trials, "candidates", lambda *_: candidates)
    done = trials.try_changes([candidates[0].group], 0.0, trials.now_s() + TRIALS_SHARE * budget_s, untried)
    assert len(done) == len(ran)
    return ran, untried


@pytest.mark.parametrize("tried", CANDIDATES.values(), ids=CANDIDATES)
def test_a_trial_is_begun_if_and_only_if_it_has_the_time_that_it_is_said_to_need(
    tried: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who gives the named budget gets the trial."""
    ran, untried = tried_with([tried], 0.0, monkeypatch)
    [needed_s] = untried.without_time.values()
    assert ran == []
    for factor in (0.98, 1.02, 2.0, 20.0):
        ran, untried = tried_with([tried], factor * needed_s / TRIALS_SHARE, monkeypatch)
        assert (ran, len(untried.without_time)) == (([tried], 0) if factor > 1 else ([], 1))


def test_a_call_that_has_no_time_is_tried_on_its_first_tokens() -> None:
    long = CANDIDATES["a long generate"]
    assert plan_trial(long, 10.0).tokens
    assert not plan_trial(long, 1000.0).tokens
    assert not plan_trial(replace(long, alone=True), 10.0).tokens
    assert not plan_trial(CANDIDATES["a forward"], 1.0).tokens
    # Each call starts a manager and plans a cache, so that few tokens take nearly as long as all.
    assert not planned(24, batched=True).shortened(4)


def test_what_saves_most_per_second_of_its_trial_is_tried_first_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of equal savings, the shorter trial comes first. A compilation waits until its stand-in has saved."""
    compiled = replace(CANDIDATES["a compilation"], id="uncompiled")
    long, short = candidate(9.0), candidate(0.5)
    stand_in = replace(candidate(2.0), id="uncompiled", stand_in="a graph", closer=(compiled,))
    ran, untried = tried_with([long, stand_in, short], 1000.0, monkeypatch)
    assert ran == [short, stand_in, long, compiled]
    assert untried.lines(1000.0) == []


def test_a_shortened_call_stands_for_all_of_its_tokens() -> None:
    """Without a cache, 9 tokens give the time of 101: 3 s of prompt, and steps of 0.5 s plus 1 ms per context token."""

    def run(_call: object, new_tokens: int, further: int = 0) -> float:
        steps = range(further + 1, further + new_tokens)
        return 3.0 + 0.02 * further + sum(0.5 + 0.001 * step for step in steps)

    seconds = [part.weight * run(None, *part.run.args) for part in planned(101).shortened(9)]  # type: ignore[attr-defined]
    assert sum(seconds) == pytest.approx(run(None, 101), rel=1e-3)


def test_some_forwards_stand_for_a_loop() -> None:
    """Six of 48 forwards of 1 to 48 s represent all 1176 s. A prompt and some steps represent a loop with a cache."""
    forwards = [Run(lambda second=second: second) for second in range(1, 49)]
    parts = Run.in_even_sequence(forwards).shortened(6)
    assert len(parts) == 6
    assert sum(part.weight * float(str(part.run())) for part in parts) == pytest.approx(1176.0, rel=0.03)
    cached = Run.with_steps(lambda steps: 5.0 + 0.5 * steps, 47)
    parts = cached.shortened(6)
    assert [part.run() for part in parts] == [5.0, 7.5]
    assert sum(part.weight * float(str(part.run())) for part in parts) == pytest.approx(float(str(cached())))


@pytest.mark.parametrize(
    ("savings", "settled", "agreed"),
    [
        ((0.4, 0.5, 0.4), True, True),
        ((0.4, 0.5, 0.2), False, True),
        ((0.11, 0.12, 0.13), True, True),
        ((0.05, 0.08, 0.1, 0.11), True, True),
        ((0.01, 0.02, 0.1, 0.2, 0.1), True, True),
        ((-0.1, 0.1, -0.1), True, False),
        ((0.1,) * 7 + (-0.1,), True, True),
        ((0.1,) * 6 + (-0.1, -0.1), True, False),
    ],
)
def test_how_many_pairs_are_enough(savings: tuple[float, ...], settled: bool, agreed: bool) -> None:
    """Enough are a steady saving, three pairs of 30 %, five that agree, or seven of eight that agree.

    The last two happen by chance in 3 % and 4 % of cases. Student's t of the cases that begin with 0.11 and 0.05 is
    20.8 and 6.4.
    """
    rounds = [(1.0, 1 - saving) for saving in savings]
    assert (is_settled(rounds), pairs_agree(rounds)) == (settled, agreed)
