"""Run every command that writes, one after another in one process, on a local model, with secrets in its environment.

    python every_command.py MODEL SCRIPT RUNS

Prints the attempted connections, and the exit code of each command.
"""

import contextlib
import io
import json
import socket
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from hurry import hurry

_SHORT = ["--prompt-lens", "8,16", "--batch-sizes", "1,2", "--new-tokens", "4", "--budget", "1", "--quiet"]


def commands(model: str, script: str, runs: Path) -> list[list[str]]:
    one, two = str(runs / "one"), str(runs / "two")
    return [
        ["run", model, *_SHORT, "--trace", "--out", one],
        ["batch-test", model, "--prompt", "8", "--new-tokens", "4", "--budget", "1", "--quiet", "--out", two],
        ["why", "--out", str(runs / "why"), script, model],
        ["forecast", one, "--batch-sizes", "4"],
        ["compare", one, one, "--format", "json"],
        ["gate", one, one, "--format", "junit"],
        ["report", one, two],
        ["plot", one, "memory", "--out", str(runs / "memory.svg")],
        ["plot", one, "roofline"],
        ["export", one, "--format", "parquet", "--out", str(runs / "cells.parquet")],
        ["place", str(runs / "table.csv"), "--model", model, "--gpu", "T4"],
        ["judge", one, "--format", "json"],
        ["doctor", "--format", "json"],
        ["ceilings", "--format", "json"],
    ]


def main(model: str, script: str, runs: str) -> None:
    connections: list[str] = []

    def guard(event: str, arguments: tuple[object, ...]) -> None:
        local = event == "socket.connect" and getattr(arguments[0], "family", None) == socket.AF_UNIX
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto") and not local:
            connections.append(f"{event} {arguments[1:]}")

    (Path(runs) / "table.csv").write_text("batch_size,prompt_len,new_tokens,tokens_per_s\n1,8,8,100\n")
    sys.addaudithook(guard)
    patch = pytest.MonkeyPatch()
    hurry(patch, pictures=True, script_least_s=1.0)  # the results of measurements do not matter here
    from profiler.cli.app import main as roofscope

    codes = {}
    for number, arguments in enumerate(commands(model, script, Path(runs))):
        sys.argv = ["roofscope", *arguments]
        printed = io.StringIO()
        code: int | str | None = 0
        with contextlib.redirect_stdout(printed):
            try:
                roofscope()
            except SystemExit as ended:
                code = ended.code
        (Path(runs) / f"printed-{number}-{arguments[0]}.txt").write_text(printed.getvalue())
        codes[f"{number} {arguments[0]}"] = code or 0
    print(json.dumps({"connections": connections, "codes": codes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
