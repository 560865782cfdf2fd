"""The glossary, whose terms data/glossary.csv has: each term in two lines, with a run's own figures."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import get_args

from profiler.data import texts_of
from profiler.errors import RequestError, near_misses
from profiler.grid.cells import PHASES, Phase
from profiler.judge.breakdown import TERMS
from profiler.judge.regimes import LIMITS, Regime
from profiler.report.roofline_data import ceiling_lines
from profiler.report.selection import of_phase
from profiler.stats import samples_for
from profiler.store.folder import Run
from profiler.units import duration, percent, scaled, significant


def explanation(word: str, run: Run | None = None) -> str:
    """Return the meaning of a term or of a synonym, and its figures in `run`. Raises RequestError for another word."""
    key = known_term(word)
    if key is None:
        hint = near_misses(word.lower(), tuple(_TERM_OF))
        raise RequestError(f"{word!r} is not in the glossary.{hint} `roofscope explain` lists all terms.")
    figures = _FIGURES[key](run) if run is not None and key in _FIGURES else None
    see = "" if key.lower() == word.strip().lower() else f"{word.strip()}: see {key}.\n"
    return f"{see}{key}: {GLOSSARY[key]}" + (f"\nIn this run: {figures}" if figures else "")


def known_term(word: str) -> str | None:
    """Return the term that a word names or is a synonym of; None if the glossary has neither."""
    return _TERM_OF.get(word.strip().lower())


def _ends(values: Iterable[float], show: Callable[[float], str]) -> str:
    """The least and the greatest, or one of them if both look the same; empty if none is known."""
    known = [value for value in values if not math.isnan(value)]
    return " to ".join(dict.fromkeys(map(show, (min(known), max(known))))) if known else ""


def _range(run: Run, column: str, show: Callable[[float], str], phase: Phase = "decode") -> str | None:
    ends = _ends((float(getattr(result, column)) for result in of_phase(run.measured, phase)), show)
    return f"{ends} in {phase}" if ends else None


def _percentiles(run: Run, columns: Mapping[int, str], phase: Phase) -> str | None:
    ranges = {percent: _range(run, column, duration, phase) for percent, column in columns.items()}
    words = (
        f"p{percent} {shown}" if shown else f"p{percent} needs {samples_for(percent)} samples, no cell has so many"
        for percent, shown in ranges.items()
    )
    return "; ".join(words) if ranges[50] else None


def _both(run: Run, column: str, show: Callable[[float], str]) -> str | None:
    return "; ".join(filter(None, (_range(run, column, show, phase) for phase in PHASES))) or None


def _of_sheet(run: Run, column: str) -> str | None:
    device = run.document.device
    without = None if device.datasheet else f"none, there is no datasheet of {device.name}"
    return _both(run, column, percent) or without


def _counted(run: Run, *, regime: Regime) -> str | None:
    measured = run.measured
    return f"{sum(result.regime == regime for result in measured)} of {len(measured)} cells" if measured else None


def _share(run: Run, *, column: str) -> str | None:
    ends = _ends((getattr(result, column) / result.latency_s for result in run.measured), percent)
    return f"{ends} of the time" if ends else None


def roofline_words(run: Run) -> str | None:
    """Return `4.39 TB/s and 671 TFLOP/s (773 TFLOP/s at full clock), measured here`; None without both ceilings."""
    if not (lines := ceiling_lines(run)):
        return None
    measured = run.document.ceilings.ceilings.measured(run.model.dtype)
    full = run.document.ceilings.full_clock.get(run.model.dtype, 0.0)
    at_full_clock = f" ({scaled(full, 'FLOP/s')} at full clock)" if full > lines[0].flops_per_s else ""
    where = f"{'' if measured else 'not all '}measured here"
    return f"{lines[0].slope_name} and {scaled(lines[0].flops_per_s, 'FLOP/s')}{at_full_clock}, {where}"


def _ridge(run: Run) -> str | None:
    lines = ceiling_lines(run)
    return f"{significant(lines[0].ridge)} FLOP/byte" if lines else None


def _weight_read(run: Run) -> str | None:
    if (weights := run.document.ceilings.weights) is None:
        return None
    stream_per_s = weights.stream.per_s if weights.stream else run.document.ceilings.memory_bytes_per_s
    stream = f", a stream {scaled(stream_per_s, 'B/s')}" if stream_per_s else ""
    return f"{scaled(weights.ceiling.per_s, 'B/s')}{stream}"


def _interval(run: Run) -> str | None:
    widths = [(result.latency_high_s - result.latency_low_s) / 2 / result.latency_s for result in run.measured]
    return f"half-width {100 * statistics.median(widths):.1f} % at the median cell" if widths else None


GLOSSARY: dict[str, str] = {
    **texts_of("glossary.csv"),
    **{label: limit.meaning for label, limit in LIMITS.items()},
    **{term.short: term.meaning for term in TERMS.values()},
}
"""The meaning of each term: those of data/glossary.csv, the limits of a cell, and the terms of the time breakdown."""
# Synonyms are words of the field, or of earlier versions.
_TERM_OF = {
    **{word.lower(): term for word, term in texts_of("synonyms.csv").items()},
    **{name.lower(): name for name in GLOSSARY},
}

_FIGURES: dict[str, Callable[[Run], str | None]] = {
    "prefill": lambda run: _range(run, "latency_s", duration, "prefill"),
    "decode": lambda run: _range(run, "latency_s", duration),
    "TTFT": lambda run: _percentiles(run, {50: "ttft_s", 90: "ttft_p90_s", 95: "ttft_p95_s"}, "prefill"),
    "TPOT": lambda run: _percentiles(run, {50: "latency_s", 90: "p90_s", 99: "p99_s"}, "decode"),
    "intensity": lambda run: _both(run, "intensity", significant),
    "weight read": _weight_read,
    "roofline": roofline_words,
    "ridge point": _ridge,
    "MFU": lambda run: _of_sheet(run, "mfu"),
    "MBU": lambda run: _of_sheet(run, "mbu"),
    "% ceiling": lambda run: _both(run, "attained", percent),
    "overhead model": partial(_share, column="overhead_s"),
    "interval": _interval,
    **{term.short: partial(_share, column=column) for column, term in TERMS.items()},
    **{regime: partial(_counted, regime=regime) for regime in get_args(Regime)},
}
"""What a run has to say about a term."""
