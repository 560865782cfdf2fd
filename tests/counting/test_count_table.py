"""The output of `roofscope count`: whole numbers, and a line for each GPU without room for the step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from profiler.count.step_text import count_sections
from profiler.counting.count import StepCount, count
from profiler.counting.document import count_csv, count_document
from profiler.json_document import json_text
from profiler.report.console import screen
from profiler.report.terminal import print_sections


@pytest.fixture(scope="module")
def counted() -> StepCount:
    """Count a decode step of Llama-3.1-70B: 70.6 billion weights of 16 bits do not fit on a T4."""
    return count("llama-3.1-70b", dtype="bfloat16", gpu_names="T4,H200 SXM")


def test_a_gpu_without_room_gets_a_line_and_no_floor(counted: StepCount, capsys: pytest.CaptureFixture[str]) -> None:
    print_sections(count_sections(counted, None), screen())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    # The step needs 70,553,706,496 parameters of 2 bytes, 80 layers x 8 heads x 128 x 2 x 2 bytes x 513 tokens of
    # cache, and workspace. The driver reports 15.6 GB: a context takes 0.45 GB, and 2 % are lost between blocks.
    [refusal] = [line for line in lines if "T4" in line]
    assert refusal.startswith("T4: does not fit; the step needs 142 GB, the GPU has room for 14.9 GB; fewer bits")
    # The floor is 139 GB read once at 4.8 TB/s; the ridge is 989.4 TFLOP/s over 4.8 TB/s.
    [h200] = [line.split() for line in lines if line.startswith("H200")]
    assert h200[:3] + h200[5:] == ["H200", "SXM", "206", "memory", "141", "GB", "147", "GB"]
    assert 28.5 < float(h200[3]) < 29.5
    assert max(map(len, lines)) <= 100


def test_without_a_gpu_with_room_there_is_no_table(counted: StepCount, capsys: pytest.CaptureFixture[str]) -> None:
    print_sections(count_sections(replace(counted, gpus=counted.gpus[:1]), None), screen())
    out = capsys.readouterr().out
    assert "ridge" not in out
    assert "T4: does not fit" in out


def test_numbers_are_whole(counted: StepCount, capsys: pytest.CaptureFixture[str]) -> None:
    print_sections(count_sections(counted, None), screen())
    out = capsys.readouterr().out
    whole = json.loads(json_text(count_document(counted)))
    assert f"{whole['model_flops']:,} FLOPs over {whole['bytes']['total']:,} bytes, intensity 1." in out
    head = next(line for line in count_csv(counted).splitlines() if line.startswith("lm_head,"))
    # One token: 2 x 8192 x 128256 FLOPs.
    assert head.split(",")[2:5] == ["1", "bfloat16", str(2 * 8192 * 128256)]
