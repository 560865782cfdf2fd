"""Check roofscope's claims on this card: python tests/gpu/acceptance.py --out FOLDER

It is one call from any folder, and needs no installed roofscope and no network: models are cards with random weights,
sized by the card's memory. It takes at most `--minutes` (9), and writes two files to FOLDER. scoreboard.json is written
again after every check, so a killed call loses nothing; runs.tar.gz has the runs and their pictures. Skipped checks are
listed with their reason. `--only ceilings,trace` runs some groups, so several calls can share the work, each with a
different FOLDER. It changes no setting of the card.

A bare image with torch and transformers often lacks only pydantic, pydantic-core, annotated-types and
typing-inspection. Carry their wheels there (4 MB; name the image's Python):

    python -m pip download pydantic -d wheels --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64
    python -m pip install --no-index --find-links wheels pydantic          (on the image)
    timeout 590 python tests/gpu/acceptance.py --out OUT

bitsandbytes (int8, nf4, fp4) and torchao (int8wo, fp8) are optional; a format without its library is listed as not run.

--dry-run runs the same script on a CPU with a tiny model; checks that need CUDA are then listed as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

_HERE = Path(__file__).resolve()
sys.path[:0] = [path for path in (str(_HERE.parents[number]) for number in (2, 0, 1)) if path not in sys.path]

if TYPE_CHECKING:
    from claims.bench import Attempt, Bench, Check

_BEGAN_S = time.perf_counter()
_NEEDED = (
    "torch", "transformers", "accelerate", "jinja2", "numpy", "packaging", "pandas", "psutil", "pyarrow", "pydantic",
    "pynvml", "rich", "safetensors", "seaborn", "typer",
)  # fmt: skip
"""Imported packages, some of them late; their own requirements are reported when they are imported."""
_TINY = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 1024,
}  # fmt: skip

Groups = dict[str, Callable[["Bench"], Iterable["Attempt"]]]


def groups() -> Groups:
    """Return the groups of checks, the quickest to learn from first; those that may fill the card's memory are last."""
    from claims import ceilings, counts, doubling, formats, machine, recovery, times, tokens, trace

    return {
        "installation": machine.installation, "recovery": recovery.attempts, "ceilings": ceilings.attempts,
        "trace": trace.attempts, "time": times.attempts, "counters": machine.counters,
        "tokens": tokens.attempts, "bytes": counts.attempts,
        "precision": formats.attempts, "telemetry": machine.telemetry,
        "devices": machine.devices, "doubling": doubling.attempts,
    }  # fmt: skip


def questions() -> Groups:
    """Return the groups that run only if `--only` names them, each in a new process (questions.sh)."""
    from claims import questions

    nf4 = partial(questions.lines, quant="nf4")
    return {"lines": questions.lines, "lines-nf4": nf4, "prefill": questions.prefill, "linears": questions.linears}


def checks(bench: Bench, attempts: Iterable[Attempt]) -> Iterator[Check]:
    """Yield every check of a group.

    An attempt that raises is a failed check with one line, and the next one follows.
    """
    from claims.bench import Check, NotRunError, free, red

    for attempt in attempts:
        if lost := bench.cuda and bench.machine.trouble():
            yield Check(attempt.name, None, why=f"the card takes no more work: {lost}")
            continue
        if why := attempt.why_not(bench):
            yield Check(attempt.name, None, why=why)
            continue
        runs = len(bench.memory)
        try:
            yield from attempt.run(bench)
        except NotRunError as reason:
            yield Check(attempt.name, None, why=str(reason))
        except Exception as error:
            yield red(attempt.name, error)
        free()
        yield from bench.memory_checks(runs)


