"""A campaign: record the sites, inject the faults, print what does not hold with the line that replays it."""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import clauses
from .kinds import KINDS, modes, plausible
from .oracles import Ran
from .pool import Lost, forked
from .scenarios import SCENARIOS, Played
from .sites import ROOT, Injection, Site, positions
from .trial import Trial, ran, tried

_LONGEST_S = 180.0
"""Real seconds of a trial: past them it hangs."""


@dataclass(frozen=True)
class Recorded:
    """A scenario without a fault."""

    played: Played
    model: Path
    base: Ran


def recorded(played: Played, parent: Path) -> Recorded:
    """Run it twice: the first time libraries are imported and operators are learned."""
    for library in played.libraries:
        __import__(library)
    model = played.asked.folder(parent / played.name)
    for number in range(2):
        base = ran(played, model, parent / played.name / f"run-{number}")
        if base.code != 0 or base.folder is None:
            sys.exit(f"{played.name} fails without a fault ({base.code}): {base.err}{base.escaped}")
    return Recorded(played, model, base)


def injections(found: Iterable[Recorded]) -> list[Injection]:
    """Each site in each stage at its first, middle and last call, in the first scenario that has it."""
    planned: list[Injection] = []
    seen: set[tuple[Site, str]] = set()
    for each in found:
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
    random.Random(0).shuffle(planned)  # whoever stops a campaign has seen a bit of everything
    return planned


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", metavar="LINE", help="'API@file:line#n kind once|on scenario': this one, in detail")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="of " + ", ".join(SCENARIOS))
    parser.add_argument("--only", default="", help="faults whose line holds this")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    asked = parser.parse_args()
    replayed = None if asked.replay is None else Injection.parse(asked.replay)
    names = [replayed.scenario] if replayed else asked.scenarios.split(",")
    with tempfile.TemporaryDirectory(prefix="roofscope-faults-") as folder:
        found = {name: recorded(SCENARIOS[name], Path(folder)) for name in names}
        if replayed:
            trial = tried(
                replayed, found[replayed.scenario].played, found[replayed.scenario].model, found[replayed.scenario].base
            )
            print(trial.said)
            print(*(trial.failures or ("all holds",)), sep="\n")
            sys.exit(1 if trial.failures else 0)
        planned = injections(found.values())
        sites = {call.site for each in found.values() for call in each.base.calls}
        planned = [each for each in planned if asked.only in str(each)]
        if asked.sample:
            planned = random.Random(asked.seed).sample(planned, min(asked.sample, len(planned)))
        print(f"{len(sites)} sites, {len(planned)} faults", flush=True)
        trials = _trials(found, planned, asked.jobs)
    report(trials, asked.out)


def _trials(found: dict[str, Recorded], planned: Sequence[Injection], jobs: int) -> list[Trial]:
    gc.collect()
    gc.freeze()  # what is here already is not looked at again in each process
    calls = [partial(tried, each, *_of(found[each.scenario])) for each in planned]
    trials: list[Trial] = []
    started_s = time.monotonic()
    for number, answer in forked(calls, jobs=jobs, limit_s=_LONGEST_S):
        if isinstance(answer, Lost):
            answer = Trial(planned[number], None, "", (), (f"ends: {answer.why}",), frozenset(), answer.why)
        trials.append(answer)
        for failure in answer.failures:
            print(f"{answer.injection}: {failure}"[:400], flush=True)
        if len(trials) % 100 == 0:
            print(f"-- {len(trials)} of {len(planned)} in {time.monotonic() - started_s:.0f} s", flush=True)
    return trials


def _of(each: Recorded) -> tuple[Any, ...]:
    return each.played, each.model, each.base


def report(trials: Sequence[Trial], out: Path | None) -> None:
    failed = [trial for trial in trials if trial.failures]
    print(f"{len(trials)} faults, {len(failed)} after which something does not hold")
    counted = Counter(failure.partition(":")[0] for trial in trials for failure in trial.failures)
    for name, count in counted.most_common():
        print(f"  {count:5d} {name}")
    print("exit codes:", dict(Counter(str(trial.code) for trial in trials)))
    reached = set().union(*(trial.reached for trial in trials))
    own = [clause for clause in clauses.clauses(Path(ROOT)) if clauses.faces_device(clause)]
    print(f"{len(reached & set(own))} of {len(own)} except clauses of the modules that face a device were reached")
    if out is not None:
        rows = [
            {
                "fault": str(t.injection),
                "code": t.code,
                "stage": t.stage,
                "way": t.way,
                "failures": t.failures,
                "said": t.said[-2000:],
            }
            for t in trials
        ]
        out.write_text(json.dumps({"trials": rows, "reached": sorted(reached), "clauses": own}, indent=1))
    sys.exit(1 if failed else 0)
