"""A rank's linears, replayed in turn with the whole ones: planted times, their effect, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machines import HOST
from subjects import of_caches

import profiler
from profiler.counting.tensor_parallel import walk_rank
from profiler.counting.walk import linear_key, linear_modules
from profiler.device.contention import ForeignLoad
from profiler.facts.measurements import Replay, Replays
from profiler.forecast.command import ForecastRequest, meta_model_of, run_facts
from profiler.forecast.options import RankOptions
from profiler.forecast.shards import machine_of, shard_times, shorten, trained_alike
from profiler.forecast.tensor_parallel import forecast_ranks
from profiler.grid.cells import Cell, CellKey
from profiler.loading.config import load_config
from profiler.loading.meta_model import build_on_meta
from profiler.loading.source import resolve
from profiler.predict.operator_arrays import StepArrays
from profiler.quant.storage import model_storage_bytes
from profiler.report.progress import QuietListener
from profiler.store.folder import read_document

EPYC = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-epyc"
GATE, HEAD = "model.layers.*.mlp.gate_proj", "lm_head"


def in_turn(key: CellKey, **shares: float) -> tuple[Replays, Replays]:
    """Replays of linears that take 2 ms whole, and `shares` of that on a rank."""
    names = {"gate": GATE, "head": HEAD}
    whole = Replays((key,), tuple(Replay(names[name], (2e-3,)) for name in shares))
    return whole, Replays((key,), tuple(Replay(names[name], (2e-3 * share,)) for name, share in shares.items()))


def test_a_rank_takes_of_the_runs_own_time_what_both_take_here_of_each_other() -> None:
    """0.5 at 1 row and 0.8 at 16: log-linear between them, constant beyond them, and separate for each phase."""
    basis = run_facts(EPYC)
    fitted = basis.trained.fitted
    cells = [Cell(batch, 128, 32) for batch in (1, 4, 16, 32)]
    keys = [CellKey("decode", cell) for cell in cells] + [CellKey("prefill", cells[0])]
    steps = StepArrays.of(keys)
    demanded = basis.demanded(steps)
    replays = [in_turn(keys[0], gate=0.5), in_turn(keys[2], gate=0.8)]
    shard = shard_times(fitted, demanded, keys, replays)
    gate, head = (next(column for column in demanded.columns if column.operator == name) for name in (GATE, HEAD))
    whole_s = shard.whole.seconds(gate, steps, np.zeros(len(steps)))
    shard_s = shard.alone_s[GATE]
    unscaled_s = shard_times(fitted, demanded, keys, [in_turn(keys[0], gate=1.0)]).alone_s[GATE]
    assert shard_s[:4] / unscaled_s[:4] == pytest.approx([0.5, np.sqrt(0.5 * 0.8), 0.8, 0.8])
    assert np.isnan(shard_s[4]), "no prefill was replayed"
    assert shard.seconds(gate, steps, np.zeros(len(steps)))[4] == whole_s[4]  # type: ignore[index]
    roofs_s = np.full(len(steps), 1.0)
    assert shard.seconds(gate, steps, roofs_s)[0] == 1.0, "nothing is faster than its roof"  # type: ignore[index]
    assert shard.seconds(head, steps, roofs_s) == pytest.approx(shard.whole.seconds(head, steps, roofs_s))
    by_phase = shard_times(fitted, demanded, keys, [in_turn(keys[0], head=0.5), in_turn(keys[4], head=3.0)])
    head_s = by_phase.alone_s[HEAD]
    assert head_s[4] / head_s[0] == pytest.approx(6.0, rel=0.5), "one row each, of a decode step and of a prefill"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "Another CPU"}, "and the run was on Another CPU"),
        ({"threads": 77}, "threads?, and the run had 77"),
        ({"compute_capability": "NEON"}, "and the run had NEON"),
        ({"kind": "cuda", "name": "H100"}, "this torch is a CPU build|no CUDA device answers"),
    ],
)
def test_linears_are_replayed_only_on_the_device_of_the_run(changed: dict[str, Any], words: str) -> None:
    info = HOST.info
    own = replace(
        read_document(EPYC).device, name=info.name, threads=info.threads, compute_capability=info.compute_capability
    )
    machine = machine_of(own)
    assert not isinstance(machine, str)
    assert machine.info == info
    reason = machine_of(replace(own, **changed))
    assert isinstance(reason, str)
    assert re.search(words, reason)


def whole_and_share() -> tuple[Any, Any]:
    """The run's model, and one of three ranks of it."""
    whole, share = (meta_model_of(EPYC, read_document(EPYC)) for _ in range(2))
    walk_rank(share, 3)
    return whole, share


