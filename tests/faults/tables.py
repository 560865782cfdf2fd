"""Markdown tables of a campaign: the faults and their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from .sites import Site
from .trial import Trial

_FAMILIES = ("pynvml", "bitsandbytes", "torchao", "import", "disk", "torch.profiler.profile")


def tables(trials: Sequence[Trial], sites: Collection[Site]) -> Iterator[str]:
    """Return the lines of the tables."""
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
