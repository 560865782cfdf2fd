"""The manual: its reference follows from the code, its commands run, its links have targets."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import slow_except
from jsonschema import Draft202012Validator
from tokenized import save_tokenizer

import profiler
from profiler.errors import RequestError
from profiler.report.sections import run_sections
from profiler.report.terminal import MOST_LINES, print_sections, screen
from profiler.run.judge_folder import judge_folder
from profiler.store.operators_csv import OPERATOR_COLUMN_MEANINGS
from tests.golden.screens import working_folder

from .reference import FOLDER, PAGES, SCHEMAS, anchor, pages
from .schemas import TITLES, assert_follows, schema_text, schemas

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NO_DEVICE = [page for page in DOCS if "```console" in page.read_text()]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```\w*\n.*?^```|^    .*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"(?:^|`|\$ | {4})roofscope ([a-z-]+)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_NAMED = re.compile(r"`((?:tests|profiler|examples|runs/reference|\.ci)/[\w./-]*\w)(?:::(\w+))?`")
OF_OTHERS = {
    "--durations", "--enable-per-request-metrics", "--extra-index-url", "--its", "--output-file", "--output-format",
    "--output-json", "--per-request-spec-decode-metrics", "--questions", "--report", "--result-filename", "--to",
    "--stats", "--strict", "--system-site-packages", "--save-result", "--verbose", "--help", "--dry-run", "--only",
    "--seed",
}  # fmt: skip
"""Options of other programs on these pages, and of the scripts of tests/."""


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_follows_from_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == pages()[name], "run `python -m tests.docs.reference`"


RUNS = "runs/reference/smollm2-135m-"
REAL = {
    "compare": f"compare {RUNS}zen5-float32 {RUNS}zen5-bfloat16",
    "gate": f"gate {RUNS}zen4 {RUNS}zen4",
    "run": f"judge {RUNS}zen4",
    "place": "place tests/data/foreign/llama-bench.json --model smollm2-135m --gpu T4",
    "forecast": f"forecast {RUNS}zen4 --batch-sizes 8",
    "rent": "rent smollm2-135m --price T4=0.35",
    "count": "count smollm2-135m --gpu T4 --gemm-census",
    "count-grid": "count smollm2-135m --batch-sizes 1,2 --prompt-lens 8 --gpu T4",
    "gpus": "gpus",
    "models": "models",
    "doctor": "doctor",
}


@pytest.mark.parametrize("name", slow_except(REAL.keys() - {"doctor", "rent"}, REAL))
def test_a_real_document_follows_its_schema(name: str, roofscope: Callable[..., Any], folder: Path) -> None:
    """`judge` also writes run.json by the current schema."""
    document = json.loads(roofscope(*shlex.split(REAL[name]), "--format", "json").out)
    assert document
    assert_follows(name, document)
    if name == "run":
        assert_follows("run-folder", json.loads((folder / f"{RUNS}zen4" / "run.json").read_text()))


@pytest.mark.parametrize("name", TITLES)
def test_a_schema_is_one_and_follows_from_the_types(name: str) -> None:
    Draft202012Validator.check_schema(json.loads(schema_text(name)))
    assert (SCHEMAS / f"{name}.json").read_text() == schema_text(name), "run `python -m tests.docs.reference`"


DESCRIBED = {
    "RunDocument", "CellResult", "CellEvidence", "Lever", "Roof", "Change", "GateDocument", "ForecastCell", "Offer",
    "Finding",
}  # fmt: skip
"""The objects that people use most, by their type."""


def test_every_key_and_every_column_has_a_description() -> None:
    """A column of cells.csv is a key of `CellResult`."""
    types = {}
    for schema in schemas().values():
        types |= {str(schema.get("title")): schema, **schema.get("$defs", {})}
    keys = {(name, key): item for name in DESCRIBED for key, item in types[name]["properties"].items()}
    assert [key for key, item in keys.items() if not item.get("description")] == []
    assert all(OPERATOR_COLUMN_MEANINGS.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Path]:
    """A copy of the committed runs and files, with a model, in which all commands of this module may write."""
    with working_folder(tmp_path_factory.mktemp("project")):
        for file in Path("tests/data/foreign").glob("llama-bench.*"):
            shutil.copy(file, ".")
        model = Path(shutil.copytree(tiny_folder, "my-model"))
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
        (model / "config.json").write_text(json.dumps(config))
        save_tokenizer(model, 128)
        Path("prompts.txt").write_text("w1 w2 w3\nw4 w5\n")
        yield Path.cwd()


def _commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of a page's console blocks, each with the pieces of its output on the page."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            found.append((line, [" ".join(piece.split()) for piece in shown.split("...\n") if piece.strip()]))
    return found


@pytest.mark.parametrize(
    "page",
    slow_except([page for page in NO_DEVICE if page.stem not in ("read-a-report", "forecast-and-rent")], NO_DEVICE),
    ids=lambda page: page.stem,
)
def test_its_commands_run_and_print_its_output(page: Path, roofscope: Callable[..., Any], folder: Path) -> None:
    commands = _commands(page)
    assert commands
    for line, shown in commands:
        program, *arguments = shlex.split(line, comments=True)
        assert program == "roofscope"
        code = re.search(r"# exit (\d)", line)
        outcome = roofscope(*arguments)
        assert outcome.code == (int(code[1]) if code else 0), f"{line}: {outcome.err}"
        out = " ".join(outcome.out.split())
        assert out, line
        assert not [piece for piece in shown if piece not in out], out


@pytest.mark.parametrize(("later", "passes"), [("smollm2-135m-2-cores", True), ("smollm2-135m-precisions/nf4", False)])
def test_the_test_on_the_gates_page_works(
    later: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's test passes for an unchanged run and fails for decode that is 68 % slower.

    `profile` takes its arguments.
    """
    reference = ROOT / "runs" / "reference"

    def recorded(*arguments: object, **options: object) -> Any:
        signature(profiler.profile).bind(*arguments, **options)
        return SimpleNamespace(folder=reference / later)

    monkeypatch.chdir(tmp_path)
    shutil.copytree(reference / "smollm2-135m-precisions" / "none", tmp_path / "tests" / "base")
    monkeypatch.setattr(profiler, "profile", recorded)
    names: dict[str, Any] = {}
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "gate-in-ci.md").read_text(), re.DOTALL)
    exec(block, names)
    with nullcontext() if passes else pytest.raises(AssertionError, match="decode"):
        names["test_decode_is_no_slower"](tmp_path)


