"""If a model does not fit, accelerate offloads it, and the verdicts say so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from loaded import loaded, on_meta
from small_models import small_model

import profiler
from profiler.errors import ModelError
from profiler.loading import device_map as placement

# The tiny Llama is in float32. A layer has two norms, and matrices of 2 x 64 x 64 (q, o), 2 x 64 x 32 (k, v) and
# 3 x 64 x 128. There is room for the embedding, one layer, and another one to fetch into, which accelerate reserves.
# The second layer, the last norm and the head go to the disk.
LAYER_BYTES = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
HEAD_BYTES = 4 * (64 + 128 * 64)
FREE_BYTES = 370_000


def spill(monkeypatch: pytest.MonkeyPatch, free_bytes: int = FREE_BYTES) -> None:
    monkeypatch.setattr(placement, "available_bytes", lambda device: free_bytes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["checkpoint", "random"])
def test_a_model_larger_than_memory_runs_from_the_disk_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: str, tied: bool
) -> None:
    """A model whose head is the embedding's table is smaller, so that it has half of the room."""
    small_model("Llama", intermediate_size=128, tie_word_embeddings=tied).save_pretrained(tmp_path)
    prompt = torch.arange(1, 17).reshape(1, 16)
    with torch.inference_mode():
        expected = loaded(tmp_path, weights=weights).module(prompt).logits
        spill(monkeypatch, FREE_BYTES // 2 if tied else FREE_BYTES)
        spilled = loaded(tmp_path, weights=weights)
        assert all(torch.equal(spilled.module(prompt).logits, expected) for _ in range(2))
    assert spilled.offloaded_bytes.keys() == {"disk"}
    assert tied or spilled.offloaded_bytes["disk"] == LAYER_BYTES + HEAD_BYTES


def test_too_large_for_memory_and_disk_together_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    spill(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"the disk has room for 0\.0 GB.*--quant nf4"):
        profiler.profile(str(tiny_folder), prompt_lens=[8], batch_sizes=[1], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_quantised_weights_cannot_be_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    monkeypatch.setattr(placement, "available_bytes", lambda device: 20_000)
    with pytest.raises(ModelError, match="bitsandbytes weights cannot be offloaded to disk"):
        profiler.profile(
            str(tiny_folder), quant="nf4", weights="random", prompt_lens=[8], batch_sizes=[1], out=tmp_path / "run"
        )


def test_a_gpu_that_shares_the_memory_of_its_host_spills_to_it(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    """accelerate's `get_max_memory` has no entry for the host of such a GPU, and opens a context on every GPU."""
    import accelerate.utils

    monkeypatch.setattr(accelerate.utils, "get_max_memory", dict)
    spare_bytes = FREE_BYTES - LAYER_BYTES
    monkeypatch.setattr(placement, "available_bytes", lambda device: spare_bytes if device.type == "cuda" else 1 << 30)
    module = on_meta(str(tiny_folder), torch.float32)
    found = placement.plan_device_map(module, torch.device("cuda", 0), quantised=False)
    assert set(found.device_map.values()) == {"cuda:0", "cpu"}
