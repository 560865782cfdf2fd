"""A campaign: record the sites, inject the faults, and print each failure with the line that replays it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pandas as pd

from .kinds import KINDS, modes, plausible
from .oracles import Ran
from .sites import Injection, Site, positions
from .trial import SCENARIOS, Played, Trial, ran, tried

_LONGEST_S = 180.0
"""A trial that takes longer, in real seconds, counts as hanging."""


_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Recorded:
    """A scenario recorded without a fault."""

    played: Played
    model: Path
    base: Ran

    def tried(self, injection: Injection) -> Trial:
        return tried(injection, self.played, self.model, self.base)


def recorded(played: Played, parent: Path) -> Recorded:
    """Run the scenario twice: the first run imports libraries and learns operators."""
    for library in played.libraries:
        __import__(library)
    model = played.asked.folder(parent / played.name)
    for number in range(2):
        base = ran(played, model, parent / played.name / f"run-{number}")
        if base.code != 0 or base.folder is None:
            sys.exit(f"{played.name} fails without a fault ({base.code}): {base.err}{base.escaped}")
    return Recorded(played, model, base)


def injections(recordings: Iterable[Recorded]) -> list[Injection]:
    """Return each site in each stage at its first, middle and last call, in the first scenario that has it."""
    planned: list[Injection] = []
    seen: set[tuple[Site, str]] = set()
    for each in recordings:
        numbers: dict[tuple[Site, str], list[int]] = {}
        for call in each.base.calls:
            numbers.setdefault((call.site, call.stage), []).append(call.number)
        lies = each.played.lies
        fresh = {group: own for group, own in numbers.items() if lies or group not in seen}
        seen |= set(fresh)
        last = {call.site: call.number for call in each.base.calls}
        planned += {
            Injection(site, number, kind, mode, each.played.name)
            for (site, _), own in fresh.items()
            for number in positions(own)
            for kind in plausible(site.api)
            if not lies or KINDS[kind].raised is None
            for mode in modes(site.api, kind)
            if mode == "once" or number < last[site]
        }
    planned.sort()
    random.Random(0).shuffle(planned)  # a campaign that stops early has then tried faults of every kind
    return planned


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="of " + ", ".join(SCENARIOS))
    parser.add_argument("--only", default="", help="faults whose line holds this; a whole line replays one")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roofscope-faults-") as folder:
        recordings = {name: recorded(SCENARIOS[name], Path(folder)) for name in options.scenarios.split(",")}
        planned = [each for each in injections(recordings.values()) if options.only in str(each)]
        sites = {call.site for each in recordings.values() for call in each.base.calls}
        print(f"{len(sites)} sites, {len(planned)} faults", flush=True)
        if options.sample:
            planned = random.Random(options.seed).sample(planned, min(options.sample, len(planned)))
            print(f"{len(planned)} of them by seed {options.seed}", flush=True)
        trials = _trials(recordings, planned, options.jobs)
    failed = sum(bool(trial.failures) for trial in trials)
    print(f"{len(trials)} faults, {failed} after which something does not hold")
    codes = [str(each.code) for each in trials]
    faults = {
        "API": [each.injection.site.api for each in trials],
        "fault": [f"{each.injection.kind} {each.injection.mode}" for each in trials],
    }
    for name, values in faults.items():
        print(pd.crosstab(pd.Series(values, name=name), pd.Series(codes, name="exit code")).to_string(), end="\n\n")
    sys.exit(1 if failed else 0)


def _trials(recordings: dict[str, Recorded], planned: Sequence[Injection], jobs: int) -> list[Trial]:
    trials: list[Trial] = []
    gc.collect()
    gc.freeze()  # existing objects are then not collected again in each process
    calls = [partial(recordings[each.scenario].tried, each) for each in planned]
    started_s = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for number, answer in forked(calls, jobs=jobs, limit_s=_LONGEST_S):
            if isinstance(answer, str):
                answer = Trial(planned[number], None, (f"ends: {answer}",), answer)
            trials.append(answer)
            for failure in answer.failures:
                print(f"{answer.injection}: {failure}"[:400], flush=True)
            if len(planned) == 1:
                print(answer.said)
            if len(trials) % 100 == 0:
                print(f"-- {len(trials)} in {time.monotonic() - started_s:.0f} s", flush=True)
    return trials


def forked(calls: Sequence[Callable[[], Any]], *, jobs: int, limit_s: float) -> Iterator[tuple[int, Any]]:
    """Yield (number, answer) of each call as it ends; the answer is the reason, as text, if it raised or died.

    The limit is in CPU time, which other processes do not affect. Calls that wait are ended if none ends within ten
    times the limit.
    """
    waiting = list(enumerate(calls))
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, call = waiting.pop(0)
                receiving, sending = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_answer, args=(call, sending, limit_s))
                process.start()
                sending.close()
                running[receiving] = number, process
            for connection in wait(list(running), 10 * limit_s) or _killed(running):
                number, process = running.pop(connection)
                try:
                    answer = connection.recv()
                except EOFError:
                    process.join()
                    answer = f"its process ended with {process.exitcode} (-9: waited too long, -24: too much CPU)"
                process.join()
                yield number, answer
    finally:
        _killed(running)


def _answer(call: Callable[[], Any], sending: Connection, limit_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 5))
    try:
        answer = call()
    except BaseException:
        answer = traceback.format_exc()
    sending.send(answer)


def _killed(running: dict[Connection, tuple[int, ForkProcess]]) -> list[Connection]:
    for _, process in running.values():
        process.kill()
    return list(running)
