"""Datasheet peaks compared with arithmetic; cards, their links and their prices."""

import csv
import datetime
import re
import statistics
from pathlib import Path

import pytest

from profiler.data import links, prices
from profiler.data.datasheets import Datasheet, find, gpu_called, gpus
from profiler.data.links import MessageTime, bus_share, fit_link, published_link, published_links
from profiler.data.prices import Price, newest_prices
from profiler.errors import RequestError

MIB = 2**20
SHEETS = {gpu.gpu: gpu for gpu in gpus()}


def test_each_row_has_a_unique_name_a_driver_name_and_a_source() -> None:
    assert len(SHEETS) == len(gpus())
    for gpu in gpus():
        assert all(name.strip() for name in gpu.nvml_name.split("|")), gpu.gpu
        assert gpu.source, gpu.gpu


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.gpu)
def test_peak_is_units_times_clock(gpu: Datasheet) -> None:
    """SMs x dense FLOPs per clock x rated clock, within 2 %; a 2:4-sparse figure would be twice that.

    Float4 runs at four times the 16-bit rate: 6.1 times on the 300s with their wider float4 units, 8 on GeForce, where
    16-bit products run at half rate. A driver keeps at most an eighth of the memory: ECC takes a sixteenth of GDDR. A
    GPU that shares its computer's memory gets two thirds of it or more.
    """
    dense = gpu.sm_count * gpu.fp16_flops_per_clock_per_sm * gpu.rated_clock_hz
    assert gpu.peak_fp16_flops_per_s == pytest.approx(dense, rel=0.02)
    if gpu.peak_bf16_flops_per_s:
        assert gpu.peak_bf16_flops_per_s == gpu.peak_fp16_flops_per_s
    if gpu.peak_fp8_flops_per_s:
        assert gpu.peak_fp8_flops_per_s == pytest.approx(2 * gpu.peak_fp16_flops_per_s, rel=0.02)
    if gpu.peak_tf32_flops_per_s:
        assert gpu.peak_tf32_flops_per_s == pytest.approx(gpu.peak_fp16_flops_per_s / 2, rel=0.02)
    if gpu.peak_fp4_flops_per_s:
        times = 8 if is_geforce(gpu) else 6.1 if gpu.compute_capability == "10.3" else 4
        assert gpu.peak_fp4_flops_per_s == pytest.approx(times * (gpu.peak_fp16_flops_per_s or 0), rel=0.03)
    assert (0.66 if gpu.memory_sizes_gib else 0.875) <= gpu.usable_bytes / gpu.memory_bytes <= 1.0
    assert gpu.usable_source


def test_what_a_gpu_sustains_is_a_rate_at_its_power_limit_and_no_burst() -> None:
    """A matmul cannot beat SMs x FLOPs per clock at the clock during it.

    That clock is printed by the source next to each rate; the T4's is its base clock. An H100 and an H200 are the same
    units at the same 700 W, so their rates are near each other.
    """
    clocks_hz = {"H100 SXM": 1.36e9, "H200 SXM": 1.46e9, "A100 80GB SXM": 1.235e9, "L40S": 1.215e9, "RTX 4090": 2.48e9}
    clocks_hz |= {"A40": 1.3e9, "T4": 0.585e9}
    sustained = {gpu.gpu: gpu.sustained_flops_per_s for gpu in gpus() if gpu.sustained_flops_per_s}
    assert sustained.keys() == clocks_hz.keys()
    for name, flops_per_s in sustained.items():
        per_clock = SHEETS[name].sm_count * SHEETS[name].fp16_flops_per_clock_per_sm
        assert 0.8 < flops_per_s / (per_clock * clocks_hz[name]) < 1.01, name
        assert SHEETS[name].sustained_source
    assert sustained["H200 SXM"] == pytest.approx(sustained["H100 SXM"], rel=0.05)


