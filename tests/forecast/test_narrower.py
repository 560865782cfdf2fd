"""A rank's narrower linears, replayed beside the whole ones: planted times, what is made of them, where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machines import HOST
from subjects import of_caches

import profiler
from profiler.counting.tensor_parallel import walk_rank
from profiler.counting.walk import linear_modules
from profiler.device.contention import ForeignLoad
from profiler.facts.measurements import Replay, Replays
from profiler.forecast.command import ForecastRequest, meta_model_of, run_facts
from profiler.forecast.shards import machine_of, shard_times, shorten, trained_alike
from profiler.forecast.tensor_parallel import RankOptions, forecast_ranks
from profiler.grid.cells import Cell, CellKey
from profiler.predict.operator_arrays import StepArrays
from profiler.quant.storage import model_storage_bytes
from profiler.report.progress import QuietListener
from profiler.store.folder import read_document

EPYC = Path(__file__).parents[2] / "runs" / "reference" / "smollm2-135m-epyc"
TODAY = date(2026, 11, 1)
GATE, HEAD = "model.layers.*.mlp.gate_proj", "lm_head"
LAYERS = 30


def in_turn(key: CellKey, **shares: float) -> tuple[Replays, Replays]:
    """A linear that takes 2 ms whole, and so much of that on a rank."""
    names = {"gate": GATE, "head": HEAD}
    whole = Replays((key,), tuple(Replay(names[name], (2e-3,)) for name in shares))
    return whole, Replays((key,), tuple(Replay(names[name], (2e-3 * share,)) for name, share in shares.items()))


def test_a_rank_takes_of_the_runs_own_time_what_both_take_here_of_each_other() -> None:
    """Half at 1 row and 0.8 at 16: between them straight in logarithms, beyond them level; each phase by itself."""
    known = run_facts(EPYC)
    cells = [Cell(batch, 128, 32) for batch in (1, 4, 16, 32)]
    keys = [CellKey("decode", cell) for cell in cells] + [CellKey("prefill", cells[0])]
    steps = StepArrays.of(keys)
    told = [in_turn(keys[0], gate=0.5), in_turn(keys[2], gate=0.8)]
    found = shard_times(known.trained.fitted, known.demanded(steps), keys, told)
    [column] = [column for column in known.demanded(steps).columns if column.operator == GATE]
    whole_s = known.trained.fitted.kernels.seconds(column, steps, np.zeros(len(steps)))
    kept_s = found.whole.seconds(column, steps, np.zeros(len(steps)))
    alone_s = found.alone_s[GATE]
    between = known.demanded(steps)
    bare = shard_times(known.trained.fitted, between, keys, [in_turn(keys[0], gate=1.0)]).alone_s[GATE]
    assert alone_s[:4] / bare[:4] == pytest.approx([0.5, np.sqrt(0.5 * 0.8), 0.8, 0.8])
    assert np.isnan(alone_s[4]), "no prefill was replayed"
    assert whole_s is not None
    assert kept_s is not None
    assert found.seconds(column, steps, np.zeros(len(steps)))[4] == kept_s[4]  # type: ignore[index]
    roofs_s = np.full(len(steps), 1.0)
    assert found.seconds(column, steps, roofs_s)[0] == 1.0, "nothing is faster than its roof"  # type: ignore[index]
    heads = next(column for column in between.columns if column.operator == HEAD)
    assert found.seconds(heads, steps, roofs_s) == pytest.approx(found.whole.seconds(heads, steps, roofs_s))
    phased = shard_times(
        known.trained.fitted, between, keys, [in_turn(keys[0], head=0.5), in_turn(keys[4], head=3.0)]
    ).alone_s[HEAD]
    assert phased[4] / phased[0] == pytest.approx(6.0, rel=0.5), "one row each, of a decode step and of a prefill"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "Another CPU"}, "and the run was on Another CPU"),
        ({"threads": 77}, "threads?, and the run had 77"),
        ({"compute_capability": "NEON"}, "and the run did with NEON"),
        ({"kind": "cuda", "name": "H100"}, "this torch is a CPU build|no CUDA device answers"),
    ],
)
def test_linears_are_replayed_on_the_device_of_the_run_alone(changed: dict[str, Any], words: str) -> None:
    info = HOST.info
    own = replace(
        read_document(EPYC).device, name=info.name, threads=info.threads, compute_capability=info.compute_capability
    )
    found = machine_of(own)
    assert not isinstance(found, str)
    assert found.info == info
    why = machine_of(replace(own, **changed))
    assert isinstance(why, str)
    assert re.search(words, why)


def test_so_many_layers_are_made_as_no_cache_keeps_of_the_share() -> None:
    """SmolLM2-135M in three: a layer of the share holds 4 x 1.18 MB; of 2 MiB as a cache's end twice that is one
    layer, of 8 MiB it is four."""
    document = read_document(EPYC)
    share = meta_model_of(EPYC, document)
    walk_rank(share, 3)
    layer_bytes = model_storage_bytes(share.model.layers[0])  # type: ignore[union-attr, index]
    assert layer_bytes == 4 * ((576 * 576 * 2 + 576 * 192 * 2 + 576 * 1536 * 3) // 3 + 2 * 576)
    for end, layers in ((2 << 20, 1), (8 << 20, 4)):
        whole, share = meta_model_of(EPYC, document), meta_model_of(EPYC, document)
        walk_rank(share, 3)
        shorten(whole, share, of_caches(end))
        for module in (whole, share):
            assert len(module.model.layers) == layers  # type: ignore[union-attr, arg-type]
        assert layers * layer_bytes >= 2 * end > (layers - 1) * layer_bytes


def test_cut_weights_cannot_be_trained_and_whole_ones_can() -> None:
    document = read_document(EPYC)
    whole, share = meta_model_of(EPYC, document), meta_model_of(EPYC, document)
    walk_rank(share, 3)
    trained_alike(whole, share)
    held = dict(share.named_parameters())
    assert not held["model.layers.0.mlp.gate_proj.weight"].requires_grad
    assert held["model.layers.0.input_layernorm.weight"].requires_grad


def test_planted_linears_of_half_the_width_are_what_the_forecast_tells(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]
) -> None:
    """Linears whose time is planted as 1 ms whole and 0.75 ms in half the width, on a model of 2 x 7 of them and a
    head: a rank's step takes 15 x 0.25 ms less, but for what else is cut in half, next to nothing."""
    whole_shapes = set(linear_modules(_tiny(tiny_folder)))

    def planted(linears: Mapping[Any, Sequence[Any]], *_: object, **__: object) -> dict[Any, tuple[float, ...]]:
        return {key: (1e-3 if key in whole_shapes else 0.75e-3,) for key in linears}

    monkeypatch.setattr("profiler.measure.kernels.replay_linears", planted)
    profiler.profile(
        str(tiny_folder), prompt_lens=[8], batch_sizes=[1, 2], new_tokens=8, budget_s=0.5, no_levers=True, device="cpu",
        out=tmp_path / "run",
    )  # fmt: skip
    listener = Told()
    wanted, free = ForecastRequest(prompt_lens="8", batch_sizes="1"), RankOptions("2", "0,1e9")
    answer, _ = forecast_ranks(str(tmp_path / "run"), "", wanted, free, TODAY, listener)
    assert listener.stages == ["replaying linears of one of 2 ranks beside whole ones, 10.0 s"]
    assert answer.notes[0].startswith("A rank's linears were replayed here")
    known = run_facts(tmp_path / "run")
    decode = next(cell for cell in answer.cells if cell.phase == "decode")
    steps = StepArrays.of([CellKey("decode", Cell(1, 8, 8))])
    forecast = known.forecast(steps)
    unexplained = float(forecast.latency_s[0] / forecast.terms.total_s[0])
    saved_s = decode.times[0].latency_s - decode.times[1].latency_s
    assert saved_s / unexplained == pytest.approx(15 * 0.25e-3, rel=0.02)

    monkeypatch.setattr(ForeignLoad, "cores", lambda _: 64.0)
    printed = roofscope("forecast", str(tmp_path / "run"), "--tp", "2,4", "--link", "pcie4x16", "--plain")
    assert printed.code == 0, printed.err
    assert [line.split()[5] for line in printed.err.splitlines()] == ["2", "4"], "each number of ranks is told"
    words = " ".join(printed.out.split())
    assert "A rank's linears were replayed here" in words
    assert "Meanwhile others keep 64.0 of" in words


class Told(QuietListener):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)


def _tiny(folder: Path) -> torch.nn.Module:
    from profiler.loading.config import load_config
    from profiler.loading.meta_model import build_on_meta
    from profiler.loading.source import resolve

    return build_on_meta(load_config(resolve(str(folder))), torch.float32)
