"""Forecast a model that is split over several GPUs: the step of one rank, and the collectives over their link."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiler.counting.tensor_parallel import check_ranks
from profiler.data.datasheets import gpu_called
from profiler.data.links import link_called, published_links
from profiler.device.contention import ForeignLoad
from profiler.errors import RequestError
from profiler.forecast.command import (
    ForecastRequest,
    RunFacts,
    forecast_from_facts,
    forecast_on,
    meta_model_of,
    run_facts,
)
from profiler.forecast.options import RankOptions
from profiler.forecast.shards import SET_S, ShardTime, machine_of, replay_shards
from profiler.json_document import Document, view
from profiler.options import listed
from profiler.predict.result import Answer, ForecastCell, ForecastError, StepShape
from profiler.report.progress import QuietListener
from profiler.run.warnings import busy_words
from profiler.units import duration, scaled, significant

_MOST_RANKS = 64


def forecast_ranks(
    source: str, on: str, request: ForecastRequest, options: RankOptions, listener: QuietListener
) -> RanksDocument:
    """Forecast the requested cells on one GPU and on each number of GPUs.

    For a run on this very device, a rank's linears are replayed, which `listener` reports. Raises RequestError for
    impossible options, or for a model that cannot be split.
    """
    ranks = parse_ranks(options.tp)
    if not options.link:
        raise RequestError(
            f"--tp {options.tp} needs --link: {', '.join(published_links())}, or alpha_us,GB/s, such as 8,20."
        )
    if options.usd_per_h is not None and not 0 < options.usd_per_h < math.inf:
        raise RequestError(f"--price {options.usd_per_h:g} is not possible; give USD per hour above 0.")
    links = {count: link_called(options.link, count) for count in ranks}
    if request.quant != "none":
        raise RequestError(f"--tp: weights in {request.quant} are packed and cannot be split; leave --quant out.")
    requests = {1: request, **{count: replace(request, ranks=count, link=links[count]) for count in ranks}}
    if on:
        answers = {count: forecast_on(source, on, each) for count, each in requests.items()}
        card = gpu_called(on).gpu
        kernel_notes: tuple[str, ...] = (_OF_THE_DATASHEET,)
    else:
        basis = run_facts(Path(source), request.engine)
        card = basis.run.document.device.name
        _check_splittable(basis, ranks)
        kernels, kernel_notes = _replayed_kernels(basis, [requests[count] for count in ranks], listener)
        answers = {count: forecast_from_facts(basis, each, kernels.get(count)) for count, each in requests.items()}
    single, link = answers[1], next(iter(links.values())).name
    cells = across([(count, answer.cells) for count, answer in answers.items()], options.usd_per_h)
    return RanksDocument(
        source=single.source,
        model=single.model,
        precision=single.precision,
        on=f"each of several {card}",
        how=single.how,
        sentence=_sentence(cells, link, card),
        link=link,
        links=tuple(
            f"Link of {count} GPUs: {duration(link.alpha_s)} per message, {scaled(link.bus_bytes_per_s, 'B/s')};"
            f" {link.source}."
            for count, link in links.items()
        ),
        price="" if options.usd_per_h is None else f"USD {options.usd_per_h:g} per hour and GPU.",
        error=single.error,
        cells=cells,
        notes=(*kernel_notes, *_notes(single)),
    )


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse `2,4,8` to ascending numbers of GPUs. Raises RequestError for anything but numbers from 2 to 64."""
    try:
        ranks = sorted({int(part) for part in listed(text)})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 2 or ranks[-1] > _MOST_RANKS:
        raise RequestError(f"--tp {text!r} is not possible; give numbers of GPUs from 2 to {_MOST_RANKS}: 2,4,8.")
    return tuple(ranks)


def _check_splittable(basis: RunFacts, ranks: Sequence[int]) -> None:
    """Raises RequestError for a run whose weights cannot be split over these numbers of ranks."""
    model = basis.facts.model
    if model.quant != "none" or model.kind == "gguf":
        packed = model.quant if model.quant != "none" else "a GGUF file"
        raise RequestError(
            f"--tp: the weights of {basis.run.folder} are packed ({packed}) and cannot be split; use a run of the"
            " unquantised model."
        )
    meta_model = meta_model_of(basis.run.folder, basis.run.document)
    for count in ranks:
        check_ranks(meta_model, count)


def _replayed_kernels(
    basis: RunFacts, requests: Sequence[ForecastRequest], listener: QuietListener
) -> tuple[dict[int, ShardTime], tuple[str, ...]]:
    """(a rank's kernel times by number of ranks, notes on their basis); without times if they cannot be replayed."""
    machine, foreign = machine_of(basis.facts.device), ForeignLoad()
    if isinstance(machine, str):
        return {}, (_not_replayed_note(machine),)
    kernels_by_ranks: dict[int, ShardTime] = {}
    for request in requests:
        listener.stage(f"replaying linears of one of {request.ranks} ranks and of the whole model, {duration(SET_S)}")
        kernels = replay_shards(basis, request, machine)
        if isinstance(kernels, str):
            return {}, (_not_replayed_note(kernels),)
        kernels_by_ranks[request.ranks] = kernels
    return kernels_by_ranks, (
        "A rank's linears were replayed here, in turn with the whole ones. Its attention and experts are assumed to"
        " reach the same share of their roof as the whole ones.",
        *(f"Meanwhile {warning}" for warning in busy_words(machine.info.host_threads, foreign)),
    )