# Results per clock and SM in float32 and float64 (CUDA C++ programming guide, "Arithmetic Instructions"; AMD's CDNA
# whitepapers, from the third on counting packed float32).
CORES = {
    **dict.fromkeys(("5.2", "6.1"), (128, 4)),
    **dict.fromkeys(("6.0", "7.0", "8.0"), (64, 32)),
    **dict.fromkeys(("8.6", "8.7", "8.9", "10.3", "11.0", "12.0", "12.1"), (128, 2)),
    **dict.fromkeys(("9.0", "10.0", "gfx942", "gfx950"), (128, 64)),
    "7.5": (64, 2),
    "gfx90a": (64, 64),
}
# Sold with float64 cut to about 1 TFLOP/s.
FLOAT64_CUT = {"H800 SXM", "H800 PCIe", "H20", "H20-3e"}
# Integer units cut (GB300, B300), at the 16-bit rate (CDNA 2), or only on ordinary cores (dp4a of Volta).
INT8_APART = {"7.0", "10.3", "gfx90a"}


def is_geforce(gpu: Datasheet) -> bool:
    """A card whose matrix units run at half rate when they accumulate 16-bit products in float32, but not int8 ones."""
    return re.fullmatch(r"RTX [2-5]0\d0( Ti| SUPER| D| \d+GB)*", gpu.gpu) is not None


@pytest.mark.parametrize("gpu", [gpu for gpu in gpus() if gpu.compute_capability in CORES], ids=lambda gpu: gpu.gpu)
def test_peaks_of_ordinary_cores_and_int8(gpu: Datasheet) -> None:
    """One multiply-add per core and clock; from Hopper on, ordinary cores are rated up to 20 % above matrix units."""
    fp32, fp64 = (2 * cores * gpu.sm_count * gpu.rated_clock_hz for cores in CORES[gpu.compute_capability])
    faster = 1.2 if gpu.compute_capability in ("9.0", "10.0", "10.3") else 1.04
    assert 0.98 < (gpu.peak_fp32_flops_per_s or 0) / fp32 < faster
    if gpu.peak_fp64_flops_per_s and gpu.gpu not in FLOAT64_CUT:
        assert 0.98 < gpu.peak_fp64_flops_per_s / fp64 < faster
    if gpu.peak_int8_ops_per_s and gpu.compute_capability not in INT8_APART:
        times = 4 if is_geforce(gpu) else 2
        assert gpu.peak_int8_ops_per_s == pytest.approx(times * gpu.peak_fp16_flops_per_s, rel=0.03)


def test_known_traps() -> None:
    assert SHEETS["RTX PRO 6000 Blackwell Server"].bandwidth_bytes_per_s == 1597e9
    assert (SHEETS["GB200"].sm_count, SHEETS["GB300"].sm_count, SHEETS["B300 SXM"].sm_count) == (152, 152, 148)
    assert SHEETS["MI250X (one die)"].memory_bytes == 64 << 30


REPORTED = list(csv.DictReader(Path(__file__).with_name("device_names.csv").read_text(encoding="utf-8").splitlines()))
"""Names reported by real drivers, each with the reported memory and units, the correct row, and its source.

A slice of a card, a modified card, a laptop part, or a card without a known datasheet has no row.
"""


@pytest.mark.parametrize("row", REPORTED, ids=lambda row: " ".join([*row.values()][:3]))
def test_every_name_from_a_driver_finds_its_row_or_none(row: dict[str, str]) -> None:
    if row["memory_mib"]:
        memories = [int(row["memory_mib"]) * MIB]
    elif row["gpu"]:
        memories = [SHEETS[row["gpu"]].memory_bytes]
    else:  # no row, for any memory size
        memories = [gpu.memory_bytes for gpu in gpus()]
    for memory in memories:
        sheet = find(row["reported_name"], memory, int(row["sm_count"]) if row["sm_count"] else None)
        assert (sheet.gpu if sheet else "") == row["gpu"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("thor", "Jetson AGX Thor T5000"), ("T5000", "Jetson AGX Thor T5000"), ("A10", "A10"),
        ("RTX_4090", "RTX 4090"), ("rtx3060ti", "RTX 3060 Ti"), ("A100-80GB-SXM", "A100 80GB SXM"),
        ("gh200 96", "GH200 96GB"), ("Apple M3 Max", "M3 Max"), ("m4-pro", "M4 Pro"), ("M4", "M4"), ("M40", "M40 12GB"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"), ("RX 9070", "RX 9070"), ("7900xtx", "RX 7900 XTX"),
        ("B580", "Arc B580"), ("A770", "Arc A770"), ("orin nx 16gb", "Jetson Orin NX 16GB"), ("R9700", "AI PRO R9700"),
        ("Ryzen AI Max+ 395", "Strix Halo"), ("gfx1151", "Strix Halo"), ("Radeon 8060S", "Strix Halo"),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "Strix Halo"), ("Tesla V100 SXM3", "V100 SXM3 32GB"),
        ("RTX 2080", "RTX 2080"), ("Tesla T4", "T4"), ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)  # fmt: skip
