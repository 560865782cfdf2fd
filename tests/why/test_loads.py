"""Converting weights at load takes time that saved weights would not need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.why_slow import costs
from profiler.why_slow.costs import conversion_findings
from profiler.why_slow.findings import judge_calls
from profiler.why_slow.observations import Call, CallSettings, Load, Observations
from profiler.why_slow.recorder import Recorder
from profiler.why_slow.render import why_sentences

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
    assert recorder.converted_models == [model if conversion else None]


def observed(conversion: str) -> Observations:
    """Three loads of 4 s and a call of 8 s."""
    loads = tuple(Load("a.gguf", 4.0, "s.py:9", 4.0 * turn, conversion, "load another") for turn in range(3))
    calls = (Call(0, "generate", "Llama", 1, 8, 0, 4, 4, 8.0, "s.py:12", CallSettings()),)
    return Observations("s.py", 20.0, calls, loads, 0.0, "", 0.0)


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
