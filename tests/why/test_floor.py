"""The floor of a script's calls equals arithmetic; modules, towers and encoders are part of it and of the rest."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import changes_to, groups_of, run_watched, tiny_llama
from scripts import SCRIPTS
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from profiler.counting.walk import walk
from profiler.data.roof_set import RoofSet
from profiler.why_slow.command import explained
from profiler.why_slow.findings import CallFloor, SlowModule, judge_calls
from profiler.why_slow.floor import Subject, floor_of_calls, subject_of, subjects_of
from profiler.why_slow.module_times import ModuleTimes, module_times
from profiler.why_slow.observations import Call, CallSettings, LineTime, Observations
from profiler.why_slow.render import why_sentences

# At this low bandwidth only bytes count. The others are the dispatch of a prefill and of a decode step.
BYTES_PER_S, PREFILL_S, DECODE_S = 1e6, 5.0, 2.0
CALL = Call(0, "generate", "LlamaForCausalLM", 1, 8, 0, 4, 4, 60.0, "s.py:1", CallSettings())


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    def roofs(*_: object) -> RoofSet:
        return RoofSet("here", BYTES_PER_S, {"float32": 1e18})

    monkeypatch.setattr("profiler.why_slow.floor.here_roofs", roofs)
    monkeypatch.setattr("profiler.why_slow.floor.least_dispatch_s", lambda *_: (PREFILL_S, DECODE_S))
    return tiny_llama(num_hidden_layers=2, tie_word_embeddings=False)


def floor_of(model: Any, *calls: Call) -> CallFloor:
    return floor_of_calls(calls, {"LlamaForCausalLM": subject_of(model)})


def device_s(tokens: int, steps: int) -> float:
    """In float32, a step reads all weights but the embedding table. A token has 2 layers x 2 x 32 keys and values."""
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 32 * 64
    read = sum(range(tokens, tokens + steps - 1))
    kv = 2 * 2 * 32 * (tokens + read + steps - 1)
    tokens_in = tokens + steps - 1
    return 4 * (steps * weights + kv + tokens_in * 32 + steps * 64) / BYTES_PER_S


def test_a_generate_is_a_prefill_and_a_step_per_further_token(model: Any) -> None:
    """8 tokens and 4 new ones need a prefill, and three steps with 8, 9 and 10 tokens in the cache."""
    found = floor_of(model, CALL)
    assert found.dispatch_s == pytest.approx(PREFILL_S + 3 * DECODE_S)
    # A prefill reads no cache; a step reads it, including its own token.
    assert found.seconds == pytest.approx(device_s(8, 4) + found.dispatch_s, rel=0.02)


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


def test_dispatch_overlaps_with_a_gpu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host runs ahead, a step takes the longer of 0.08 s on the device and 2 s on the host."""

    class Ahead:
        def __init__(self, device: torch.device) -> None:
            self.device, self.clock = device, type("Clock", (), {"ahead": True})

    monkeypatch.setattr("profiler.why_slow.floor.machine_for", Ahead)
    assert floor_of(model, CALL).seconds == pytest.approx(PREFILL_S + 3 * DECODE_S)


def test_models_of_two_sizes_are_counted_and_repeated_as_what_they_are(model: Any) -> None:
    """Four are called at one line. The last one has the size and the number of the first one, which is gone."""
    models = [tiny_llama(num_hidden_layers=layers) for layers in (1, 2, 1)]
    params = [sum(each.numel() for each in made.parameters()) for made in models]

    def run() -> None:
        for number in (0, 1, 2, -1):
            if number < 0:
                del models[0]
                gc.collect()
                models.append(tiny_llama(num_hidden_layers=1))
            models[number](torch.ones(1, 4, dtype=torch.long))

    groups = groups_of(run)
    assert {group.model: len(group.calls) for group in groups} == {models[0]: 1, models[2]: 3}
    notes = groups[0].recorder.notes
    assert [noted.name.partition(" ")[2] for noted in notes] == ["", "(2)", "(3)", ""]
    assert [subjects_of(notes)[noted.name].work.params for noted in notes] == [*params, params[0]]


