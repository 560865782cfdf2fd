"""The share of the roofline that each figure attains, its regime and warnings about it, as values and on a screen."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Literal

from pydantic import PlainSerializer

from profiler.data.ceiling_set import sustained_words
from profiler.json_document import Document
from profiler.judge.regimes import CEILING_TOLERANCE, COMPUTE_SHARE, MEMORY_SHARE, Regime
from profiler.quant.registry import FORMATS, flag_of
from profiler.readers.figures import Covers, Figure
from profiler.report.blocks import Lines, Section, Sentences, text_table
from profiler.units import duration, significant

Fit = Literal["yes", "perhaps", "no", "host", "other"]
"""Whether the weights and the cache fit into the memory of the GPUs; perhaps: in fewer bits, or without a part.

Or why that is not asked: some weights were in the host's memory, or the figure is of another model."""
_NO_SHARE: Mapping[Fit, str] = {"no": "does not fit", "host": "partly on the host", "other": "another model"}

# A first repetition was cold if it took this many times as long as each of at least so many others.
_LEAST_OTHERS = 2
_MUCH_LONGER = 1.5
# From this share of the ceiling on, a decode step may be several tokens' that a tool counted as one.
_HALF = 0.5


@dataclass(frozen=True)
class PlacedFigure:
    """One figure, compared with its floor."""

    phase: Covers
    """What `latency_s` covers: a prefill, one decode step, or a whole `generate`."""
    batch_size: int
    prompt_len: int
    context_len: int
    new_tokens: int | None
    latency_s: float
    tokens_per_s: float
    """Tokens of all sequences per second: prompt tokens for a prefill, otherwise generated tokens."""
    floor_s: float
    link_s: float | None
    """Least seconds of the collectives of several GPUs, not part of `floor_s`; None if they are not known."""
    bound: Literal["compute", "memory"]
    attained: float
    """`floor_s` / `latency_s`: the share of the roofline, unless `no_share` says why it is none."""
    fits: bool
    """Whether the weights and the cache fit into the memory of the GPUs, or may have in a way that a warning names."""
    no_share: str
    """`does not fit`, `partly on the host` or `another model`; empty if `attained` is a share of these ceilings."""
    regime: Regime | None
    """None for a figure above the ceiling, which is not a valid measurement of this work, or without a share."""
    note: Annotated[tuple[str, ...], PlainSerializer("; ".join, return_type=str)]
    settings: str = ""
    """The settings in which the figure differs from others of its file."""
    spread: float | None = None
    """Standard deviation of the repetitions / `latency_s`; None if the file has neither."""


@dataclass(frozen=True)
class PlaceCeilings:
    """The ceilings that the figures are compared with."""

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Peak FLOP/s by dtype."""
    sustained_bytes_per_s: float | None = None
    """What copies attain of a datasheet's bandwidth, as others measured it; null if unknown."""


@dataclass(frozen=True)
class PlacedFile(Document):
    """`roofscope place --format json`."""

    tool: str
    file: str
    model: str
    dtype: str
    quant: str
    stored: str
    """The precision of the weights that the floors assume, in words."""
    ceilings: PlaceCeilings
    warnings: Sequence[str]
    gpus: int
    """GPUs that work on one step together; `ceilings` are those of all of them."""
    link: str
    """The name of the link between them; empty without one."""
    rows: Sequence[PlacedFigure]