def test_words_of_only_one_row_name_it(name: str, row: str) -> None:
    assert gpu_called(name).gpu == row


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("RTX 2000", "Did you mean RTX 2000 Ada?"), ("NVIDIA GeForce RTX 5060", "Did you mean RTX 5060 Ti 16GB?"),
        ("RTX 5000", "Did you mean RTX 5000 Ada?"), ("7800", "Did you mean RX 7800 XT?"),
        ("RTX 6000", "Which one: Quadro RTX 6000, RTX 6000 Ada, RTX PRO 6000 Blackwell,"),
        ("Tesla P100", "Which one: P100 PCIe 16GB, P100 SXM2 16GB, P100 PCIe 12GB?"),
        ("T5", "T4"), ("H1", "H100 SXM"), ("96GB", "GH200 96GB"), ("144", "`roofscope gpus`"),
    ],
)  # fmt: skip
def test_a_product_that_goes_on_a_part_of_a_number_and_a_memory_size_are_no_names(name: str, near: str) -> None:
    """T5 is more likely a mistyped T4 than a T5000, and other cards have 96 GB, too."""
    with pytest.raises(RequestError, match=f"'{name}'.*{re.escape(near)}"):
        gpu_called(name)


@pytest.mark.parametrize(
    ("name", "row", "usable_mib"),
    [
        ("M2 Max 32GB", "M2 Max 32GB", 21845), ("Apple M3 Max (64 GB)", "M3 Max 64GB", 49152),
        ("M2 Max 96GB", "M2 Max 96GB", 73728), ("m4 max 36gb", "M4 Max 32-core 36GB", 27648),
        ("M3 Max 36GB", "M3 Max 30-core 36GB", 27648),
        ("Strix Halo 64GB", "Strix Halo 64GB", 49152), ("RTX 3090 24GB", "RTX 3090", 24248),
    ],
)  # fmt: skip
def test_its_memory_or_that_of_its_computer_may_follow_the_name_of_a_gpu(name: str, row: str, usable_mib: int) -> None:
    """Metal's limits, as llama.cpp prints them: 21845.34 MB of 32 GB (ollama issue 434), 73728 of 96 GB (3213)."""
    sheet = gpu_called(name)
    assert (sheet.gpu, sheet.usable_bytes // MIB) == (row, usable_mib)
    with pytest.raises(RequestError, match="the memory of the M3 Max is one of 36, 48, 64, 96, 128 GB"):
        gpu_called("M3 Max 100GB")


def test_gpus_at_home_have_their_makers_figures_and_no_price() -> None:
    """GB/s as lists quote Apple's announcements, and TFLOP/s by cores x clock; nobody rents them out by the hour."""
    gb_per_s = {
        "M1": 68.25, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800, "M2 Ultra": 800, "M3 Pro": 150, "M3 Max": 400,
        "M3 Ultra": 819, "M4": 120, "M4 Pro": 273, "M4 Max": 546, "M5": 153, "M5 Pro": 307, "M5 Max": 614,
        "RX 7900 XTX": 960, "Strix Halo": 256, "Jetson Orin NX 16GB": 102.4, "Arc B580": 456,
    }  # fmt: skip
    assert {name: SHEETS[name].bandwidth_bytes_per_s / 1e9 for name in gb_per_s} == gb_per_s
    assert SHEETS["RX 9070 XT"].peak_fp16_flops_per_s == pytest.approx(195e12, rel=0.01)  # AMD: 389 in fp8
    assert SHEETS["M1 Max"].peak_fp16_flops_per_s == pytest.approx(10.6e12, rel=0.01)
    assert not {"Apple", "Intel"} & {SHEETS[each.gpu].vendor for each in prices.prices()}


def test_each_product_has_a_gpu_of_the_table() -> None:
    for row in csv.DictReader(Path(links.__file__).with_name("product_names.csv").read_text().splitlines()):
        assert gpu_called(row["product"]).gpu == row["gpu"]


KIB = 1 << 10
SIZES = [KIB << n for n in range(17)]
ROWS = list(csv.DictReader(Path(links.__file__).with_name("links.csv").read_text().splitlines()))


def test_the_formulas_are_those_of_nccl_tests() -> None:
    """nccl-tests prints algbw and busbw; rows of its log for 8 H100 (aws-samples, links.csv): 16 MiB in 124 µs."""
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


@pytest.mark.parametrize(
    ("name", "ranks", "seconds"),
    [
        ("nvlink4", 8, 15e-6), ("pcie4x16", 2, 8.6e-6), ("pcie5x16", 4, 12.6e-6), ("pcie5x16", 8, 20.6e-6),
        ("nvlink3", 2, 7.8e-6),
    ],
)  # fmt: skip
def test_latency_is_what_nccl_assumes_and_near_every_published_one(name: str, ranks: int, seconds: float) -> None:
    """By hand from tuning.cc of NCCL: 6.6 µs + 2(n-1) hops of 0.6 µs (NVLink) or 1 µs (PCIe).

    The published all-reduces are those of at most 16 KiB with one process per GPU.
    """
    alpha_s = published_link(name, ranks).alpha_s
    assert alpha_s == pytest.approx(seconds)
    rows = [row for row in ROWS if (row["name"], row["gpu_count"]) == (name, str(ranks)) and row["time_us"]]
    shared = ("-g 8", "all_reduce_bench")  # the time has the launches of eight GPUs, or of torch
    chosen = [row for row in rows if not any(word in row["software"] for word in shared)]
    published = [1e-6 * float(row["time_us"]) for row in chosen if int(row["message_bytes"]) <= 16 * KIB]
    assert published or name == "nvlink3"
    assert all(0.83 < alpha_s / published_s < 1.21 for published_s in published)


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


def price(usd_per_h: float, date: str = "2026-10-01", provider: str = "one") -> Price:
    return Price("B200 SXM", provider, usd_per_h, price_date=date)


def test_the_newest_price_and_of_one_day_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [price(4.0, ""), price(4.5, "2026-09-30"), price(6.0), price(5.0, provider="two"), price(5.5)]
    for listed in (table, table[::-1]):
        monkeypatch.setattr(prices, "prices", lambda listed=listed: tuple(listed))
        assert newest_prices() == {"B200 SXM": table[3]}
    monkeypatch.setattr(prices, "prices", lambda: (price(4.2, ""), table[0]))
    assert newest_prices() == {"B200 SXM": table[0]}, "undated ones only where there is no other"


def test_prices_are_of_gpus_in_the_table_have_a_source_and_are_no_outliers() -> None:
    """A machine without its GPU costs a quarter of the whole. Prices of one GPU differ less than fivefold."""
    for each in prices.prices():
        assert each.gpu in {sheet.gpu for sheet in gpus()}
        assert each.price_source
        if each.price_date:
            datetime.date.fromisoformat(each.price_date)
        same_gpu = [other for other in prices.prices() if other.gpu == each.gpu]
        others = [other.usd_per_h for other in same_gpu if other.provider != each.provider]
        median = statistics.median(others) if len(others) > 1 else each.usd_per_h
        assert 0 < median / 5 <= each.usd_per_h <= 5 * median, each
