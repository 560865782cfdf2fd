"""Loads that convert the weights, which saved weights would not need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from profiler.why_slow.findings import judge_calls
from profiler.why_slow.observations import Call, Load, Observations
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import why_sentences

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
    recorder = Recorder()
    recorder.load("org/model", lambda **_: SimpleNamespace(hf_quantizer=quantizer), (), named)
    assert [load.conversion for load in recorder.loads] == [conversion]


def test_the_first_load_is_a_bound_and_later_ones_are_reloads() -> None:
    """Three loads of 4 s and a call of 8 s: two thirds of the loads are reloads, and the first can be shorter."""
    loads = tuple(Load("a.gguf", 4.0, "s.py:9", 4.0 * turn, "GGUF weights are unpacked") for turn in range(3))
    calls = (Call(0, "generate", "Llama", 1, 8, 0, 4, 4, 8.0, "s.py:12", {}),)
    found = judge_calls(Observations("s.py", 20.0, calls, loads, 0.0, "", 0.0), [])
    assert [(item.id, item.saves_s, item.is_bound) for item in found.findings] == [
        ("reloads", 8.0, False),
        ("slow-load", 4.0, True),
    ]
    assert why_sentences(found)[2] == (
        "2. GGUF weights are unpacked at every start: at most 4.00 s (20 %). Call save_pretrained once, and load that"
        " folder (s.py:9). [at most]"
    )
