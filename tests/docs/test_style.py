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
MODULES = [file for file in sorted((ROOT / "profiler").rglob("*.py")) if file.name != "quality.py"]
"""All modules with messages, except that of `--check-quality`, which has the prompts that it compares."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCREENS = [*sorted((ROOT / "tests/golden").glob("*.txt")), *sorted((ROOT / "profiler").rglob("*.html*"))]
BANNED = re.compile(
    r"\b(held against|hold against|mend|mends|dearest|foretells?|behind|beside|told|tells|alone)\b", re.IGNORECASE
)
PRINTED = re.compile(BANNED.pattern + r"|(?<![\w-])cards?\b(?!\.json)|\b(lies|so that|foretold)\b", re.IGNORECASE)
"""Also banned in what the program prints."""
_CODE = re.compile(r"^ *```.*?^ *```|^ {4}.*?$|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL | re.MULTILINE)
_LONGEST = 30


def prose(file: Path) -> str:
    """Return a file's text without code and formulas; of a notebook, its Markdown."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = nbformat.reads(text, 4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return _CODE.sub("CODE", text)


def printed(module: Path) -> Iterator[str]:
    """Yield the strings of a module, and the pieces of its f-strings, but no docstrings."""
    nodes = set(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes - docstrings:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield _CODE.sub("CODE", node.value)


def long_sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and list items that are too long; tables and headings have none."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) ?)", text)
    paragraphs = [" ".join(block.split()) for block in blocks if not block.lstrip().startswith(("|", "#", "<"))]
    return [each for block in paragraphs for each in re.split(r"(?<=[.!?:;])\s", block) if len(each.split()) > _LONGEST]


@pytest.mark.parametrize("file", [*PAGES, *NOTEBOOKS, *SCREENS], ids=lambda file: file.name)
def test_it_has_no_banned_word_and_its_sentences_are_short(file: Path) -> None:
    """Screens and rendered pages have the sentences of modules, which the next test reads."""
    text = prose(file)
    assert BANNED.findall(text) == []
    if file not in SCREENS and "Rendered from the code" not in text:
        assert long_sentences(text) == []


@pytest.mark.ci
def test_messages_and_the_sentences_of_reports_are_plain() -> None:
    texts = [(module.name, text) for module in MODULES for text in printed(module)]
    assert len(texts) > 1000
    assert [(name, text) for name, text in texts if PRINTED.search(text) or long_sentences(text)] == []