def test_unknown_dispatch_is_reported(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TypeError

    known = floor_of(model, CALL)
    monkeypatch.setattr("profiler.why_slow.floor.least_dispatch_s", fails)
    unknown = floor_of(model, CALL)
    assert unknown.dispatch_s is None
    assert unknown.seconds == pytest.approx(known.seconds - (known.dispatch_s or 0.0))
    seen = Observations("s.py", 70.0, (CALL,), (), 0.0, "", 0.0)
    assert "without dispatch, which is unknown" in why_sentences(judge_calls(seen, [], unknown))[0]
    near = replace(seen, calls=(replace(CALL, seconds=known.seconds / 0.91),))
    assert "Nothing to change: 91 % of what this machine can do" in why_sentences(judge_calls(near, [], known))[1]
    far = replace(seen, calls=(replace(CALL, seconds=known.seconds / 0.2),))
    assert "the floor is 20 % of its time" in why_sentences(judge_calls(far, [], known))[1]


IDS = torch.ones(4, 8, dtype=torch.long)
MEMORY, COMPUTE = (1.0, {"float32": 1e18}), (1e18, {"float32": 1.0})
"""(bytes/s, FLOP/s) of a device on which only one of them counts."""


@pytest.fixture
def on_roofs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives a change to the calls of a function of a model, on a device with these roofs."""

    def candidate(change: str, roofs: Any, model: Any, run: Any) -> Any:
        monkeypatch.setattr("profiler.why_slow.floor.here_roofs", lambda *_: RoofSet("here", *roofs))
        monkeypatch.setattr("profiler.why_slow.floor.least_dispatch_s", lambda *_: (0.0, 0.0))
        subjects = {"LlamaForCausalLM": subject_of(model)}
        found = changes_to(lambda: run(model), lambda recorder: floor_of_calls(recorder.seen("s.py").calls, subjects))
        return found[change]

    return candidate


@pytest.fixture
def wide() -> Any:
    """A model whose time is in its weights: 32 times more of them than keys and values of a short text."""
    return tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=2)


FOUR = {"max_new_tokens": 4, "do_sample": False}


def test_beams_cost_little_where_weights_are_read_and_much_where_products_count(on_roofs: Any, wide: Any) -> None:
    """A step of four beams reads the weights once, and computes four times as much."""

    def run(model: Any) -> None:
        model.generate(IDS[:1], num_beams=4, **FOUR)

    assert on_roofs("beams", MEMORY, wide, run).about < 0.1
    assert on_roofs("beams", COMPUTE, wide, run).about == pytest.approx(0.75, abs=0.01)


def test_prompts_one_by_one_save_the_weights_that_a_batch_reads_once(on_roofs: Any, wide: Any) -> None:
    """Four prompts of one length: a batch reads a quarter of the weights, and computes as much.

    Two of them as one batch read half of the weights, and the trial says that more save more.
    """

    def one_by_one(model: Any) -> None:
        for ids in IDS.split(1):
            model.generate(ids, **FOUR)

    assert on_roofs("one-by-one", COMPUTE, wide, one_by_one).about == pytest.approx(0.0, abs=0.01)
    whole = on_roofs("one-by-one", MEMORY, wide, one_by_one)
    assert whole.about == pytest.approx(0.75, abs=0.05)
    half = whole.fewer()
    assert whole.shape == "4 of the prompts"
    assert half.about == pytest.approx(0.5, abs=0.05)
    assert half.shape == "2 of the prompts (more at once save more)"


def test_padding_saves_in_the_prompt_only(on_roofs: Any, wide: Any) -> None:
    """Half of 8 tokens is padding; three of the four steps compute one token per row, with it or without."""
    mask = torch.ones_like(IDS)
    mask[:, :4] = 0

    def run(model: Any) -> None:
        model.generate(IDS, attention_mask=mask, **FOUR)

    assert on_roofs("padding", COMPUTE, wide, run).about == pytest.approx(4 / (8 + 3), abs=0.02)
    assert on_roofs("padding", MEMORY, wide, run).about < 0.1


def test_unread_logits_save_the_products_of_the_head(on_roofs: Any) -> None:
    """At 8 positions: 7 of 8 rows of a head of 4096 x 32, next to 4 x 32 x 32 + 3 x 32 x 64 weights for all 8."""
    head, layer = 4096 * 32, 4 * 32 * 32 + 3 * 32 * 64
    expected = 7 * head / (8 * head + 8 * layer)
    model = tiny_llama(vocab_size=4096)
    found = on_roofs("all-logits", COMPUTE, model, lambda model: model(IDS).logits[:, -1].argmax(-1).tolist())
    assert found.about == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("has", "name"), [((), "float32"), (("bfloat16",), "bfloat16")])
def test_a_cpu_without_units_for_a_half_tries_a_dtype_that_it_has(
    has: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiler.why_slow.weight_changes._has_units", lambda dtype: dtype in has)
    model = tiny_llama().half()
    found = changes_to(lambda: model(IDS))["emulated-dtype"]
    assert found.change.startswith(f"dtype=torch.{name}")
    assert found.changed().logits.dtype == getattr(torch, name)  # type: ignore[attr-defined]


PROMPTS = torch.ones(2, 8, dtype=torch.long)
ROOFS = RoofSet("a device, measured", 1e9, {"float32": 1e12})
SLEEP_S = 0.02


class SlowLinear(nn.Linear):
    """A linear that sleeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S)
        return super().forward(x)


