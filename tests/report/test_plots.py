"""Every picture of a run: drawn from the folder alone, nothing blank, nothing cut off."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from profiler.errors import RequestError
from profiler.report.plots import PLOTS, save
from profiler.runstore import read_run

RUN = Path(__file__).parent.parent / "data" / "run_schema_1"


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_is_neither_blank_nor_cut_off(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.png"
    save(read_run(RUN), name, path)
    pixels = matplotlib.image.imread(path)[:, :, :3]
    assert pixels.shape[1] > 900
    dark = (pixels < 0.5).any(axis=2)
    assert 0.002 < dark.mean() < 0.9, "blank, or a blot"
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (border > 0.99).all(), "something touches the edge"


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_is_an_svg_where_the_name_says_so(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.svg"
    save(read_run(RUN), name, path)
    assert "<svg" in path.read_text()


def test_a_wrong_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"use roofline, map, split, throughput.*roofline"):
        save(read_run(RUN), "rofline", tmp_path / "x.png")


def test_plot_command(roofscope, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    found = roofscope("plot", str(RUN), "map", "--out", str(tmp_path / "map.svg"))
    assert found.code == 0, found.err
    assert (tmp_path / "map.svg").stat().st_size > 1000
    assert roofscope("plot", str(RUN), "map", "--out", str(tmp_path / "map.bmp")).code == 2
