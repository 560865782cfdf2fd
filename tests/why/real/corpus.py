"""Thirty real scripts, the expected findings of `roofscope why`, and the comparison of its answers with them."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.json"
"""The answers that the table of README.md in this folder shows."""


@dataclass(frozen=True)
class Cure:
    """A true cause of a script's slowness, and the edits that remove it."""

    finding: str
    because: str
    edits: Sequence[tuple[str, str]]
    before_s: float = math.nan
    after_s: float = math.nan

    @property
    def saves_s(self) -> float:
        """Seconds that the cure saved when it was applied by hand."""
        return self.before_s - self.after_s


@dataclass(frozen=True)
class Script:
    """A script, its models and its true causes, the largest saving first."""

    name: str
    kind: str
    source: str
    arguments: Sequence[str]
    cures: tuple[Cure, ...]

    @property
    def path(self) -> Path:
        return HERE / "scripts" / f"{self.name}.py"

    def cured(self, cure: Cure) -> str:
        """The source of the script with one cure. Raises ValueError if an edit does not fit."""
        source = self.path.read_text()
        for old, new in cure.edits:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {source.count(old)} times")
            source = source.replace(old, new)
        return source


def scripts(names: Sequence[str] = ()) -> list[Script]:
    """The scripts with these names, or all scripts without names."""
    found = []
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    for name in names or expected:
        cures = tuple(Cure(**cure) for cure in expected[name].pop("cures", ()))
        found.append(Script(name, cures=cures, **expected[name]))
    return found


@dataclass(frozen=True)
class Found:
    """The answer of `roofscope why` for one script."""

    findings: Sequence[tuple[str, float]]
    """Names and seconds, in the order of the answer."""
    script_s: float
    why_s: float
    """Seconds of the command beyond those of the script."""
    budget_s: float

    def verdict(self, script: Script) -> Verdict:
        """Compare the answer with the expected findings."""
        names, true = [name for name, _ in self.findings], [cure.finding for cure in script.cures]
        return Verdict(
            first=names[:1] == true[:1],
            named=set(true[:1]) <= set(names),
            false=tuple(name for name in names if name not in true),
            in_time=self.why_s <= self.budget_s,
        )


@dataclass(frozen=True)
class Verdict:
    """Whether the cause is the first finding, is among the findings, and which findings are false."""

    first: bool
    named: bool
    false: tuple[str, ...]
    in_time: bool


def saved_answers() -> dict[str, Found]:
    """The answers of earlier runs by script."""
    return {name: Found(**entry) for name, entry in json.loads(ANSWERS.read_text()).items()}
