"""Pages, screens, errors, the sentences of reports and the notebooks follow CONTRIBUTING's style guide.

The glossary answers to the words of default screens, of the field, and of earlier versions.
The help texts and the glossary are on generated pages of docs/reference.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from profiler.report.glossary import GLOSSARY, known_term

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "profiler").rglob("*.py"))
PROMPT = "The harbour was quiet"
"""The beginning of the text that `--check-quality` and `--draft` give to a model."""
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
    """Yield the strings of a module, and the pieces of its f-strings, but no docstrings and no prompt of a model."""
    nodes = set(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes - docstrings:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if " " in text.strip() and not text.startswith(PROMPT):
            yield _CODE.sub("CODE", text)


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


NAMES = ("judge", "judge-h100", "judge-h100-engines", "judge-h200-default", "compare", "forecast")
EVERYDAY = frozenset(re.findall(r"\w+", """
    a about adds after again against all amd and are as at b bar basis be before below between beyond both builds but by
    cap clock common contain copy costs cpu default device differ does doubled during each else enable epyc error
    explain export false family faster fell figures first for foreign from full g gb give goes gpu grid h had has have
    held here high how html import in include instead it its itself judge keep known larger largest layer length library
    limited line load loading longer longest lose low m machine measure measured median mhz model modes more most ms
    much name nearest needs neither next nine no none not nothing nvidia of off on once one only or other over own p per
    phase plan power process processor profile published random reach reading reason recorded replayed report rest row
    run s save says second seen several share show side similar size small t table take taken ten tensor than that the
    their them then there they this thread time to token torch two under up us utc verdict wait was what when where
    which with within without work would xeon
"""))  # fmt: skip
"""Words of plain English and of any engineer, in the singular."""
NO_WORD = re.compile(
    r"""(?<![\w-]) (?: \$.* | --[a-z-]+ | roofscope\ [a-z-]+(?:\ TERM)? | x[0-9]+ | smollm2-135m
    | "?[\w.~-]*\w [_=/.(] ["\w.]\S* )""",
    re.VERBOSE,
)


def test_every_word_of_a_default_screen_is_everyday_or_in_the_glossary() -> None:
    """Lines of code, options, paths and names of models are not words."""
    in_terms = {word for term in GLOSSARY for word in re.findall(r"[a-z]+", term.lower())}
    for screen in (ROOT / f"tests/golden/{name}.txt" for name in NAMES):
        text = re.sub(r"^.*parameters, .*$", "", screen.read_text(), flags=re.MULTILINE)
        units = re.findall(r"[GTM]?(?:FLOP|B)/s", text)
        words = re.findall(r"[A-Za-z][A-Za-z0-9]*(?:-[a-z]+)*", NO_WORD.sub(" ", text))
        unknown = {word for word in (*units, *map(str.lower, words)) if not _is_known(word, in_terms)}
        assert not unknown, f"{screen.name}: give these a term or a synonym"


def _is_known(word: str, in_terms: set[str]) -> bool:
    forms = {word, word.removesuffix("s"), word.removesuffix("d"), word.removesuffix("es")}
    return any(form in EVERYDAY or form in in_terms or known_term(form) for form in forms)


@pytest.mark.parametrize(
    ("word", "term"),
    [
        ("kernel-bound", "slow-kernels"), ("dispatch", "overhead"), ("roof", "ceiling"),
        ("avoidable work", "redundant work"), ("visit", "repetition"), ("sure", "confidence"), ("lever", "change"),
        ("variant", "change"), ("product", "matmul"), ("witness", "weight read"), ("sentinel", "drift"),
        ("twin", "overhead model"), ("split", "time breakdown"), ("room", "free memory"),
        ("tight", "close to the limit"), ("tax", "overhead of generate"),
        ("bandwidth", "ceiling"), ("latency", "TPOT"), ("throughput", "tok/s"), ("batch", "batch x tokens"),
        ("peak", "ceiling"), ("arithmetic intensity", "intensity"), ("TTFT", "TTFT"), ("launch overhead", "overhead"),
        ("SOL", "floor"), ("MFU", "MFU"), ("GQA", "GQA"), ("quantization", "quantization"),
        ("OOM", "close to the limit"),
        ("throttling", "throttling"), ("power cap", "sustained"), ("eager", "eager"), ("budget", "budget"),
    ],
)  # fmt: skip
def test_explain_knows_old_words_and_those_of_the_field(word: str, term: str) -> None:
    assert known_term(word) == term
    assert term in GLOSSARY
