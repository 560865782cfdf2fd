"""All commands agree whether Mistral-7B in 16 bits, with 512 tokens in and 128 out, fits a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import slow_except
from small_models import small_model
from subjects import subject_of

from profiler.data.datasheets import gpu_called
from profiler.data.room import idle_room_bytes, room_bytes
from profiler.rent import RentOptions, rent

GIB = 1 << 30
WEIGHTS = 2 * 7_241_732_096  # https://huggingface.co/mistralai/Mistral-7B-v0.1
CACHE = 640 * 2 * 32 * 8 * 128 * 2
"""Bytes per sequence: keys and values of 32 layers with 8 heads of 128, in 16 bits."""
STATES = 512 * (3 * 14336 + 4 * 4096) * 2
"""Bytes per sequence in the MLP: gate, up and their product, and four hidden states."""
LOST = 2.5 * 512 * 14336 * 2
"""Bytes per sequence of free memory that may be in pieces: 2.5 outputs of the widest matmul."""


def test_the_room_of_a_t4() -> None:
    """torch sees 14.56 of 16 GiB (CatVTON issue 133). The context takes 0.45 GB, and 2 % is lost between blocks."""
    assert gpu_called("T4").usable_bytes == pytest.approx(14.56 * GIB, rel=1e-6)
    assert gpu_called("T4").room_bytes == pytest.approx(0.98 * (14.56 * GIB - 450e6), rel=1e-6)
    assert room_bytes("cuda", 10e9) == 9.8e9
    assert idle_room_bytes("cpu", 10e9) == 9e9


GPUS = (("L4", 52, True, True), ("T4", 4, False, False), ("L4", 45, True, False), ("L4", 70, False, False))


@pytest.mark.parametrize(("gpu", "batch", "fits", "tight"), slow_except(GPUS[:1], GPUS))
def test_every_command_gives_the_same_answer(roofscope: Any, gpu: str, batch: int, fits: bool, tight: bool) -> None:
    """An L4 has room for 22.7 GB: for the tensors of 56 sequences, of which 45 run in whatever pieces memory is."""
    need = WEIGHTS + batch * (CACHE + STATES)
    size = ("--batch-sizes", str(batch), "--prompt-lens", "512")

    def answer(command: str, *options: str) -> Any:
        return json.loads(roofscope(command, "mistral-7b-v0.1", *options, "--format", "json").out)

    forecast = answer("forecast", "--on", gpu, *size, "--new-tokens", "128")
    assert {(cell["fits"], cell["tight"]) for cell in forecast["cells"]} == {(fits, tight)}
    [counted] = answer("count", "--phase", "prefill", "--batch", str(batch), "--prompt", "512", "--gpu", gpu)["gpus"]
    assert (counted["floor_s"] is not None, counted["tight"]) == (fits, tight)
    assert counted["room_bytes"] == gpu_called(gpu).room_bytes
    if gpu == "L4":  # a T4 adds the scores of its attention
        without_new = batch * 128 * CACHE / 640
        assert counted["needs_bytes"] == pytest.approx(need - without_new, rel=0.002)
        assert counted["safe_bytes"] == pytest.approx(need + batch * LOST - without_new, rel=0.002)
    grid = answer("count", *size, "--gpu", gpu)
    assert {(row["fits"], row["tight"]) for row in grid["rows"]} == {(fits, tight)}
    [offer] = rent(RentOptions("mistral-7b-v0.1", engine="eager", price=f"{gpu}=1")).gpus
    assert (offer.batch >= batch) == (fits and not tight), "rent counts on what runs"


def test_run_skips_exactly_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of 16 bits has 2 layers of width 64, an MLP of 96, 2 KV heads of 16, and two tables of 128 words.

    The MLP has gate, up and their product, and four hidden states. Fragmentation takes 2.5 outputs of 96.
    After loading, the weights' memory is no longer free.
    """
    small_model("Llama", max_position_embeddings=4096).save_pretrained(tmp_path)
    subject, _ = subject_of(str(tmp_path), dtype="bfloat16", prompt_lens=[2048], batch_sizes=[8], new_tokens=32)
    [cell] = subject.grid.cells
    weights = 2 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64 + 2 * 128 * 64)
    cache = (2048 + 32) * 2 * 2 * 2 * 16 * 2
    need = weights + 8 * (cache + 2048 * (3 * 96 + 4 * 64 + 2.5 * 96) * 2)
    for share, skipped in ((1.002, False), (0.998, True)):
        free = int(share * need / 0.9) + 1 - subject.model_bytes
        monkeypatch.setattr("profiler.device.memory.available_bytes", lambda _, free=free: free)
        assert (subject.no_room(cell) is not None) == skipped
