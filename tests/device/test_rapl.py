"""Energy counters of Linux: they wrap, and a machine has several packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.device.telemetry import Rapl

RANGE_UJ = 262_143_328_850
"""The range of a Xeon's package: about 2^32 units of 2^-14 J, or 262,144 J."""


def zone(root: Path, number: str, name: str, energy_uj: int, range_uj: int | None = RANGE_UJ) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir()
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    if range_uj is not None:
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder


def used_j(counter: Rapl, *zones: tuple[Path, int]) -> float | None:
    """Joules between two readings, with these values of the zones at the second."""
    before_j = counter.energy_j()
    for folder, energy_uj in zones:
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
    after_j = counter.energy_j()
    return None if before_j is None or after_j is None else after_j - before_j


def test_all_packages_count_and_neither_their_parts_nor_the_platform(tmp_path: Path) -> None:
    """3 J of one package and 4 J of the other; the cores' 2 J are part of it, and the platform's 9 J contain both."""
    folders = [
        zone(tmp_path, number, name, 10_000_000)
        for number, name in (("0", "package-0"), ("1", "package-1"), ("0:0", "core"), ("2", "psys"))
    ]
    moved = zip(folders, (13_000_000, 14_000_000, 12_000_000, 19_000_000), strict=True)
    assert used_j(Rapl(tmp_path), *moved) == pytest.approx(7.0)


def test_a_counter_that_wraps_continues(tmp_path: Path) -> None:
    """0.32885 J up to its range plus 1 J after it is 1.32885 J; the next 2 J count as usual."""
    package = zone(tmp_path, "0", "package-0", RANGE_UJ - 328_850)
    counter = Rapl(tmp_path)
    assert used_j(counter, (package, 1_000_000)) == pytest.approx(1.32885, abs=1e-4)
    assert used_j(counter, (package, 3_000_000)) == pytest.approx(2.0, abs=1e-4)


def test_no_package_or_an_unreadable_one_gives_no_energy(tmp_path: Path) -> None:
    assert Rapl(tmp_path).energy_j() is None
    zone(tmp_path, "0", "package-0", 1)
    (zone(tmp_path, "1", "package-1", 1) / "energy_uj").unlink()
    assert Rapl(tmp_path).energy_j() is None
