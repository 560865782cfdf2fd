"""Markdown tables of a campaign: the faults, their outcomes, and the reached `except` clauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from . import clauses
from .sites import ROOT, Site
from .trial import Trial

_FAMILIES = ("pynvml", "bitsandbytes", "torchao", "import", "disk", "torch.profiler.profile")


def tables(trials: Sequence[Trial], sites: Collection[Site], reached: Collection[str]) -> Iterator[str]:
    """Return the lines of the tables; `reached` are the clauses reached by runs without a fault."""
    failed = sum(bool(trial.failures) for trial in trials)
    yield f"{len(trials)} faults, {failed} after which something does not hold"
    yield from _table(
        ("API", "sites", "faults", "exit 0", "exit 3", "exit 2", "does not hold"),
        (
            (f"`{family}`", sum(_family(site) == family for site in sites), *_counts(own))
            for family in sorted({_family(trial.injection.site) for trial in trials})
            if (own := [trial for trial in trials if _family(trial.injection.site) == family])
        ),
    )
    yield from _table(
        ("fault", "faults", "exit 0", "exit 3", "exit 2", "does not hold"),
        (
            (f"`{kind}` {mode}", *_counts([t for t in trials if (t.injection.kind, t.injection.mode) == (kind, mode)]))
            for kind, mode in sorted({(trial.injection.kind, trial.injection.mode) for trial in trials})
        ),
    )
    oracles = Counter(oracle for t in trials for oracle in {failure.partition(":")[0] for failure in t.failures})
    if oracles:
        yield from _table(("does not hold", "after faults"), oracles.most_common())
    every = {*reached, *(clause for trial in trials for clause in trial.reached)}
    own = [clause for clause in clauses.clauses(Path(ROOT)) if clauses.faces_device(clause)]
    yield f"{len(every & {*own})} of {len(own)} `except` clauses of the modules that face a device were reached; not:"
    yield ", ".join(f"`{clause}`" for clause in own if clause not in every)


def _family(site: Site) -> str:
    return next((name for name in _FAMILIES if site.api.startswith(name)), site.api)


def _counts(trials: Sequence[Trial]) -> tuple[int, ...]:
    codes = Counter(trial.code for trial in trials)
    return len(trials), codes[0], codes[3], codes[2], sum(bool(trial.failures) for trial in trials)


def _table(heads: Sequence[str], rows: Iterator[Sequence[object]] | Sequence[Sequence[object]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""