def placed(figure: Figure, floor: tuple[float, float, float | None], fit: Fit, is_known: bool) -> PlacedFigure:
    """The figure with its share of the roofline, its regime and its notes. All its shapes must be known.

    `floor` are the compute-bound, memory-bound and messages' seconds. A foreign figure has no time breakdown, so a low
    share is inconclusive, as is any of weights whose bits are not known (`is_known`).
    """
    compute_s, memory_s, link_s = floor
    time, shape = figure.time, figure.shape
    batch, prompt, new = shape.batch_size or 0, shape.prompt_len or 0, shape.new_tokens or 0
    tokens = {"prefill": prompt, "decode": figure.tokens_given or 1, "generate": new}[figure.covers]
    attained = (compute_s + memory_s) / time.value
    by_compute = compute_s > memory_s
    regime: Regime | None = None if fit in _NO_SHARE or attained > 1 + CEILING_TOLERANCE else "inconclusive"
    if regime and is_known and fit != "perhaps" and attained >= (COMPUTE_SHARE if by_compute else MEMORY_SHARE):
        regime = "compute-bound" if by_compute else "memory-bound"
    spread = statistics.stdev(time.values) if len(time.values) > 1 else time.spread
    return PlacedFigure(
        phase=figure.covers,
        batch_size=batch,
        prompt_len=prompt,
        context_len=shape.context_len or 0,
        new_tokens=shape.new_tokens,
        latency_s=time.value,
        tokens_per_s=batch * tokens / time.value,
        floor_s=compute_s + memory_s,
        link_s=link_s,
        bound="compute" if by_compute else "memory",
        attained=attained,
        fits=fit != "no",
        no_share=_NO_SHARE.get(fit, ""),
        regime=regime,
        note=tuple(_notes(figure, attained, fit, regime)),
        settings=", ".join(f"{name} {value}" for name, value in figure.settings if value != "-"),
        spread=spread / time.value if spread else None,
    )


_OVERHEAD = "below half of the ceiling at batch 1: overhead ({}) or GPUs' links, rather than their memory"
CEILING_ALLOWS = "faster than the ceiling allows"
_SUSPICIONS: dict[Covers, str] = {
    "prefill": "the prompt may have come from a cache",
    "decode": "prompt tokens may be counted, several tokens per step speculated",
    "generate": "prompt tokens may be counted as generated",
}
"""Likely reasons for a figure above the ceiling, by what it covers."""


def _notes(figure: Figure, attained: float, fit: Fit, regime: Regime | None) -> Iterator[str]:
    """A suspicion if the figure is too fast or slow, then the notes of its file, then remarks."""
    if fit not in _NO_SHARE and attained > 1 + CEILING_TOLERANCE:
        why = f"{_SUSPICIONS[figure.covers]}, or the file is of several GPUs or of another GPU or precision"
        yield f"{CEILING_ALLOWS}: {why}"
    elif fit not in _NO_SHARE and figure.tokens_given is None and figure.covers == "decode" and attained > _HALF:
        yield (
            "the file does not say how many tokens a step gives: with speculative decoding a step takes as many times"
            " longer, and its share is smaller"
        )
    elif fit == "yes" and figure.covers == "decode" and figure.shape.batch_size == 1 and attained < _HALF:
        yield _OVERHEAD.format("host, kernels, drafting" if figure.tokens_processed > 1 else "host, kernels")
    if regime == "memory-bound" and figure.covers == "decode" and figure.shape.batch_size == 1:
        yield "memory-bound at batch 1: fewer bits per weight, drafts or a larger batch save more than other kernels"
    yield from figure.notes
    if figure.weight_bytes:
        yield f"{8 * figure.weight_bytes:.2f} bits per weight as stored"
    first, *others = figure.time.values or (0.0,)
    if len(others) >= _LEAST_OTHERS and first > _MUCH_LONGER * max(others):
        ratio = first / statistics.median(others)
        yield f"its first repetition took {ratio:.1f} times as long as the others: it may include warm-up"


# With a prompt at least four times as long, a decode step grows to 1.5 times what its floor allows only if the prefill
# is in it.
_LONGER_PROMPT = 4.0
_FAR_MORE = 1.5


def doubts(rows: Sequence[PlacedFigure]) -> Iterator[str]:
    """Warnings about a whole file: figures above the ceiling, and decode steps that seem to include the prefill."""
    if above := sum(not row.no_share and row.regime is None for row in rows):
        yield f"{above} of {len(rows)} figures {'is' if above == 1 else 'are'} above the ceiling, so not valid."
    series: dict[tuple[int, int | None, str], list[PlacedFigure]] = {}
    for row in rows:
        if row.phase == "decode" and row.prompt_len:
            series.setdefault((row.batch_size, row.new_tokens, row.settings), []).append(row)
    for (batch, *_), steps in series.items():
        first, last = (of(steps, key=attrgetter("prompt_len")) for of in (min, max))
        is_longer = last.prompt_len >= _LONGER_PROMPT * first.prompt_len
        if is_longer and last.latency_s / first.latency_s > _FAR_MORE * last.floor_s / first.floor_s:
            yield (
                f"decode steps at batch {batch} grow with the prompt far more than the cache does: they seem to include"
                " the prompt's time."
            )
            return


