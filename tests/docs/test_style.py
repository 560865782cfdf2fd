"""README, CONTRIBUTING and documentation follow CONTRIBUTING's style guide.

The help texts and the glossary are on generated pages of docs/reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if "Rendered from the code" not in page.read_text(encoding="utf-8")]
"""All pages but those that `python -m tests.docs.reference` renders."""
BANNED = re.compile(
    r"\b(held against|hold against|mend|mends|dearest|foretells?|behind|beside|told|tells|alone)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"^ *```.*?^ *```|^ {4}.*?$|`[^`\n]*`|\$\$.*?\$\$", re.DOTALL | re.MULTILINE)
_LONGEST = 30


def prose(file: Path) -> str:
    """Return a file's text without code."""
    return _CODE.sub("CODE", file.read_text(encoding="utf-8"))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs and list items; tables and headings have none."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) ?)", text):
        if not block.lstrip().startswith(("|", "#", "<")):
            yield from re.split(r"(?<=[.!?:;])\s", " ".join(block.split()))


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_it_has_no_banned_word(file: Path) -> None:
    text = prose(file)
    assert [text[max(0, found.start() - 40) : found.end() + 20] for found in BANNED.finditer(text)] == []


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.name)
def test_its_sentences_are_short(file: Path) -> None:
    assert [sentence for sentence in sentences(prose(file)) if len(sentence.split()) > _LONGEST] == []


def test_the_check_finds_what_it_should() -> None:
    assert BANNED.search("Two runs are held against each other.")
    assert [len(part.split()) for part in sentences("One two three. " + "word " * 31 + "end.")] == [3, 32]
