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
    profile_of,
    run_facts,
)
from profiler.forecast.options import RankOptions
from profiler.forecast.shards import SET_S, ShardTime, machine_of, replay_shards
from profiler.json_document import view
from profiler.options import listed
from profiler.predict.result import Answer, ForecastCell, ForecastError, StepShape
from profiler.report.progress import QuietListener
from profiler.run.warnings import busy_words
from profiler.store.folder import read_document
from profiler.units import duration, scaled, significant

_MOST_RANKS = 64


def forecast_ranks(
    source: str, on: str, request: ForecastRequest, options: RankOptions, listener: QuietListener
) -> tuple[RanksAnswer, str]:
    """(the requested cells on one GPU and on each number of GPUs, the GPU's name).

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
        kernel_notes: tuple[str, ...] = (_kernel_note_on(on),)
    else:
        basis = run_facts(Path(source), request.engine)
        _check_splittable(basis, ranks)
        kernels, kernel_notes = _replayed_kernels(basis, [requests[count] for count in ranks], listener)
        answers = {count: forecast_from_facts(basis, each, kernels.get(count)) for count, each in requests.items()}
    single = answers[1]
    card = _card(source, on)
    return RanksAnswer(
        source=single.source,
        model=single.model,
        precision=single.precision,
        on=f"each of several {card}",
        how=single.how,
        links=tuple(
            f"Link of {count} GPUs: {duration(link.alpha_s)} per message, {scaled(link.bus_bytes_per_s, 'B/s')};"
            f" {link.source}."
            for count, link in links.items()
        ),
        link=next(iter(links.values())).name,
        price="" if options.usd_per_h is None else f"USD {options.usd_per_h:g} per hour and GPU.",
        error=single.error,
        cells=across([(count, answer.cells) for count, answer in answers.items()], options.usd_per_h),
        notes=(*kernel_notes, *_notes(single)),
    ), card


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


def _card(source: str, on: str) -> str:
    """The name of the GPUs."""
    if not on:
        return read_document(Path(source)).device.name
    if on.endswith(".json"):
        return "such GPUs"
    try:
        return gpu_called(on).gpu
    except RequestError:
        return on


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
        f" replayed ({reason}). A profile of the GPU has kernels by width: roofscope ceilings --out card.json, then"
        " MODEL --on card.json --tp."
    )


def _kernel_note_on(on: str) -> str:
    if profile_of(on) is not None:
        return "A rank's kernels take the times that the GPU's profile has for their widths."
    return "A rank is assumed to be as efficient as whole models in published figures."


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
class RankTime:
    """The forecast of a step on `ranks` GPUs."""

    ranks: int
    latency_s: float
    low_s: float
    high_s: float
    link_s: float
    """The part of `latency_s` that collectives take."""
    tokens_per_s: float
    regime: str
    fits: bool
    tight: bool
    """Whether the step fits, but runs out of memory if free memory is in pieces."""
    usd_per_million: float | None
    """USD per million tokens at this batch, for all GPUs; None without a price."""

    @property
    def card_s_per_million(self) -> float:
        """GPU seconds per million tokens, summed over all GPUs."""
        return 1e6 * self.ranks / self.tokens_per_s


@dataclass(frozen=True)
class RankCell(StepShape):
    """The forecasts of one step by number of GPUs, ascending from one."""

    times: tuple[RankTime, ...]

    @property
    def base(self) -> RankTime | None:
        """The time on the fewest GPUs that the step fits; None if it fits none of these numbers."""
        return next((time for time in self.times if time.fits), None)

    def gain(self, time: RankTime) -> float:
        """Speed relative to `base`; NaN if the step does not fit."""
        return self.base.latency_s / time.latency_s if self.base and time.fits else math.nan

    @property
    def worse_from(self) -> int | None:
        """The fewest GPUs on which the step is no faster than on the number before; None if it is always faster."""
        fitting = [time for time in self.times if time.fits]
        for before, after in itertools.pairwise(fitting):
            if after.latency_s * WORTH > before.latency_s:
                return after.ranks
        return None


@dataclass(frozen=True)
class RanksAnswer:
    """A forecast by number of GPUs, with its basis and its error."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    links: tuple[str, ...]
    """One sentence on the link for each number of GPUs."""
    link: str
    """The link's name."""
    price: str
    """One sentence on the price of a GPU, with its source; empty without a price."""
    error: ForecastError
    cells: tuple[RankCell, ...]
    notes: tuple[str, ...] = ()

    def sentence(self, card: str) -> str:
        """The gain of each number of GPUs, for decode if it was forecast.

        For example `Two H100 SXM over pcie5x16 give 1.04x at batch 1 and 1.7x at batch 64.`
        """
        phase = "decode" if any(cell.phase == "decode" for cell in self.cells) else "prefill"
        cells = [cell for cell in self.cells if cell.phase == phase]
        # The smallest and the largest batch that fit, at the longest context, where more GPUs matter most.
        fitting = [cell for cell in cells if cell.base is not None]
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
            lines.append(f"{number} {card} over {self.link} give {' and '.join(words)}.")
        return " ".join(lines)


def _gain(cell: RankCell, time: RankTime) -> str:
    gain = cell.gain(time)
    if math.isnan(gain):
        return "no room"
    if cell.base is time:
        return "room for it"
    return f"{gain:.2f}x" if gain < 1.995 else f"{gain:.1f}x"


def across(forecasts: Sequence[tuple[int, Sequence[ForecastCell]]], usd_per_h: float | None) -> tuple[RankCell, ...]:
    """Join the cells of several forecasts, one per number of GPUs, ascending; `usd_per_h` is the price of one GPU."""
    cells = []
    for index, first in enumerate(forecasts[0][1]):
        times = []
        for ranks, forecast in forecasts:
            cell = forecast[index]
            usd = None if usd_per_h is None else 1e6 * ranks * usd_per_h / _S_PER_HOUR / cell.tokens_per_s
            link_s = cell.terms.get("link_s", 0.0)
            times.append(view(RankTime, cell, ranks=ranks, link_s=link_s, usd_per_million=usd))
        cells.append(view(RankCell, first, times=tuple(times)))
    return tuple(cells)
