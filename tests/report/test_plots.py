"""Every picture of a run: drawn from the folder only, not blank, not cut off."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from cases import slow_except
from made_runs import PRECISIONS, REFERENCE, WHOLE, key, result, whole_run, with_document
from matplotlib.figure import Figure

from profiler.errors import RequestError
from profiler.judge.cells import EngineDifference, columns_of
from profiler.report.plots import COMPARISONS, PLOTS, draw, save
from profiler.report.plots.style import font_families
from profiler.store.folder import Run, read_run

RUNS = sorted(file.parent for file in REFERENCE.glob("*/run.json"))
OF_A_RUN_ALONE = [name for name in PLOTS if name not in ("operators", "cost", "engines")]
"""Pictures of one run; costs (tests/rent) and several engines need other folders."""


@pytest.mark.parametrize("name", slow_except(("roofline", "precisions"), [*OF_A_RUN_ALONE, *COMPARISONS]))
def test_a_picture_is_neither_blank_nor_cut_off(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.png"
    save([read_run(WHOLE)], name, path)
    pixels = matplotlib.image.imread(path)[:, :, :3]
    assert pixels.shape[1] > 900
    dark = (pixels < 0.5).any(axis=2)
    assert 0.002 < dark.mean() < 0.9, "too few or too many dark pixels"
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert (border > 0.99).all(), "something touches the edge"


@pytest.mark.parametrize("name", slow_except(("roofline",), ["roofline", "intensity"]))
def test_a_picture_is_an_svg_if_its_name_ends_in_svg(name: str, tmp_path: Path) -> None:
    """The marks of logarithmic axes and of colour bars would need TeX, which is off."""
    path = tmp_path / f"{name}.svg"
    save([read_run(WHOLE)], name, path)
    picture = path.read_text()
    assert "<svg" in picture
    assert "$" not in picture


def test_every_point_lies_within_the_axes() -> None:
    """Every cell of the run is visible on the roofline, by batch and by depth."""
    for name in ("roofline", "throughput", "depth"):
        figure = draw([read_run(WHOLE)], name)
        points = 0
        for axes in figure.axes:
            (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
            for line in axes.lines:
                if line.get_marker() not in ("o", "s", "^", "D", "v"):
                    continue
                x, y = (np.asarray(values, dtype=float) for values in line.get_data())
                assert ((x >= x_low) & (x <= x_high) & (y >= y_low) & (y <= y_high)).all(), name
                points += len(x)
        assert points >= 32, name


def _assert_texts_apart(figure: Figure) -> None:
    """No text inside the axes overlaps another one."""
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        for index, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[index + 1 :])
    plt.close(figure)


@pytest.mark.parametrize("name", slow_except(("roofline", "map"), ["roofline", "intensity", "map", "steps"]))
def test_text_does_not_overlap(name: str) -> None:
    _assert_texts_apart(draw([read_run(WHOLE)], name))


@pytest.mark.slow
def test_names_of_several_devices_do_not_overlap() -> None:
    by_device = {run.document.device.name: run for run in map(read_run, RUNS)}
    assert len(by_device) >= 3
    _assert_texts_apart(draw(list(by_device.values()), "devices"))


def _two_engines(name: str, saves_s: float, half_width_s: float, **terms: float) -> Run:
    """A step of 20 ms of eager, and one of another engine that saves `saves_s`."""
    other = key(engine=name)
    ends = {"low_s": saves_s - half_width_s, "high_s": saves_s + half_width_s}
    difference = EngineDifference(**columns_of(other), against="eager", saves_s=saves_s, **ends, terms=terms)
    run = replace(whole_run(), results=(result(key(), 20e-3), result(other, 20e-3 - saves_s)))
    record = replace(run.document.engine, names=("eager", name), differences=(difference,))
    return with_document(run, engine=record)


def test_a_waterfall_of_engines_falls_from_one_time_to_the_other() -> None:
    """A step of 20 ms takes 14 ms without dispatch (-8) and copies (-1) but with an engine term (+3)."""
    run = _two_engines("vllm", 6e-3, 1e-3, dispatch_s=-8e-3, avoidable_s=-1e-3, engine_s=3e-3)
    [axes] = draw([run], "engines").axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "eager", "avoidable work", "dispatch", "engine", "vllm",
    ]  # fmt: skip
    spans = [(round(bar.get_y(), 6), round(bar.get_y() + bar.get_height(), 6)) for bar in axes.patches]
    assert spans == [(0, 20), (19, 20), (11, 19), (11, 14), (0, 14)]
    assert axes.get_ylim()[0] == 0


def test_a_waterfall_of_engines_draws_only_claims_and_says_where_its_axis_is_cut() -> None:
    """The axis is cut for a gain of 0.2 ms beyond noise; a gain of -0.1 to 0.5 ms is not drawn."""
    [axes] = draw([_two_engines("static", 2e-4, 1e-4, dispatch_s=-2e-4)], "engines").axes
    assert 18 < axes.get_ylim()[0] < 19.8
    assert "axis cut at 19" in axes.get_title(loc="left")
    with pytest.raises(RequestError, match="in 1 cell engines differ by no more than noise"):
        draw([_two_engines("static", 2e-4, 3e-4, dispatch_s=-2e-4)], "engines")


def test_a_bar_is_at_the_place_of_its_segments_and_the_legend_names_them() -> None:
    """60 % weights, 50 % dispatch and a residual of -10 %."""
    cell = result(key(), 1.0, weights_s=0.6, dispatch_s=0.5, unexplained_s=-0.1)
    [axes] = draw([replace(read_run(WHOLE), results=(cell,))], "split").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["weights", "dispatch", "unexplained"]
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


@pytest.mark.slow
def test_precisions_name_what_differs() -> None:
    """Names have the precision, the machine if machines differ, and the folder if two runs are equal."""
    none, nf4 = (read_run(PRECISIONS / name) for name in ("none", "nf4"))
    assert _legend("precisions", none, nf4) == ["float32", "bfloat16, nf4"]
    title = f"smollm2-135m on {none.document.device.name}"
    assert draw([none, nf4], "precisions").get_suptitle() == title
    assert _legend("precisions", XEON, EPYC) == ["float32, on Intel(R) Xeon(R) Processor", "float32, on AMD EPYC"]
    assert draw([XEON, EPYC], "precisions").get_suptitle() == "smollm2-135m"
    zen5 = read_run(REFERENCE / "smollm2-135m-zen5-float32")
    assert _legend("precisions", EPYC, zen5) == ["float32 (smollm2-135m-zen4)", "float32 (smollm2-135m-zen5-float32)"]
    first, second, *_ = _legend("devices", EPYC, zen5)
    assert "AMD EPYC (smollm2-135m-zen4): " in first
    assert "AMD EPYC (smollm2-135m-zen5-float32): " in second


@pytest.mark.parametrize(
    ("runs", "name", "says"),
    [
        ([XEON], "rofline", r"use roofline, operators, split.*roofline"),
        ([XEON], "engines", "no cell that two engines have stepped"),
        ([XEON, EPYC], "split", "precisions and devices"),
        ([XEON, MISTRAL, EPYC], "precisions", r"not of smollm2-135m and mistral-7b-v0\.1; `devices`"),
    ],
)
def test_a_picture_that_these_runs_do_not_have_is_refused(runs: list[Run], name: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        draw(runs, name)


def test_a_single_cell_is_named_once() -> None:
    [axes] = draw([replace(whole_run(), results=(result(key(), 20e-3),))], "roofline").axes
    assert [text.get_text() for text in axes.texts].count(key().cell.name) == 1


@pytest.mark.parametrize("intensity", [0.5, 2.0, 99.0, 1001.0])
def test_the_colours_of_a_single_cell_have_a_tick(intensity: float) -> None:
    run = replace(whole_run(), results=(result(key(), 20e-3, intensity=intensity),))
    figure = draw([run], "intensity")
    figure.canvas.draw()
    bar = figure.axes[-1]
    low, high = bar.get_ylim()
    assert low < intensity < high
    shown = [label.get_text() for label in bar.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert any(shown)
    assert not any("$" in text for text in shown), "a formula is shown as raw text"


@pytest.mark.slow
def test_a_name_that_no_font_has_draws_without_a_line_for_every_character(tmp_path: Path) -> None:
    run = whole_run()
    named = with_document(run, model=replace(run.document.model, id="通义千问"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save([named], "roofline", tmp_path / "x.png")
        save([named], "roofline", tmp_path / "x.svg")
    assert "通义千问" in (tmp_path / "x.svg").read_text(encoding="utf-8")


def test_fonts_with_wide_characters_are_used_if_installed() -> None:
    assert font_families(["DejaVu Sans", "Noto Sans CJK SC"]) == ["Noto Sans CJK SC"]
    assert font_families(["DejaVu Sans"]) == []
