"""The manual: its reference follows from the code, its commands run, its links have targets."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import readme_picture
import typer
import yaml
from cases import slow_except
from jsonschema import Draft202012Validator
from tokenized import save_tokenizer

import profiler
from profiler.cli.app import app
from profiler.data.datasheets import gpus
from profiler.errors import RequestError
from profiler.store.operators_csv import OPERATOR_COLUMN_MEANINGS
from tests.golden.screens import working_folder
from tests.published_fit import published

from . import measured
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
    "--enable-per-request-metrics", "--extra-index-url", "--gpus", "--its", "--max-concurrency", "--num-prompts",
    "--only", "--output-file", "--output-format", "--output-json", "--per-request-spec-decode-metrics",
    "--random-input-len", "--random-output-len", "--report", "--result-filename", "--rm", "--save-result", "--stats",
    "--system-site-packages", "--to", "--verbose",
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
    "place": "place tests/data/foreign/llama-bench-two-gpus.md --model gpt-oss-20b",
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
    "RunDocument", "CellResult", "CellEvidence", "ChangeEffect", "Ceiling", "Change", "GateDocument", "ForecastCell",
    "Offer", "Finding",
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
            Path(file.name).write_text(file.read_text().replace('"CPU"', '"CUDA"'))
        model = Path(shutil.copytree(tiny_folder, "my-model"))
        config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 65536}
        (model / "config.json").write_text(json.dumps(config))
        save_tokenizer(model, 128)
        shutil.copytree(model, "a-smaller-model")
        Path("prompts.txt").write_text("w1 w2 w3\nw4 w5\n")
        Path("chat.jsonl").write_text("".join(f'{{"prompt": "w{n} w2 w3"}}\n' for n in range(1, 5)))
        Path("lengths.txt").write_text("# prompt, new\n512, 64\n48, 16\n")
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
        assert shown, f"{line}: a console block shows output"
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


def test_the_code_on_the_page_of_theory_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/see-the-theory.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    for line, value in re.findall(r"^(theory\..*)  # ([\d.]+)", block, re.MULTILINE):
        assert eval(line, names) == pytest.approx(float(value), rel=5e-3)


README = (ROOT / "README.md").read_text()


def test_readmes_screen_is_that_of_a_recorded_run_by_todays_rules() -> None:
    """Its beginning is shown and the rest folded; `python -m tests.golden` writes both."""
    blocks = re.findall(r"^```console\n(.*?)\n\[\.\.\.\]\n```", README, re.DOTALL | re.MULTILINE)
    parts = [block.removeprefix("$ roofscope run mistral-7b-v0.1\n") for block in blocks[-2:]]
    screen = (ROOT / "tests/golden/judge-h200-default.txt").read_text()
    assert parts[0].endswith(".")
    assert screen.partition("\n\n")[2].startswith("\n".join(parts)), "without a gap"
    assert profiler.read_run(ROOT / "runs/reference/mistral-7b-h200-default").document.created[:10] in README


def test_readme_is_short() -> None:
    assert len(README.split()) <= 1200
    assert len(README.splitlines()) <= 160
    assert len(DOCS) <= 30


def test_readmes_picture_and_first_lines_have_the_figures_of_the_committed_runs() -> None:
    """docs/reference/measured.md and the answer of the H200's default run have the same ones, in ms."""
    assert readme_picture.PICTURE.read_text() == readme_picture.picture(), "run `python -m tests.readme_picture`"
    _, eager, _, compiled, limit = rows = [sum(parts.values()) for parts in readme_picture.bars().values()]
    assert [round(ms, 1) for ms in rows] == [59.1, 21.7, 7.4, 4.8, 3.2]
    assert 'class="inside">15.4<' in readme_picture.picture(), "for so long the GPU waits"
    assert limit == pytest.approx(14.22e9 / 4.39e12 * 1e3, rel=0.01), "weights over the measured bandwidth"
    assert f"on {len(gpus())} of them" in " ".join(README.split())
    assert f"writes {1e3 / eager:.0f} tokens/s on an H200 that can write {1e3 / compiled:.0f}." in README


