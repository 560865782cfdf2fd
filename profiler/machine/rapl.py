"""The energy that a machine's processors count themselves (RAPL), by Linux's powercap files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Rapl:
    """Joules of all packages together, each counter unwrapped where it begins anew.

    `energy_uj` counts up to `max_energy_range_uj` (Documentation/power/powercap/powercap.rst), which takes from minutes
    to hours. Zones within a package (intel-rapl:0:0) are parts of it, and the platform's own zone (`psys`) holds it.
    """

    root: Path = Path("/sys/class/powercap")
    _packages: list[Path] = field(init=False)
    _last_uj: dict[Path, int] = field(default_factory=dict)
    _wrapped_uj: int = 0

    def __post_init__(self) -> None:
        self._packages = sorted(zone for zone in self.root.glob("intel-rapl:*") if _name(zone).startswith("package"))

    def energy_j(self) -> float | None:
        """Joules since some fixed moment; None without a package, where one cannot be read, or where a counter has
        begun anew and its range is not told."""
        try:
            before, self._last_uj = self._last_uj, {zone: _uj(zone / "energy_uj") for zone in self._packages}
            for zone, now_uj in self._last_uj.items():
                if now_uj < before.get(zone, now_uj):
                    self._wrapped_uj += _uj(zone / "max_energy_range_uj")
        except (OSError, ValueError):
            return None
        return (sum(self._last_uj.values()) + self._wrapped_uj) / 1e6 if self._packages else None


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text()
    except OSError:
        return ""


def _uj(file: Path) -> int:
    return int(file.read_text())
