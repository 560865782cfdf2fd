"""The modules with the most time beyond their roofs are named, and towers and encoders are part of the floor."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import SCRIPTS, groups_of, run_watched, tiny_llama
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from profiler.counting.floor import RoofSet
from profiler.counting.walk import walk
from profiler.why_slow.command import explained
from profiler.why_slow.findings import CallFloor, SlowModule, judge_calls
from profiler.why_slow.floor import Subject, floor_of_calls, subject_of
from profiler.why_slow.module_times import ModuleTimes, module_times
from profiler.why_slow.observations import Call, CallSettings, LineTime, Observations
from profiler.why_slow.render import why_sentences

IDS = torch.ones(2, 8, dtype=torch.long)
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
    found = times_of(model, lambda: model.generate(IDS, max_new_tokens=4, do_sample=False)).slowest()[0]
    assert (found.name, found.path, found.calls) == ("SlowLinear", "model.layers.*.mlp.up_proj", 2)
    assert found.line.startswith("test_module_times.py:")
    assert found.beyond_s >= 8 * 0.9 * SLEEP_S


def test_the_roofs_are_those_of_the_shapes() -> None:
    """up_proj [64, 32]: 8,192 bytes of weights at 1 GB/s. Attention: keys and values of 2 x 2 heads x 8 x 16."""
    model = tiny_llama()
    found = times_of(model, lambda: model(IDS, use_cache=False))
    assert found.roof_s["model.layers.0.mlp.up_proj"] == pytest.approx(8192e-9)
    assert found.roof_s["model.layers.0.self_attn"] == pytest.approx(2 * 2 * 2 * 8 * 16 * 4 * 1e-9)
    assert sum(found.own_s.values()) <= found.group.seconds


CALL = Call(0, "generate", "Llama", 1, 8, 0, 4, 4, 10.0, "s.py:4", CallSettings())
SEEN = Observations("s.py", 12.0, (CALL,), (), 0.0, "", 0.0)


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
    source = (SCRIPTS / "slow_tower.py").read_text()
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
    times = times_of(model, lambda: model.generate(IDS, max_new_tokens=3, do_sample=False))
    encoder_s = times.roof_within(("encoder.",))
    assert encoder_s >= 8192e-9  # one matrix of 32 x 64
    without, with_encoder = (
        floor_of_calls(times.group.calls, {"T5ForConditionalGeneration": subject}, {0: more_s})
        for more_s in (None, encoder_s)
    )
    assert with_encoder.seconds - without.seconds == pytest.approx(encoder_s)
    assert ("encoder" in without.left_out, with_encoder.left_out) == (True, ())
