"""A new JSON tool is one row of `FORMATS`: its files are then read, and messages name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.errors import RequestError
from profiler.readers.detect import FORMATS, read_foreign, tools
from profiler.readers.formats import Client, Format, Steps

BATCHES = Format(
    tool="toybench",
    has=("toy.batch",),
    figures=Steps(
        batch_size="toy.batch",
        prompt_len="toy.tokens_in",
        new_tokens="toy.tokens_out",
        prefill="prompts_ms / prompts:ms",
        decode="step_ms:ms",
    ),
    settings={"model's name": "toy.model"},
)
LOADS = Format(
    tool="toyload",
    has=("requests",),
    figures=Client(
        prompt_len="tokens_in / requests",
        new_tokens="tokens_out / requests",
        output_per_s="tokens_out / elapsed_s",
        to_first="ttft_ms.median:ms | ttft_ms.mean:ms",
        per_token="tpot_ms.median:ms | tpot_ms.mean:ms",
    ),
)


@pytest.fixture(autouse=True)
def with_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.readers.detect.FORMATS", [BATCHES, LOADS, *FORMATS])


def test_its_figures_are_read_by_paths_of_keys(tmp_path: Path) -> None:
    """500 ms for ten prompts are 50 ms each. Repetitions of 19, 20 and 24 ms have a median of 20 ms."""
    toy = {"batch": 2, "tokens_in": 64, "tokens_out": 8, "model": "m"}
    (tmp_path / "f").write_text(json.dumps({"toy": toy, "prompts_ms": 500, "prompts": 10, "step_ms": [20, 19, 24]}))
    file = read_foreign(tmp_path / "f")
    found = [
        (figure.covers, figure.shape.batch_size, figure.shape.prompt_len, figure.shape.new_tokens)
        for figure in file.figures
    ]
    assert (file.tool, file.settings) == ("toybench", {"model's name": "m"})
    assert found == [("prefill", 2, 64, 8), ("decode", 2, 64, 8)]
    assert [figure.time.value for figure in file.figures] == pytest.approx([0.05, 0.02])
    assert file.figures[1].time.values == pytest.approx((0.02, 0.019, 0.024))


def test_so_are_those_of_a_load_generator(tmp_path: Path) -> None:
    """1,280 tokens in 2 s at 25 ms each on average are 16 at a time; the typical one takes 20 ms."""
    load = {"requests": 10, "tokens_in": 640, "tokens_out": 1280, "elapsed_s": 2}
    (tmp_path / "f").write_text(json.dumps({**load, "tpot_ms": {"median": 20, "mean": 25}}))
    [decode] = read_foreign(tmp_path / "f").figures
    assert (decode.shape.batch_size, decode.shape.prompt_len, decode.shape.new_tokens) == (16, 64, 128)
    assert decode.time.value == pytest.approx(0.02)


def test_messages_name_it(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('{"something": "else"}')
    assert tools().startswith("toybench, toyload, ")
    with pytest.raises(RequestError, match="toybench"):
        read_foreign(tmp_path / "f")
