"""The commands whose screens are kept, and how they are printed."""

import contextlib
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from .made import made_answers

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
_RUNS = "runs/reference/smollm2-135m"

COMMANDS = {
    "compare": f"compare {_RUNS}-zen5-float32 {_RUNS}-zen5-bfloat16 --plain",
    "compare-files": "compare tests/data/foreign/vllm-mixtral-before.json tests/data/foreign/vllm-mixtral-after.json"
    " --tp 4,8 --plain",
    "count": "count mistral-7b-v0.1 --gpu 'T4,H100 SXM' --plain",
    "count-grid": "count mistral-7b-v0.1 --batch-sizes 1,8 --prompt-lens 128,2048 --gpu T4 --plain",
    "explain": f"explain MBU --run {_RUNS}-xeon-minute",
    "gate": f"gate {_RUNS}-xeon-float32 {_RUNS}-xeon-minute --plain",
    "gpus-two": "gpus T4 'H100 SXM'",
    "judge": f"judge {_RUNS}-xeon-minute --plain",
    "judge-h200-default": "judge runs/reference/mistral-7b-h200-default --plain",
    "judge-h100": "judge runs/reference/mistral-7b-h100 --plain",
    "judge-h100-engines": "judge runs/reference/mistral-7b-h100-engines --plain",
    "models": "models",
    "forecast": f"forecast {_RUNS}-xeon --batch-sizes 1,4,16 --plain",
    "forecast-on": "forecast mistral-7b-v0.1 --on T4 --quant nf4 --prompt-lens 512 --batch-sizes 1,8 --plain",
    "place": "place tests/data/foreign/llama-bench-two-gpus.md --model gpt-oss-20b --plain",
    "place-gpus": "place tests/data/foreign/vllm-mixtral-before.json --model mixtral-8x7b --gpu 'H200 SXM' --tp 8"
    " --plain",
    "place-mixture": "place tests/data/foreign/llama-bench-two-gpus.md --model gpt-oss-20b --plain",
    "place-too-fast": "place tests/data/foreign/llama-batched-bench.md --model gpt-oss-20b --gpu L4 --plain",
    "rent": "rent mistral-7b-v0.1 --max-tpot-ms 50 --price T4=0.53,A10G=1.01,L40S=1.86 --plain",
    "doctor": "doctor --plain",
    "why": "why --plain chat.py",
}
"""Their figures are arithmetic on committed files, or made up (`made.py`): the same on every machine."""

NARROW = ("compare", "count", "doctor", "judge-h200-default", "place-too-fast", "rent", "why")
COLOURED = ("judge-h200-default", "why")
SCREENS = {
    **{name: (command, 100, False) for name, command in COMMANDS.items()},
    **{f"{name}-80": (COMMANDS[name], 80, False) for name in NARROW},
    **{f"{name}-colours": (COMMANDS[name].replace(" --plain", ""), 100, True) for name in COLOURED},
}
"""Each screen's command, its columns, and whether the terminal has colours (`less -R` shows them)."""


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """Work in `folder`, with copies of the committed runs and files; as after `report`, each run has a page."""
    for name in ("runs/reference", "tests/data/foreign"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.html", "*.png"))
    for document in (folder / "runs/reference").glob("**/run.json"):
        (document.parent / "report.html").touch()
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def screen_of(command: str, columns: int = 100, *, colours: bool = False) -> str:
    """Return what a command prints on stdout and stderr, without the spaces that end a line."""
    from profiler.cli.app import main

    printed = io.StringIO()
    terminal = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm"}
    with (
        made_answers(),
        mock.patch.object(sys, "argv", ["roofscope", *shlex.split(command)]),
        mock.patch.dict(os.environ, terminal if colours else {"NO_COLOR": "1", "TERM": "dumb"}),
        mock.patch.dict(os.environ, {"COLUMNS": str(columns)}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
    ):
        main()
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()).strip() + "\n"
