"""A model that does not fit: placed by accelerate, and no verdict pretends otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import profiler
from profiler.errors import ModelError
from profiler.loading import placement, random_weights


def test_too_large_for_this_machine_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placement, "available_bytes", lambda device: 1 << 20)
    with pytest.raises(ModelError, match=r"need 0\.5 GB.*--quant nf4"):
        profiler.profile("smollm2-135m", prompt_lens=[8], batch_sizes=[1], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_offloaded_cells_are_marked_and_get_no_regime(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    """The layers are kept aside by accelerate's hooks and fetched at each step, as on a card that is too small."""
    real = random_weights.auto_device_map
    calls: list[int] = []

    def once(module: Any, device: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:  # the hollow twin fits anywhere
            return real(module, device)
        offload_layers = {f"model.layers.{index}": "cpu" for index in range(2)}
        return {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0, **offload_layers}

    def dispatch(module: Any, device_map: Any, **_: Any) -> Any:
        from accelerate import cpu_offload

        for layer in module.model.layers:
            cpu_offload(layer, execution_device="cpu")
        return module

    monkeypatch.setattr(random_weights, "auto_device_map", once)
    monkeypatch.setattr(random_weights, "mapped_device", lambda name, device_map: "cpu")
    monkeypatch.setattr("accelerate.dispatch_model", dispatch)
    run = profiler.profile(
        str(tiny_folder),
        weights="random",
        prompt_lens=[16],
        batch_sizes=[1],
        new_tokens=8,
        budget_s=2,
        out=tmp_path / "r",
    )
    assert run.document.model["offloaded"]
    assert set(run.cells["regime"]) == {"inconclusive"}
    assert all("offloaded" in item["flags"] for item in run.document.evidence)
    assert run.document.ceilings["host_link"]["per_s"] > 0
    assert any("cross the host link" in warning for warning in run.document.warnings)
    # Two layers of 4 x 64 x 64 (q, o) and 2 x 64 x 32 (k, v) and 3 x 64 x 96 matrices and two norms, in float32.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    link = run.document.ceilings["host_link"]["per_s"]
    assert (run.cells["weights_s"] > 2 * 4 * layer / link).all()