def test_the_share_has_more_layers_than_a_cache_holds() -> None:
    """A layer of a third of SmolLM2-135M has 4 x 1.18 MB: twice a cache of 2 MiB is one layer, twice 8 MiB is four."""
    _, share = whole_and_share()
    layer_bytes = model_storage_bytes(share.model.layers[0])
    assert layer_bytes == 4 * ((576 * 576 * 2 + 576 * 192 * 2 + 576 * 1536 * 3) // 3 + 2 * 576)
    for end, layers in ((2 << 20, 1), (8 << 20, 4)):
        whole, share = whole_and_share()
        shorten(whole, share, of_caches(end))
        for module in (whole, share):
            assert len(module.model.layers) == layers
        assert layers * layer_bytes >= 2 * end > (layers - 1) * layer_bytes


def test_cut_weights_cannot_be_trained_and_whole_ones_can() -> None:
    whole, share = whole_and_share()
    trained_alike(whole, share)
    params = dict(share.named_parameters())
    assert not params["model.layers.0.mlp.gate_proj.weight"].requires_grad
    assert params["model.layers.0.input_layernorm.weight"].requires_grad


@pytest.mark.ci
def test_planted_times_of_linears_of_half_the_width_are_in_the_forecast(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]
) -> None:
    """Linears take a planted 1 ms whole and 0.75 ms at half the width.

    The model has 2 x 7 of them and a head, so a rank's step takes 15 x 0.25 ms less. The other split parts are
    negligible.
    """
    whole_shapes = set(linear_modules(build_on_meta(load_config(resolve(str(tiny_folder))), torch.float32)))

    def planted(linears: Mapping[Any, Sequence[Any]], *_: object, **__: object) -> dict[Any, tuple[float, ...]]:
        return {op: (1e-3 if linear_key(op) in whole_shapes else 0.75e-3,) for op in linears}

    monkeypatch.setattr("profiler.measure.kernels.replay_linears", planted)
    profiler.profile(
        str(tiny_folder), prompt_lens=[8], batch_sizes=[1, 2], new_tokens=8, budget_s=0.5, no_levers=True, device="cpu",
        out=tmp_path / "run",
    )  # fmt: skip
    listener, stages = QuietListener(), []
    monkeypatch.setattr(listener, "stage", stages.append)
    wanted, free = ForecastRequest(prompt_lens="8", batch_sizes="1"), RankOptions("2", "0,1e9")
    answer = forecast_ranks(str(tmp_path / "run"), "", wanted, free, listener)
    [stage] = stages
    assert "one of 2 ranks" in stage
    assert answer.notes[0].startswith("A rank's linears were replayed here")
    basis = run_facts(tmp_path / "run")
    decode = next(cell for cell in answer.cells if cell.phase == "decode")
    steps = StepArrays.of([CellKey("decode", Cell(1, 8, 8))])
    forecast = basis.forecast(steps)
    unexplained = float(forecast.latency_s[0] / forecast.terms.total_s[0])
    saved_s = decode.times[0].latency_s - decode.times[1].latency_s
    assert saved_s / unexplained == pytest.approx(15 * 0.25e-3, rel=0.02)

    monkeypatch.setattr(ForeignLoad, "cores", lambda _: 64.0)
    printed = roofscope("forecast", str(tmp_path / "run"), "--tp", "2,4", "--link", "pcie4x16", "--plain")
    assert printed.code == 0, printed.err
    assert [line.split()[5] for line in printed.err.splitlines()] == ["2", "4"], "each number of ranks is reported"
    words = " ".join(printed.out.split())
    assert "A rank's linears were replayed here" in words
    assert "Meanwhile other processes keep 64.0 of" in words