README = (ROOT / "README.md").read_text()


def _sample(begins: str) -> list[str]:
    """Return the lines that README shows after a command, up to the mark of a cut, without blank ones."""
    [block] = re.findall(rf"```console\n\$ roofscope {re.escape(begins)}.*?\n(.*?)```", README, re.DOTALL)
    assert block.endswith("[...]\n"), "a cut sample is marked"
    return [line for line in block.removesuffix("[...]\n").splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("name", "begins"), [("smollm2-135m-xeon", "run --prompt-lens"), ("mistral-7b-h200-default", "run mistral-7b-v0.1")]
)
def test_readmes_answer_is_that_of_a_recorded_run_by_todays_rules(
    name: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the H200, `python -m tests.golden` writes the screen that README shows."""
    shutil.copytree(ROOT / "runs/reference" / name, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    run = judge_folder(Path("run"))  # a short name takes one line
    command = re.search(rf"\$ roofscope {begins}.*", README)
    assert command
    assert set(command[0].split()[2:]) <= set(shlex.split(run.document.command))
    print_sections(run_sections(run), screen(plain=True), MOST_LINES)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    sample = _sample(begins)
    assert sample == printed[: len(sample)], "without a gap"
    assert run.document.created[:10] in README or run.document.device.kind == "cpu"


def test_readme_has_at_most_nine_hundred_words() -> None:
    prose = re.sub(r"```.*?```|^(\||    ).*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 900


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_its_links_have_targets_and_its_commands_and_options_exist(page: Path) -> None:
    text = page.read_text()
    links = [first or second for first, second in _LINK.findall(re.sub(r"`[^`\n]*`", "", text))]
    for link in links:
        target, _, place = link.partition("#")
        if "://" in target:
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name}: {link}"
        if place:
            heads = {anchor(head) for head in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)}
            assert place in heads, f"{page.name}: {link}"
    code = "\n".join(_CODE.findall(text))
    assert set(_COMMAND.findall(code)) <= set(re.findall("^## `roofscope (.*)`$", pages()["commands.md"], re.MULTILINE))
    assert set(_OPTION.findall(code)) - OF_OTHERS <= set(_OPTION.findall(pages()["commands.md"]))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *ROOT.glob("tests/*/README.md")], ids=str
)
def test_the_files_and_tests_that_it_names_exist(page: Path) -> None:
    for name, test in _NAMED.findall(page.read_text()):
        assert (ROOT / name).exists(), name
        assert not test or f"def {test}(" in (ROOT / name).read_text(), f"{name}::{test}"


def test_a_model_that_the_hub_does_not_provide_is_refused_as_troubleshooting_says(
    roofscope: Callable[..., Any],
) -> None:
    outcome = roofscope("count", "nobody/no-model")
    assert outcome.code == 2
    assert "nobody/no-model is not in the local cache" in outcome.err
    for text in (outcome.err, (ROOT / "docs/troubleshooting.md").read_text()):
        assert "`hf auth login`" in text


def test_every_page_is_reached_from_the_index() -> None:
    reached = {(ROOT / "docs" / first).resolve() for first, _ in _LINK.findall((ROOT / "docs/index.md").read_text())}
    assert {page.resolve() for page in DOCS if page.name != "index.md"} <= reached


COOKBOOK = (ROOT / "docs/how-to/a-line-for-every-question.md").read_text()
_LISTED = [
    *re.findall(r"^    roofscope (.+?) +# .*$", COOKBOOK, re.MULTILINE),
    *re.findall(r"^\|.*`roofscope (.+)`", README, re.MULTILINE),
]
"""The commands of the cookbook and of README's table."""
PLACES = {"runs/BEFORE": f"{RUNS}zen5-float32", "runs/AFTER": f"{RUNS}zen5-bfloat16"}
ELSEWHERE = re.compile(
    r"^(why|batch-test|doctor|ceilings)\b|\b(MODEL|mistralai|GGUF|vllm|ngram|INTERRUPTED)\b|\.gguf\b|--check"
)
"""Commands that need a hub, vLLM, a tokenizer, a GPU or minutes. Other folders run them on smaller models."""
SLOW = re.compile("^rent|^report runs/MINE|^plot .* (operators|devices)|^run mistral.*nf4|--(crosscheck|plot)")
TRIED = [command for command in _LISTED if not ELSEWHERE.search(command)]


@pytest.mark.parametrize("command", slow_except([line for line in TRIED if not SLOW.search(line)], TRIED))
def test_the_listed_commands_run(
    command: str, roofscope: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands without measurement run on recorded runs. A run is validated, and stops before it loads a model."""

    def stopped(*_: Any, **__: Any) -> None:
        raise RequestError("it would begin now.")

    # A module that is first imported under the other patch would keep it.
    monkeypatch.setattr("profiler.run.pipeline.execute", stopped)
    monkeypatch.setattr("profiler.run.pipeline.execute", stopped)
    words = [
        re.sub("^runs/[A-Z]+$", lambda at: PLACES.get(at[0], f"{RUNS}zen4"), word) for word in shlex.split(command)
    ]
    outcome = roofscope(*words)
    if words[0] == "run":
        assert "it would begin now." in outcome.err, outcome.err
    else:
        assert outcome.code in ((0, 1, 3) if words[0] == "gate" else (0,)), outcome.err
        assert outcome.out or words[0] == "report"
