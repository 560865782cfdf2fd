"""Pages, screens, errors, the sentences of reports and the notebooks follow CONTRIBUTING's style guide.

The help texts and the glossary are on generated pages of docs/reference.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODULES = [file for file in sorted((ROOT / "profiler").rglob("*.py")) if file.name != "quality.py"]
"""All modules with messages, except that of `--check-quality`, which has the prompts that it compares."""
SCREENS = [*sorted((ROOT / "tests/golden").glob("*.txt")), *sorted((ROOT / "profiler").rglob("*.html*"))]
WRITTEN = [page for page in PAGES if "Rendered from the code" not in page.read_text(encoding="utf-8")]
"""All pages but those that `python -m tests.docs.reference` renders."""
BANNED = re.compile(
    r"\b(held against|hold against|mend|mends|dearest|foretells?|behind|beside|told|tells|alone)\b", re.IGNORECASE
)
PRINTED = re.compile(BANNED.pattern + r"|(?<![\w-])cards?\b(?!\.json)|\b(lies|so that|foretold)\b", re.IGNORECASE)
"""Also banned in what the program prints."""
_CODE = re.compile(r"^ *```.*?^ *```|^ {4}.*?$|`[^`\n]*`|\$\$.*?\$\$", re.DOTALL | re.MULTILINE)
_LONGEST = 30


def prose(file: Path) -> str:
    """Return a file's text without code."""
    return _CODE.sub("CODE", file.read_text(encoding="utf-8"))


def lesson(notebook: Path) -> str:
    """Return the Markdown of a notebook without code and formulas."""
    cells = [cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "markdown"]
    return re.sub(r"\$[^$\n]+\$", "CODE", _CODE.sub("CODE", "\n\n".join(cells)))


def printed(module: Path) -> Iterator[str]:
    """Yield the texts of a module that have several words: messages and sentences, but no docstrings."""
    nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    pieces = {piece for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "CODE" for piece in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces | docstrings:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield _CODE.sub("CODE", text)


def found_in(text: str, banned: re.Pattern[str]) -> list[str]:
    """Return each banned word of a text, with its neighbours."""
    return [text[max(0, word.start() - 40) : word.end() + 20] for word in banned.finditer(text)]


def long_sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and list items that are too long; tables and headings have none."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) ?)", text)
    paragraphs = [" ".join(block.split()) for block in blocks if not block.lstrip().startswith(("|", "#", "<"))]
    return [each for block in paragraphs for each in re.split(r"(?<=[.!?:;])\s", block) if len(each.split()) > _LONGEST]


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS, *SCREENS], ids=lambda file: file.name)
def test_it_has_no_banned_word_and_its_sentences_are_short(file: Path) -> None:
    """Screens and rendered pages have the sentences of modules, which the next test reads."""
    text = lesson(file) if file in NOTEBOOKS else prose(file)
    assert found_in(text, BANNED) == []
    if file in (*WRITTEN, *NOTEBOOKS):
        assert long_sentences(text) == []


@pytest.mark.ci
def test_messages_and_the_sentences_of_reports_are_plain() -> None:
    texts = [(module.name, text) for module in MODULES for text in printed(module)]
    assert len(texts) > 1000
    assert [(name, words) for name, text in texts if (words := found_in(text, PRINTED) + long_sentences(text))] == []