def times_of(model: Any, run: Any) -> ModuleTimes:
    [group] = groups_of(run)
    found = module_times(group, lambda _: True, Subject(walk(model), ROOFS, "float32", None, overlaps=False))
    assert found is not None
    return found


def test_a_slow_class_is_named_with_its_place_and_its_calls_a_step() -> None:
    """Of 4 forwards, each passes the slow linear of both layers."""
    model = tiny_llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = SlowLinear
    found = times_of(model, lambda: model.generate(PROMPTS, max_new_tokens=4, do_sample=False)).slowest()[0]
    assert (found.name, found.path, found.calls) == ("SlowLinear", "model.layers.*.mlp.up_proj", 2)
    assert found.line.startswith("test_floor.py:")
    assert found.beyond_s >= 8 * 0.9 * SLEEP_S


def test_the_roofs_are_those_of_the_shapes() -> None:
    """up_proj [64, 32]: 8,192 bytes of weights at 1 GB/s. Attention: keys and values of 2 x 2 heads x 8 x 16."""
    model = tiny_llama()
    found = times_of(model, lambda: model(PROMPTS, use_cache=False))
    assert found.roof_s["model.layers.0.mlp.up_proj"] == pytest.approx(8192e-9)
    assert found.roof_s["model.layers.0.self_attn"] == pytest.approx(2 * 2 * 2 * 8 * 16 * 4 * 1e-9)
    assert sum(found.own_s.values()) <= found.group.seconds


CALLED = Call(0, "generate", "Llama", 1, 8, 0, 4, 4, 10.0, "s.py:4", CallSettings())
SEEN = Observations("s.py", 12.0, (CALLED,), (), 0.0, "", 0.0)


def test_the_first_sentence_names_the_module_that_no_finding_explains() -> None:
    slow = SlowModule("SlowConv3d", "visual.patch_embed.proj", "s.py:19", 8.0, 0.25, "s.py:4")
    answer = why_sentences(judge_calls(SEEN, [], CallFloor(1.0, 0.1), modules=[slow]))
    assert answer[0] == (
        "SlowConv3d (visual.patch_embed.proj, s.py:19) takes 8.00 s of 10.0 s beyond its roof, in one call a prompt"
        " (s.py:4)."
    )
    assert "The largest part of the rest is SlowConv3d beyond its roof (visual.patch_embed.proj, s.py:19): 8.00 s." in (
        " ".join(answer)
    )


def test_a_module_is_not_named_first_for_time_in_which_the_script_waited_for_other_processes() -> None:
    """Of 10 s of calls 8.75 were waiting, and 1.0 is the floor: the module has the last quarter of a second."""
    seen = replace(SEEN, waited_s=10.5)
    slow = SlowModule("LlamaRMSNorm", "model.norm", "s.py:19", 4.0, 1.0, "s.py:4")
    answer = why_sentences(judge_calls(seen, [], CallFloor(1.0, 0.1), modules=[slow]))
    assert answer[0].startswith("s.py spent 10.0 s")


@pytest.mark.parametrize(("code_s", "is_named"), [(6.0, True), (2.0, False)])
def test_the_scripts_own_code_is_named_if_it_takes_longer_than_a_finding_saves(code_s: float, is_named: bool) -> None:
    seen = replace(SEEN, wall_s=20.0, between=(LineTime("s.py:4", 9, code_s),))
    named = "The script's own code between its forwards takes 6.00 s of 20.0 s (s.py:4)."
    assert (named in why_sentences(judge_calls(seen, [], CallFloor(1.0, 0.1)))) == is_named


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
    """The work of a step is that of the decoder; the encoder's roof is added, or the answer leaves it out in words."""
    monkeypatch.setattr("profiler.why_slow.floor.here_roofs", lambda *_: ROOFS)
    monkeypatch.setattr("profiler.why_slow.floor.least_dispatch_s", lambda *_: (0.0, 0.0))
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)).eval()
    subject = subject_of(model)
    assert "encoder" in subject.outside
    assert not [item.name for item in subject.work.operators if item.name.startswith("encoder.")]
    times = times_of(model, lambda: model.generate(PROMPTS, max_new_tokens=3, do_sample=False))
    encoder_s = times.roof_within(("encoder.",))
    assert encoder_s >= 8192e-9  # one matrix of 32 x 64
    without, with_encoder = (
        floor_of_calls(times.group.calls, {"T5ForConditionalGeneration": subject}, {0: more_s})
        for more_s in (None, encoder_s)
    )
    assert with_encoder.seconds - without.seconds == pytest.approx(encoder_s)
    assert ("encoder" in without.left_out, with_encoder.left_out) == (True, ())
