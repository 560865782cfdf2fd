"""Tables of devices: ceilings next to their datasheet, a link with what was planted."""

from __future__ import annotations

import json
import re

import pytest
from docs.schemas import assert_follows
from made_runs import ceiling

from profiler.data.datasheets import gpus
from profiler.data.links import Link, MessageTime, fit_link
from profiler.facts.ceilings import Ceilings
from profiler.json_document import json_text
from profiler.report.blocks import TextTable
from profiler.report.device import ceilings_table, gpus_table, link_document, link_lines, link_table
from profiler.report.terminal import rich_table, screen


def printed(capsys: pytest.CaptureFixture[str], table: TextTable) -> list[str]:
    screen().print(rich_table(table))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_ceiling_is_next_to_its_datasheet(capsys: pytest.CaptureFixture[str]) -> None:
    ceilings = Ceilings({"float32": ceiling(8e12)}, {"read": ceiling(1.5e11)}, 1 << 30, True, launch={"host_s": 4e-6})
    lines = printed(capsys, ceilings_table(ceilings, {"float32": 1e13, "bandwidth": 3e11}))
    assert "float32 8.00 TFLOP/s 7.20 T to 8.80 T 80 % - 8 by hand" in lines
    assert "read 150 GB/s 135 G to 165 G 50 % - 8 by hand" in lines
    assert "launch, host 4.00 µs - one tiny kernel" in lines
    assert "read 150 GB/s 135 G to 165 G - - 8 by hand" in printed(capsys, ceilings_table(ceilings, {}))


def test_every_card_is_one_line_of_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, gpus_table(gpus()))
    assert "T4 16 320 0.254 8.10 - 65.0 - - 130 203 70" in lines
    # A shown figure is marked if sources differ on it. Sources differ on the L2 of an RTX A5000, which is not shown.
    for gpu in gpus():
        # The memory follows the name, because RTX 4070 is also the start of another name.
        [line] = [line for line in lines if re.match(rf"{re.escape(gpu.gpu)}( [?])?( [0-9.-]+){{11}}$", line)]
        if gpu.gpu in ("L40", "RTX A5000"):
            assert ("?" in line) == (gpu.gpu == "L40")


ALPHA_S, BUS_BYTES_PER_S, RANKS = 20e-6, 200e9, 4


def planted() -> Link:
    """Return the fit to all-reduces of 4 ranks, which send 2 x 3/4 of their bytes."""
    sizes = [1 << power for power in range(10, 27)]
    points = [MessageTime(RANKS, size, ALPHA_S + 1.5 * size / BUS_BYTES_PER_S) for size in sizes]
    return fit_link("planted", points, "arithmetic")


def test_the_document_has_the_rates_of_nccl_tests() -> None:
    document = link_document(planted())
    assert_follows("ceilings-link", json.loads(json_text(document)))
    assert document.ranks == RANKS
    assert document.alpha_s == pytest.approx(ALPHA_S)
    largest = document.points[-1]
    assert largest.bus_bytes_per_s == pytest.approx(1.5 * largest.alg_bytes_per_s)
    assert largest.fitted_s == pytest.approx(largest.seconds)
    assert len(link_table(document).rows) == 17
    text = " ".join(link_lines(document))
    assert "20.0 µs" in text
    assert "below 2.54 MiB wait mostly for latency" in text
    assert text.endswith("--tp 4 --link 20.0,200")
