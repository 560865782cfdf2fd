"""One question to every command: does Mistral-7B in 16 bits, with 512 tokens in and 128 out, fit a GPU?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from profiler.data.datasheets import gpu_called, gpus
from profiler.data.room import idle_room_bytes, room_bytes
from profiler.rent.plan import Planner
from profiler.rent.workload import workload_of

GIB = 1 << 30
WEIGHTS = 2 * 7_241_732_096  # https://huggingface.co/mistralai/Mistral-7B-v0.1
CACHE = 640 * 2 * 32 * 8 * 128 * 2
"""Bytes per sequence: keys and values of 32 layers with 8 heads of 128, in 16 bits."""
STATES = 512 * (3 * 14336 + 4 * 4096) * 2
"""Bytes per sequence in the MLP: gate, up and their product, and four hidden states."""
LOST = 2.5 * 512 * 14336 * 2
"""Bytes per sequence that are free in pieces: 2.5 outputs of the widest matmul."""


def test_the_room_of_a_t4() -> None:
    """torch sees 14.56 GiB of its 16 (CatVTON issue 133); the context takes 0.45 GB, and 2 % is lost between blocks."""
    assert gpu_called("T4").usable_bytes == pytest.approx(14.56 * GIB, rel=1e-6)
    assert gpu_called("T4").room_bytes == pytest.approx(0.98 * (14.56 * GIB - 450e6), rel=1e-6)
    assert room_bytes("cuda", 10e9) == 9.8e9
    assert idle_room_bytes("cpu", 10e9) == 9e9


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.gpu)
def test_usable_memory_is_below_the_datasheets(gpu: Any) -> None:
    """A driver keeps at most an eighth: ECC takes a sixteenth of GDDR memory."""
    assert 0.875 <= gpu.usable_bytes / gpu.memory_bytes <= 1.0
    assert gpu.usable_source


@pytest.mark.parametrize(("gpu", "batch", "fits"), [("L4", 4, True), ("L4", 128, False), ("T4", 4, False)])
def test_every_command_gives_the_same_answer(roofscope: Any, gpu: str, batch: int, fits: bool) -> None:
    need = WEIGHTS + batch * (CACHE + STATES + LOST)
    size = ("--batch-sizes", str(batch), "--prompt-lens", "512")
    forecast = json.loads(
        roofscope("forecast", "mistral-7b-v0.1", "--on", gpu, *size, "--new-tokens", "128", "--format", "json").out
    )
    assert {cell["fits"] for cell in forecast["cells"]} == {fits}
    arguments = ("mistral-7b-v0.1", "--phase", "prefill", "--batch", str(batch), "--prompt", "512", "--gpu", gpu)
    [counted] = json.loads(roofscope("count", *arguments, "--format", "json").out)["gpus"]
    assert (counted["floor_s"] is not None) == fits
    assert counted["room_bytes"] == gpu_called(gpu).room_bytes
    if gpu == "L4":  # a T4 adds the scores of its attention
        without_new = batch * 128 * CACHE / 640
        assert counted["needs_bytes"] == pytest.approx(need - without_new, rel=0.002)
    grid = json.loads(roofscope("count", "mistral-7b-v0.1", *size, "--gpu", gpu, "--format", "json").out)
    assert {row["fits"] for row in grid["rows"]} == {fits}
    planned = Planner("mistral-7b-v0.1", workload_of("batch", 512, 128)).plan("none", "eager")
    assert (planned.largest_batch_on(gpu_called(gpu)) >= batch) == fits
