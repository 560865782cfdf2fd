"""`doctor` on a simulated T4: each part works, and the first command is one that fits."""

from __future__ import annotations

import pytest

from profiler.checks.doctor import examine

from .truth import T4
from .world import simulated

pytestmark = pytest.mark.slow


def test_doctor_examines_a_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral 7B has 14.5 GB of weights in float16, of 16.1 GB. Only packed weights leave memory for a batch of 8."""
    monkeypatch.setattr("profiler.loading.source.preset_names", lambda: ("mistral-7b-v0.1",))
    with simulated(T4):
        examination = examine("cuda")
    found = {each.name: each for each in examination.findings}
    parts = ("driver", "torch", "packages", "device", "memory", "NVML", "bitsandbytes", "graphs", "fits")
    assert [name for name in parts if not found[name].works] == []
    assert found["device"].says.startswith("Tesla T4, 40 SMs, compute capability 7.5; datasheet T4: 320 GB/s")
    assert found["memory"].says.endswith(" of 16.1 GB")
    assert found["fits"].says == "float16: mistral-7b-v0.1"
    first = "run mistral-7b-v0.1 --quant nf4 --prompt-lens 512 --batch-sizes 1,8"
    assert examination.first.endswith(first)
