"""Whether a run stood next to busy processes, and what its results are worth then."""

from __future__ import annotations

from profiler.facts.contention import Contention
from profiler.facts.run_facts import Facts
from profiler.stats import MOST_FOREIGN_CORES
from profiler.units import several

# A run is one of a busy machine if others took cores in at least this share of its visits.
_BUSY_SHARE = 0.25


def busy_sentences(facts: Facts) -> list[str]:
    """Who kept cores busy during the visits, and what that means; empty for a run that others left alone."""
    loads = [visit.foreign_cores for visits in facts.visits.values() for visit in visits]
    known = [cores for cores in loads if cores is not None]
    busy = [cores for cores in known if cores > MOST_FOREIGN_CORES]
    seen = facts.every(Contention)
    if len(busy) < _BUSY_SHARE * len(known) or not (busy or seen):
        return []
    worst = max(seen, key=lambda item: item.cores, default=None)
    who = worst.who if worst else "other work"
    cores = max([*busy, *(item.cores for item in seen)])
    of = f" of {several(worst.of_cores, 'core', 'cores')}" if worst else " cores"
    when = f" in {len(busy)} of {several(len(known), 'visit', 'visits')}" if known else ""
    return [
        f"This machine was busy: {who} kept up to {cores:.1f}{of} busy{when}.",
        "A quiet machine takes less time, by an unknown factor, and other regimes may bind there: no saving is named.",
    ]