class Scoreboard:
    """The checks so far, in a folder with one JSON file and one archive."""

    def __init__(self, bench: Bench, folder: Path, names: Sequence[str]) -> None:
        from profiler.device.device import describe, software

        self._bench, self._folder, self._waiting = bench, folder, list(names)
        self._found: list[dict[str, Any]] = []
        self._took_s: dict[str, float] = {}
        self._last_s = bench.spent_s
        self._known = {
            "device": describe(bench.device).name,
            "facts": bench.machine.source.facts(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "software": software(),
            "imports_s": bench.imports_s,
            "minutes": bench.minutes,
        }
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, group: str) -> None:
        self._waiting.remove(group)
        self._took_s[group] = 0.0

    def add(self, group: str, check: Check) -> None:
        """Add a check with the seconds since the one before it, and write all of them."""
        seconds, self._last_s = self._bench.spent_s - self._last_s, self._bench.spent_s
        self._took_s[group] += seconds
        self._found.append({"group": group, **asdict(check), "took_s": round(seconds, 3)})
        mark = {True: "pass", False: "FAIL", None: "----"}[check.passed]
        print(f"{mark}  {group}: {check.name}: {check.value} {check.threshold} {check.why}".rstrip(), flush=True)
        self.write()

    def count(self, passed: bool | None) -> int:
        return sum(check["passed"] is passed for check in self._found)

    def write(self) -> None:
        waiting = [{"group": name, "name": name, "passed": None, "why": "not begun yet"} for name in self._waiting]
        document = {
            **self._known,
            "seconds": self._bench.spent_s,
            "took_s": self._took_s,
            "passed": self.count(True),
            "failed": self.count(False),
            "not_run": self.count(None) + len(waiting),
            "checks": [*self._found, *waiting],
            "memory": self._bench.memory,
        }
        draft = self._folder / "scoreboard.part"
        draft.write_text(json.dumps(document, indent=1, default=_plain) + "\n", encoding="utf-8")
        draft.replace(self._folder / "scoreboard.json")

    def archive(self) -> None:
        draft = self._folder / "runs.part"
        with tarfile.open(draft, "w:gz") as packed:
            for run in (row["run"] for row in self._bench.memory):
                if (self._bench.folder / run).exists():
                    packed.add(self._bench.folder / run, arcname=run)
        draft.replace(self._folder / "runs.tar.gz")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _bench(folder: Path, *, dry_run: bool, minutes: float = 9.0, imports_s: float = 0.0) -> Bench:
    import torch
    from claims.bench import LARGE_CARD_BYTES, Bench

    if dry_run:
        bench = Bench(torch.device("cpu"), "", "", folder, minutes, imports_s)
        bench.model = bench.small = bench.made_model("tinyllama-1.1b", "tiny-llama", "LlamaForCausalLM", **_TINY)
        return bench
    memory = torch.cuda.get_device_properties(0).total_memory
    main_model = "mistral-7b-v0.1" if memory > LARGE_CARD_BYTES else "tinyllama-1.1b"
    return Bench(torch.device("cuda", 0), main_model, "tinyllama-1.1b", folder, minutes, imports_s)


def main() -> int:
    options = _options()
    absent = [name for name in _NEEDED if sys.modules.get(name) is None and find_spec(name) is None]
    try:
        if not absent:
            import torch
            from transformers import AutoConfig  # noqa: F401  imported as it is first used

            every = groups()
    except ModuleNotFoundError as error:
        absent = [error.name or str(error)]
    except Exception as error:
        return _refused(f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    if absent:
        packages = (name.partition(".")[0].replace("pynvml", "nvidia-ml-py").replace("_", "-") for name in absent)
        return _refused(f"not installed: {', '.join(packages)}; carry their wheels, as --help shows.")
    imports_s, names = time.perf_counter() - _BEGAN_S, options.only.split(",") if options.only else list(every)
    every |= questions()
    if unknown := [name for name in names if name not in every]:
        return _refused(f"--only {unknown[0]!r} is unknown; use {', '.join(every)}.")
    if not options.dry_run and not torch.cuda.is_available():
        return _refused("no CUDA device answers; --dry-run runs the script on a CPU.")
    with tempfile.TemporaryDirectory(prefix="roofscope-acceptance-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # ceilings of another card of this name must not be found
        bench = _bench(Path(folder), dry_run=options.dry_run, minutes=options.minutes, imports_s=imports_s)
        if options.ncu_target:
            from claims.counts import ncu_target

            bench.model = options.ncu_target
            ncu_target(bench)
            return 0
        return _run(bench, {name: every[name] for name in names}, options.out)


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def _run(bench: Bench, chosen: Groups, out: Path) -> int:
    from claims.bench import red

    board = Scoreboard(bench, out, list(chosen))
    for name, attempts in chosen.items():
        board.begin(name)
        runs, listed = len(bench.memory), []
        try:
            listed = list(attempts(bench))
        except Exception as error:
            board.add(name, red(name, error))
        for check in checks(bench, listed):
            board.add(name, check)
        bench.forget()
        if len(bench.memory) > runs:
            board.archive()
    board.write()
    board.archive()
    print(f"{board.count(True)} passed, {board.count(False)} failed, {board.count(None)} not run: {out}")
    return 1 if board.count(False) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/acceptance"))
    parser.add_argument("--only", metavar="GROUP[,GROUP]", help="run these groups only")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that may end later than this")
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU with a tiny model")
    parser.add_argument("--ncu-target", metavar="MODEL", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
