"""Every picture of a run: drawn from the folder only, not blank, not cut off."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from cases import slow_except
from made_runs import PRECISIONS, REFERENCE, WHOLE, key, result, whole_run
from matplotlib.axes import Axes

from profiler.errors import RequestError
from profiler.report.plots import PLOTS, draw, save_figure
from profiler.report.plots.style import styled
from profiler.store.folder import Run, read_run

ENGINES = ("eager", "graph")
H100 = read_run(REFERENCE / "mistral-7b-h100")


@pytest.mark.parametrize("name", slow_except(("roofline", "map"), PLOTS))
def test_a_picture_is_neither_blank_nor_cut_off(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.png"
    save_figure(draw([H100], name), path)
    pixels = matplotlib.image.imread(path)[:, :, :3]
    assert pixels.shape[1] > 900
    dark = (pixels < 0.5).any(axis=2)
    assert 0.002 < dark.mean() < 0.9, "too few or too many dark pixels"
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (border > 0.99).all(), "something touches the edge"


def test_every_point_lies_within_the_axes() -> None:
    """Every cell of the run is visible on the roofline, and every decode twice over the batch."""
    for name in ("roofline", "throughput"):
        figure = draw([read_run(WHOLE)], name)
        points = 0
        for axes in figure.axes:
            (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
            for line in axes.lines:
                if line.get_marker() in ("None", "", None):
                    continue
                x, y = (np.asarray(values, dtype=float) for values in line.get_data())
                assert ((x >= x_low) & (x <= x_high) & (y >= y_low) & (y <= y_high)).all(), name
                points += len(x)
        assert points >= 32, name


@pytest.mark.parametrize("name", ["roofline", "map"])
def test_text_does_not_overlap(name: str) -> None:
    figure = draw([read_run(WHOLE)], name)
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def _spans(axes: Axes) -> list[tuple[float, float]]:
    return [(round(bar.get_y(), 6), round(bar.get_y() + bar.get_height(), 6)) for bar in axes.patches]


def test_a_step_rises_term_by_term_to_its_time() -> None:
    """4.8 ms of weights, 15.5 ms of overhead and -0.3 ms unexplained: 20 ms. Terms below 0.2 % are not drawn."""
    terms = {"weights_s": 4.8e-3, "kv_s": 3e-5, "overhead_s": 15.5e-3, "unexplained_s": -3e-4}
    [axes] = draw([replace(whole_run(), results=(result(key(), 20e-3, **terms),))], "waterfall").axes
    assert _spans(axes) == [(0, 4.8), (4.8, 20.3), (20, 20.3), (0, 20)]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["weights", "overhead", "unexplained", "measured"]


def test_the_smallest_step_of_each_engine_is_on_one_scale() -> None:
    """Of eager and graph at batch 1 and 2, both at batch 1; prefills are no steps of it."""
    keys = [key(phase, batch, engine=name) for phase in ("prefill", "decode") for batch in (1, 2) for name in ENGINES]
    run = replace(whole_run(), results=tuple(result(of, 20e-3 if of.cell.engine == "eager" else 8e-3) for of in keys))
    eager, graph = draw([run], "waterfall").axes
    assert [axes.get_title(loc="left") for axes in (eager, graph)] == ["decode 1 x 64", "decode 1 x 64 (graph)"]
    assert eager.get_ylim() == graph.get_ylim() == (0, pytest.approx(21))
    assert _spans(graph)[-1] == (0, 8)


def test_a_map_names_the_regime_and_the_speed_of_each_cell() -> None:
    cells = [result(key("decode", batch), 1e-2, regime=regime) for batch, regime in ((1, "memory-bound"), (8, "mixed"))]
    [axes] = draw([replace(whole_run(), results=tuple(cells))], "map").axes
    assert {text.get_text() for text in axes.texts} == {"memory\n100/s", "mixed\n800/s"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["8", "1"], "the larger batch is above"


def test_a_band_is_the_interval_of_each_time() -> None:
    """A step of 10 ms has its interval of 1 % as a band of 9.9 to 10.1 ms, and its median as the line."""
    cells = [result(key("decode", batch), seconds) for batch, seconds in ((1, 10e-3), (2, 20e-3))]
    _, time = draw([replace(whole_run(), results=tuple(cells))], "throughput").axes
    assert [round(value, 6) for value in time.lines[0].get_ydata()] == [10, 20]
    [band] = time.collections
    assert {round(value, 6) for value in band.get_paths()[0].vertices[:, 1]} == {9.9, 10.1, 19.8, 20.2}


def test_memory_is_counted_next_to_measured_only_where_a_cell_has_its_own_peak() -> None:
    """A CPU's peak is that of the whole process."""
    for run, kinds in ((H100, {"counted", "measured peak"}), (whole_run(), {"counted"})):
        [axes] = draw([run], "memory").axes
        assert {text.get_text() for text in axes.get_legend().get_texts()} == {*kinds, "the device's memory"}
        evidence = run.document.evidence[0]
        assert any(bar.get_width() == evidence.predicted_peak_memory_bytes for bar in axes.patches)


def test_a_bar_is_at_the_place_of_its_segments_and_the_legend_names_them() -> None:
    """60 % weights, 50 % overhead and a residual of -10 %."""
    cell = result(key(), 1.0, weights_s=0.6, overhead_s=0.5, unexplained_s=-0.1)
    [axes] = draw([replace(read_run(WHOLE), results=(cell,))], "breakdown").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["weights", "overhead", "unexplained"]
    drawn = {(round(bar.get_x()), round(bar.get_width())) for bar in axes.patches if bar.get_width() > 0}
    assert drawn == {(0, 60), (60, 50), (-10, 10)}


XEON, EPYC, MISTRAL = (
    read_run(REFERENCE / name) for name in ("smollm2-135m-xeon", "smollm2-135m-zen4", "mistral-7b-nf4-xeon")
)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def _legend(name: str, *runs: Run) -> list[str]:
    figure = draw(runs, name)
    legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
    return [text.get_text() for text in legend.get_texts()]


def test_several_runs_are_lines_that_name_what_differs() -> None:
    """Names have the precision, the machine if machines differ, and the folder if two runs are equal."""
    none, nf4 = (read_run(PRECISIONS / name) for name in ("none", "nf4"))
    assert _legend("throughput", none, nf4) == ["float32", "bfloat16, nf4"]
    assert draw([none, nf4], "throughput").get_suptitle() == "smollm2-135m"
    assert _legend("throughput", XEON, EPYC) == ["float32 on Intel(R) Xeon(R) Processor", "float32 on AMD EPYC"]
    zen5 = read_run(REFERENCE / "smollm2-135m-zen5-float32")
    assert _legend("throughput", EPYC, zen5) == ["float32 (smollm2-135m-zen4)", "float32 (smollm2-135m-zen5-float32)"]


@pytest.mark.parametrize(
    ("runs", "name", "says"),
    [
        ([XEON, EPYC], "breakdown", "only throughput draws several"),
        ([XEON, MISTRAL, EPYC], "throughput", r"not of smollm2-135m and mistral-7b-v0\.1"),
    ],
)
def test_a_picture_that_these_runs_do_not_have_is_refused(runs: list[Run], name: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        draw(runs, name)


def test_fonts_with_wide_characters_are_used_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fonts = [SimpleNamespace(name=name) for name in ("Noto Sans CJK SC", "DejaVu Sans")]
    monkeypatch.setattr("profiler.report.plots.style.fontManager", SimpleNamespace(ttflist=fonts))
    with styled():
        assert plt.rcParams["font.family"] == ["sans-serif", "Noto Sans CJK SC"]