def _not_replayed_note(reason: str) -> str:
    return (
        "A rank's kernels are assumed to reach the same share of their roof as the whole ones, since they were not"
        f" replayed ({reason})."
    )


_OF_THE_DATASHEET = "A rank is assumed to be as efficient as whole models in published figures."


def _notes(single: Answer) -> tuple[str, ...]:
    """The assumptions of a forecast over several GPUs."""
    batches = {cell.batch_size for cell in single.cells}
    return (
        "Messages are assumed not to overlap computation.",
        "Every rank has its own GPU (for CPUs, its own machine): ranks on one machine share its cores and memory.",
        f"Costs are per token at the cell's own batch ({significant(min(batches))} to {significant(max(batches))}).",
        *single.notes,
    )


_S_PER_HOUR = 3600
_WORDS = {2: "Two", 3: "Three", 4: "Four", 6: "Six", 8: "Eight"}
WORTH = 1.01
"""The smallest ratio of two times that counts as faster."""


@dataclass(frozen=True)
class RankTimeRow:
    """The forecast of a step on a number of GPUs."""

    ranks: int
    latency_s: float
    low_s: float
    high_s: float
    """`low_s` and `high_s` are the ends of the 90 % interval."""
    link_s: float
    """The part of `latency_s` that collectives take."""
    tokens_per_s: float
    regime: str
    fits: bool
    tight: bool
    """Whether the step fits, but runs out of memory if free memory is in pieces."""
    usd_per_million: float | None
    """USD per million tokens at this batch, for all GPUs; null without a price."""
    gain: float | None
    """Speed relative to the fewest GPUs that the step fits; null where it does not fit."""
    card_s_per_million: float
    """GPU seconds per million tokens, summed over all GPUs."""


@dataclass(frozen=True)
class RankRow(StepShape):
    """One step by number of GPUs."""

    worse_from: int | None
    """The fewest GPUs on which the step is no faster than on the number before; null if it is always faster."""
    times: Sequence[RankTimeRow]

    @property
    def base(self) -> RankTimeRow | None:
        """The time on the fewest GPUs that the step fits; None if it fits none of these numbers."""
        return next((time for time in self.times if time.fits), None)


def slower_from(times: Sequence[RankTimeRow]) -> int | None:
    """The fewest GPUs on which a step is no faster than on the number before; None if it is always faster."""
    fitting = [time for time in times if time.fits]
    for before, after in itertools.pairwise(fitting):
        if after.latency_s * WORTH > before.latency_s:
            return after.ranks
    return None


@dataclass(frozen=True)
class RanksDocument(Document):
    """`roofscope forecast --tp --format json`."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    sentence: str
    link: str
    links: Sequence[str]
    price: str
    error: ForecastError
    cells: Sequence[RankRow]
    notes: Sequence[str]


def _sentence(every: Sequence[RankRow], link: str, card: str) -> str:
    """The gain of each number of GPUs over a link, for decode if it was forecast.

    For example `Two H100 SXM over pcie5x16 give 1.04x at batch 1 and 1.7x at batch 64.`
    """
    phase = "decode" if any(cell.phase == "decode" for cell in every) else "prefill"
    # The smallest and the largest batch that fit, at the longest context, where more GPUs matter most.
    fitting = [cell for cell in every if cell.phase == phase and cell.base is not None]
    if not fitting:
        return f"No {phase} fits these numbers of GPUs."
    depth = max(cell.depth for cell in fitting)
    deepest = sorted((cell for cell in fitting if cell.depth == depth), key=lambda cell: cell.batch_size)
    first, last = deepest[0], deepest[-1]
    lines = []
    for position, time in enumerate(first.times):
        if time.ranks == 1:
            continue
        words = [
            f"{_gain(cell, cell.times[position])} at batch {cell.batch_size}"
            for cell in ([first, last] if last is not first else [first])
        ]
        number = _WORDS.get(time.ranks, str(time.ranks))
        lines.append(f"{number} {card} over {link} give {' and '.join(words)}.")
    return " ".join(lines)


def _gain(cell: RankRow, time: RankTimeRow) -> str:
    if time.gain is None:
        return "no room"
    if cell.base is time:
        return "room for it"
    return f"{time.gain:.2f}x" if time.gain < 1.995 else f"{time.gain:.1f}x"


def across(forecasts: Sequence[tuple[int, Sequence[ForecastCell]]], usd_per_h: float | None) -> tuple[RankRow, ...]:
    """Join the cells of several forecasts, one per number of GPUs, ascending; `usd_per_h` is the price of one GPU."""
    rows = []
    for index, first in enumerate(forecasts[0][1]):
        cells = [(ranks, forecast[index]) for ranks, forecast in forecasts]
        base_s = next((cell.latency_s for _, cell in cells if cell.fits), None)
        times = []
        for ranks, cell in cells:
            card_s = 1e6 * ranks / cell.tokens_per_s
            usd = None if usd_per_h is None else card_s * usd_per_h / _S_PER_HOUR
            gain = base_s / cell.latency_s if base_s and cell.fits else None
            link_s = cell.terms.get("link_s", 0.0)
            further = {"link_s": link_s, "usd_per_million": usd, "gain": gain, "card_s_per_million": card_s}
            times.append(view(RankTimeRow, cell, ranks=ranks, **further))
        rows.append(view(RankRow, first, times=times, worse_from=slower_from(times)))
    return tuple(rows)