def test_the_measured_page_has_the_committed_runs_and_the_published_figures() -> None:
    """gpt-fast: 104.9 tokens/s of Llama-2-7B on an A100 are 1397 GB/s, 69 % of 2039; compiled on the H200: 4.82 ms."""
    text = measured.PAGE.read_text()
    assert text == measured.page(), "run `python -m tests.docs.reference`"
    assert "| compile | decode 1 x 128 | 4.82 ms | 207 | 67 % |" in text
    gpt_fast = next(figure for figure in published() if figure.latency_s == pytest.approx(1 / 104.9, rel=1e-3))
    assert measured.share(gpt_fast) == pytest.approx(1397 / 2039, abs=0.02)


def test_a_citation_names_this_release() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == profiler.__version__


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (2, 2), (3, 0)])
def test_the_job_on_the_gates_page_fails_for_a_slower_run_and_warns_if_it_cannot_tell(code: int, ends: int) -> None:
    page = (ROOT / "docs/how-to/gate-in-ci.md").read_text()
    [job] = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    [script] = (step["run"] for step in job["jobs"]["gate"]["steps"] if step.get("name") == "gate")
    gate = f"roofscope() {{ return {code}; }}\n{script}"
    done = subprocess.run(["bash", "-e", "-c", gate], capture_output=True, text=True, check=False)
    assert (done.returncode, "::warning::" in done.stdout) == (ends, code == 3)


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
def test_the_files_and_what_it_names_in_them_exist(page: Path) -> None:
    for name, word in _NAMED.findall(page.read_text()):
        assert (ROOT / name).exists(), name
        defined = rf"^ *(?:def |class |){word}\b"
        assert not word or re.search(defined, (ROOT / name).read_text(), re.MULTILINE), f"{name}::{word}"


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


_BLOCK = re.compile(r"^```(?:text|bash)\n(.*?)^```|((?:^    roofscope .*\n)+)", re.DOTALL | re.MULTILINE)
_LISTED = sorted(
    {
        re.sub(r" +#.*", "", command)
        for page in DOCS
        if page.parent.name != "reference"
        for block in _BLOCK.findall(page.read_text())
        for command in re.findall(r"^ *roofscope (.+)$", "".join(block), re.MULTILINE)
    }
)
"""The commands of every page's blocks that show no output."""
PLACES = {"runs/BEFORE": f"{RUNS}zen5-float32", "runs/AFTER": f"{RUNS}zen5-bfloat16"}
ELSEWHERE = re.compile(
    r"^(why|batch-test|doctor|ceilings)\b|\b(MODEL|mistralai|GGUF|vllm|graph|ngram|INTERRUPTED)\b|\.gguf\b|--check"
)
"""Commands that need a hub, vLLM, a tokenizer, a GPU or minutes. Other folders run them on smaller models."""
SLOW = re.compile("^rent|^report runs/MINE|^plot .* (operators|devices)|^run mistral.*nf4|--(crosscheck|plot)")
TRIED = [command for command in _LISTED if not ELSEWHERE.search(command)]


@pytest.mark.parametrize("command", sorted(set(_LISTED) - set(TRIED)))
def test_the_other_listed_commands_are_understood(command: str) -> None:
    name, *arguments = shlex.split(command)
    typer.main.get_command(app).get_command(None, name).make_context(name, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", slow_except([line for line in TRIED if not SLOW.search(line)], TRIED))
def test_the_listed_commands_run(
    command: str, roofscope: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands without measurement run on recorded runs. A run is validated, and stops before it loads a model."""
    stopped = Mock(side_effect=RequestError("it would begin now."))
    # A module that is first imported under the other patch would keep it.
    for begins in ("grid_of", "execute"):
        monkeypatch.setattr(f"profiler.run.pipeline.{begins}", stopped)
    words = shlex.split(command)
    if words[0] != "run":
        words = [re.sub("^runs/\\w+$", lambda at: PLACES.get(at[0], f"{RUNS}zen4"), word) for word in words]
    outcome = roofscope(*words)
    if words[0] == "run":
        assert "it would begin now." in outcome.err, outcome.err
    else:
        assert outcome.code in ((0, 1, 3) if words[0] == "gate" else (0,)), outcome.err
        assert outcome.out or words[0] == "report"
