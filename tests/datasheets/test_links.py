"""A link's latency and bandwidth: fitted to known links, from published ones, and from `--link`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from profiler.data import links
from profiler.data.datasheets import gpus
from profiler.data.links import MessageTime, bus_share, fit_link, published_link, published_links

KIB = 1 << 10
SIZES = [KIB << n for n in range(17)]
ROWS = list(csv.DictReader(Path(links.__file__).with_name("links.csv").read_text().splitlines()))


def test_the_formulas_are_those_of_nccl_tests() -> None:
    """nccl-tests prints algbw and busbw; rows of its log for 8 H100 (aws-samples, links.csv): 16 MiB in 124 us."""
    point = MessageTime(8, 16 << 20, 124e-6)
    assert point.alg_bytes_per_s / 1e9 == pytest.approx(135.33, abs=0.05)
    assert point.bus_bytes_per_s / 1e9 == pytest.approx(236.82, abs=0.05)
    assert bus_share("all_gather", 8) == 7 / 8
    assert bus_share("all_reduce", 2) == 1


@pytest.mark.parametrize(("alpha_s", "per_s", "ranks"), [(16e-6, 450e9, 8), (500e-6, 2e9, 2), (0.0, 1e9, 4)])
def test_a_planted_link_is_found(alpha_s: float, per_s: float, ranks: int) -> None:
    points = [MessageTime(ranks, size, alpha_s + size * bus_share("all_reduce", ranks) / per_s) for size in SIZES]
    link = fit_link("planted", points, "")
    assert link.alpha_s == pytest.approx(alpha_s, abs=1e-9)
    assert link.bus_bytes_per_s == pytest.approx(per_s, rel=1e-6)


def test_published_rows_have_sources_and_agree_with_their_bandwidth() -> None:
    assert len(ROWS) > 60
    for row in ROWS:
        assert row["source"].startswith(("github:", "https://")), row
        if row["time_us"] and row["busbw_gb_per_s"]:
            point = MessageTime(int(row["gpu_count"]), int(row["message_bytes"]), float(row["time_us"]) * 1e-6)
            printed = float(row["busbw_gb_per_s"])
            assert point.bus_bytes_per_s / 1e9 == pytest.approx(printed, rel=0.02, abs=0.011), row


def _first_bytes(name: str, ranks: int, own_process: bool = True) -> list[float]:
    """Seconds of the published all-reduces of at most 16 KiB, with or without one process per GPU."""
    rows = [row for row in ROWS if (row["name"], row["gpu_count"]) == (name, str(ranks))]
    shared = ("-g 8", "all_reduce_bench")  # the time has the launches of eight GPUs, or of torch
    chosen = [row for row in rows if any(word in row["software"] for word in shared) != own_process]
    return [1e-6 * float(row["time_us"]) for row in chosen if row["time_us"] and int(row["message_bytes"]) <= 16 * KIB]


@pytest.mark.parametrize(
    ("name", "ranks", "seconds"),
    [
        ("nvlink4", 8, 15e-6), ("pcie4x16", 2, 8.6e-6), ("pcie5x16", 4, 12.6e-6), ("pcie5x16", 8, 20.6e-6),
        ("nvlink3", 2, 7.8e-6),
    ],
)  # fmt: skip
def test_latency_is_what_nccl_assumes_and_near_every_published_one(name: str, ranks: int, seconds: float) -> None:
    """By hand from tuning.cc of NCCL: 6.6 us + 2(n-1) hops of 0.6 us (NVLink) or 1 us (PCIe)."""
    alpha_s = published_link(name, ranks).alpha_s
    assert alpha_s == pytest.approx(seconds)
    published = _first_bytes(name, ranks)
    assert published or name == "nvlink3"
    assert all(0.83 < alpha_s / published_s < 1.21 for published_s in published)


def test_the_launches_of_one_process_are_no_latency_of_the_link() -> None:
    """With one process for eight A100, a message takes 36 us, three times the hops (NVIDIA/nccl-tests issue 123)."""
    published = _first_bytes("nvlink3", 8, own_process=False)
    assert min(published) > 2 * published_link("nvlink3", 8).alpha_s


def test_named_links_are_near_large_messages() -> None:
    """From 4 MiB on, named links are within 40 % of published times, and in the order of their generations."""
    for name in published_links():
        for ranks in (2, 4, 8):
            link = published_link(name, ranks)
            for point in link.points:
                if point.nbytes >= 4 << 20:
                    assert 0.6 < link.seconds("all_reduce", point.nbytes, point.ranks) / point.seconds < 1.4, point
    large = {name: published_link(name, 8).seconds("all_reduce", 16 << 20, 8) for name in published_links()}
    assert large["nvlink5"] < large["nvlink4"] < large["nvlink3"] < large["pcie5x16"] < large["pcie4x16"]


def test_a_datasheets_link_is_the_published_one_of_its_kind() -> None:
    """`NVL4 900` of a datasheet is NVLink 4. PCIe 3 and the first NVLinks have no published figure."""
    kinds = {(sheet.link.split(" ")[0], sheet.published_link) for sheet in gpus() if sheet.published_link}
    assert kinds == {
        ("NVL3", "nvlink3"), ("NVL4", "nvlink4"), ("NVL5", "nvlink5"), ("PCIe4", "pcie4x16"), ("PCIe5", "pcie5x16"),
        ("xGMI", "xgmi"),
    }  # fmt: skip
    assert not {sheet.gpu for sheet in gpus() if not sheet.published_link} & {"H100 SXM", "A100 80GB SXM", "L4"}
