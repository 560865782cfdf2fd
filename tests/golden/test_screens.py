"""Screens are as last reviewed. For an intended change, run `python -m tests.golden` and review the diff."""

import importlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from profiler.cli.app import GROUPS, name_of
from profiler.report.blocks import Section
from profiler.report.terminal import MOST_LINES, print_sections
from profiler.run.judge_folder import judge_folder

from .screens import COMMANDS, FOLDER, SCREENS, screen_of, working_folder

LONG = tuple(name for name in SCREENS if name.startswith("judge-h100"))
"""Runs with many cells: each takes two seconds to judge."""


_RUNS = "runs/reference/smollm2-135m"
ANSWERS = {
    "run": "run -q",
    "judge": "judge runs/reference/smollm2-135m-zen4",
    "why": "why chat.py",
    "compare": f"compare {_RUNS}-epyc {_RUNS}-2-cores --anyway",
    "count": "count gpt-oss-20b --batch-sizes 1..64*2 --prompt-lens 128..8192*4 --gpu 'T4,H100 SXM,L40S,A10G'",
    "count of a step": "count mistral-7b-v0.1 --gpu 'T4,H100 SXM,L40S' --gemm-census",
    "rent": "rent mistral-7b-v0.1",
    "doctor": "doctor --device auto",
    "forecast": f"forecast {_RUNS}-xeon --batch-sizes 1..64*2 --prompt-lens 64..1024*2",
    "place": "place tests/data/foreign/llama-batched-bench.md --model gpt-oss-20b --gpu L4",
}
"""Answers of each command that would be longer than a screen, if it has any."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The committed runs; `report` draws no pictures, and commands that measure have committed figures."""
    for module in ("profiler.run.pipeline", "profiler.why_slow.command"):
        importlib.import_module(module)  # one that is first imported below would keep what is replaced there
    with working_folder(tmp_path_factory.mktemp("runs")):
        run = judge_folder(Path("runs/reference/mistral-7b-h200-default"))
        with (
            mock.patch("profiler.run.validate.prepare"),
            mock.patch("profiler.run.validate.prepare_batch_test"),
            mock.patch("profiler.roofs.measure.measure", return_value=run.document.ceilings.ceilings),
            mock.patch("profiler.roofs.bandwidth.measure_links", return_value=({}, {})),
            mock.patch("profiler.run.pipeline.execute", return_value=run),
            mock.patch("profiler.report.html.html_report", return_value=""),
        ):
            yield


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.ci if name in LONG else ()) for name in SCREENS])
def test_a_screen_is_as_it_was_reviewed(name: str) -> None:
    command, columns, colours = SCREENS[name]
    screen = screen_of(command, columns, colours=colours)
    assert f"$ roofscope {command}\n\n{screen}" == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_screen_is_left_over() -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(SCREENS)


@pytest.mark.ci
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_fits_one_screen(name: str) -> None:
    """At most 60 lines, none wider than the terminal, no figure apart from its unit, and the number of lines left."""
    for columns, colours in ((80, False), (100, True)):
        command = ANSWERS[name] if colours else ANSWERS[name].replace(" ", " --plain ", 1)
        shown = screen_of(command, columns, colours=colours)
        lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
        assert 7 < len(lines) <= MOST_LINES == 60
        assert max(map(len, lines)) <= columns
        assert not [line for line in lines if re.match(r"\s*(%|([kMGTnmu]?(B|s|FLOP|FLOPs)(/s)?)\b)", line)]
        cut = " more lines: " in " ".join(lines[-2:])
        assert cut == (name not in ("doctor", "place", "compare")) or columns == 100


MORE = {
    "ceilings": "ceilings --device cpu",
    "batch-test": "batch-test -q",
    "gpus": "gpus",
    "report": "report runs/reference/smollm2-135m-zen4",
    **ANSWERS,
}
"""Screens of the other commands, and longer ones."""


ENDING = ("doctor", "compare", "rent", "place", "count")
"""Commands whose screen ends with what to do next."""


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", dict.fromkeys([*COMMANDS.values(), *MORE.values()]))
def test_no_word_is_torn(command: str) -> None:
    """A narrow screen has the words of one that is wide enough for any line."""
    with mock.patch("profiler.report.terminal.print_sections") as printing:
        screen_of(command)
    if printing.call_args is None:
        screens = {columns: screen_of(command, columns) for columns in (80, 100, 1000)}
    else:
        sections, _, *limits = printing.call_args.args
        screens = {columns: _printed(sections, columns) for columns in (80, 100, 1000)}
        assert not limits[1:] or re.match("roofscope .* --full|open ", limits[1]), "no bare --full"
    for columns in (80, 100):
        torn = set(screens[columns].replace(",", "").split()) - set(screens[1000].replace(",", "").split())
        assert not {word for word in torn if re.search(r"\w", word)}
        assert not [line for line in screens[columns].splitlines() if len(line) > columns and " " in line.strip()]
    if command.split()[0] in ENDING:
        assert screens[1000].splitlines()[-1].startswith("next: ")


def _printed(sections: Sequence[Section | None], columns: int) -> str:
    stream = io.StringIO()
    print_sections(sections, Console(file=stream, width=columns, markup=False, emoji=False))
    return stream.getvalue()


@pytest.mark.parametrize("command", ["", *(name_of(command) for group in GROUPS.values() for command in group)])
def test_no_word_of_a_help_is_torn(command: str) -> None:
    for columns in (80, 100):
        lines = screen_of(f"{command} --help", columns).splitlines()
        assert len(lines) > 6
        assert not [line for line in lines if len(line) > columns or re.search(r"\w-$", line)]


@pytest.mark.usefixtures("runs")
def test_full_has_all_lines() -> None:
    """The number of lines left is that of the full screen less that of the first one."""
    short, full = (screen_of(f"run -q --plain{option}").splitlines() for option in ("", " --full"))
    whole_by = "roofscope judge runs/reference/mistral-7b-h200-default --full"
    assert short[-1] == f"{len(full) - len(short) + 1} more lines: {whole_by}"
    assert sum("(forecast)" in line for line in full) == 28
    assert not any("(forecast)" in line for line in short)
    assert any(line.startswith("28 rows are forecast, as in runs recorded before") for line in short)
