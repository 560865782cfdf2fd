"""tests/hostile/README.md: every named test exists, and every count is the number of its cases."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "hostile" / "README.md").read_text()
_NAMED = re.compile(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.^])")

Row = tuple[str, list[tuple[str, str]]]
"""The tested inputs, and the (file, test) pairs; a test is empty if the row names a whole file."""


def rows() -> list[Row]:
    """Return the rows of all tables that name tests; `::test` belongs to the last named file."""
    found, file = [], ""
    for line in PAGE.splitlines():
        named = []
        for match in _NAMED.finditer(line):
            if match[1] or match[2]:
                file = match[1] or file
                named.append((file, match[2] or ""))
        if line.startswith("|") and named:
            found.append((line.split("|")[2], named))
    return found


def test_every_named_test_exists() -> None:
    assert len(rows()) > 30
    for _, named in rows():
        for file, test in named:
            functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "name")}
            assert not test or test in functions, f"{file} has no {test}"


@pytest.mark.slow
def test_every_count_is_the_number_of_cases() -> None:
    """The row of a test with several cases has their number, or the number of all tests of the row together."""
    files = sorted({file for _, named in rows() for file, test in named if test})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "timing or not timing", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    cases = Counter(line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line)
    for tried, named in rows():
        numbers = {int(number) for number in _NUMBER.findall(tried)}
        counts = [cases[f"{file}::{test}"] for file, test in named if test]
        assert all(counts), f"{named} are not collected"
        several = {count for count in counts if count > 1}
        assert several <= numbers or sum(counts) in numbers, f"{tried}: {counts} of {named}"