_CAPTIONS = {
    "what": "floor: the least time that the work needs; by: what sets the floor; attained: floor / time",
    "spread": "spread: standard deviation of the repetitions",
    "link": "link: about the least time of the messages over {link}, not in the floor",
}


def placed_section(file: PlacedFile) -> Section:
    """A title, the warnings, a table of the figures and their notes, each note once.

    A share of a ceiling that is not the model's is not shown.
    """
    rows, names = file.rows, _names(file.rows)
    columns: dict[str, Sequence[str]] = {
        "what": names,
        "time": [duration(row.latency_s) for row in rows],
        "spread": ["-" if row.spread is None else f"{100 * row.spread:.1f} %" for row in rows],
        "tok/s": [significant(row.tokens_per_s) for row in rows],
        "floor": [duration(row.floor_s) for row in rows],
        "link": ["-" if row.link_s is None else duration(row.link_s) for row in rows],
        "by": [row.bound for row in rows],
        "attained": [f"{significant(100 * row.attained, 2)} %" if not row.no_share else "-" for row in rows],
        "regime": [row.regime or row.no_share or "above the ceiling" for row in rows],
    }
    shown = [name for name, cells in columns.items() if name not in ("spread", "link") or set(cells) != {"-"}]
    caption = "; ".join(_CAPTIONS[name].format(link=file.link) for name in shown if name in _CAPTIONS)
    cells = [list(row) for row in zip(*(columns[name] for name in shown), strict=True)]
    table = text_table(shown, cells, texts=("by", "regime"), wrapped=("what",), caption=caption)
    title = f"{file.tool}: {file.model} {file.stored} under the ceilings of {file.ceilings.name}"
    warnings = Lines([f"warning: {text}" for text in file.warnings])
    attained = sustained_words(file.ceilings.name, file.ceilings.bytes_per_s, file.ceilings.sustained_bytes_per_s)
    notes = Lines([*_note_lines(rows, names), f"next: {_next_step(file)}"])
    return Section("", [Sentences([title, *attained]), warnings, table, notes])


def _next_step(file: PlacedFile) -> str:
    """What to do next: correct the request, or measure what takes the rest of the time."""
    on_host = [row.no_share == _NO_SHARE["host"] for row in file.rows]
    if all(on_host):
        return f"find a GPU that holds all of it: roofscope count {file.model}{flag_of(file.quant)} --gpu NAME"
    if any(row.regime is None for row, is_there in zip(file.rows, on_host, strict=True) if not is_there):
        return "compare --model, --gpu, --quant and --tp with how the tool ran, and give them as they were"
    quant = f" --quant {file.quant}" if file.quant in FORMATS and file.quant != "none" else ""
    return f"measure on that GPU what takes the rest of the time: roofscope run {file.model}{quant}"


def _names(rows: Sequence[PlacedFigure]) -> list[str]:
    """A name for each row; decode steps of one context also have their number of tokens."""
    counts = Counter(_name(row) for row in rows)
    return [_name(row, with_tokens=counts[_name(row)] > 1) for row in rows]


def _name(row: PlacedFigure, *, with_tokens: bool = False) -> str:
    is_decode = row.phase == "decode"
    length = row.prompt_len + (row.context_len if is_decode else 0)
    new = f" + {row.new_tokens}" if row.new_tokens and (with_tokens if is_decode else row.phase == "generate") else ""
    after = f" after {row.context_len}" if row.context_len and not is_decode else ""
    return f"{row.phase} {row.batch_size} x {length}{new}{after}{f', {row.settings}' if row.settings else ''}"


def _note_lines(rows: Sequence[PlacedFigure], names: Sequence[str]) -> Iterator[str]:
    """Each remark once, with the figures that it is about: those above the ceiling first, then the most frequent."""
    by_note: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        for note in row.note:
            by_note.setdefault(note, []).append(name)
    for note, noted in sorted(by_note.items(), key=lambda item: (CEILING_ALLOWS not in item[0], -len(item[1]))):
        every = f"all {len(rows)}" if len(rows) > 2 else "both"
        which = f"{every} figures" if len(noted) == len(rows) else f"{len(noted)} figures like {noted[0]}"
        yield f"{noted[0] if len(noted) == 1 else which}: {note}"
