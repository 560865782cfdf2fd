"""Forecast a model that several GPUs share: one rank, the links between them, and the exchange."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from profiler.counting.tensor_parallel import check_ranks
from profiler.data.datasheets import gpu_called
from profiler.data.links import Link, link_called, published_links
from profiler.data.prices import age_words, cheapest
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
from profiler.forecast.shards import SET_S, ShardTime, machine_of, replay_shards
from profiler.grid.cells import Phase
from profiler.predict.result import Answer, ForecastCell, ForecastError
from profiler.report.progress import QuietListener
from profiler.run.warnings import busy_warnings
from profiler.store.folder import read_document
from profiler.units import duration, scaled, significant

_MOST_RANKS = 64


@dataclass(frozen=True)
class RankOptions:
    """How many cards, how they are linked, and what one costs."""

    tp: str
    link: str
    usd_per_h: float | None = None


def forecast_ranks(
    source: str, on: str, wanted: ForecastRequest, asked: RankOptions, today: date, listener: QuietListener
) -> tuple[RanksAnswer, str]:
    """(the wanted cells on one card and on each number of them, what a card is called). Raises RequestError.

    Of a run on this very device a rank's narrower linears are replayed for it; the listener is told.
    """
    ranks = parse_ranks(asked.tp)
    if not asked.link:
        raise RequestError(
            f"--tp {asked.tp} needs --link: {', '.join(published_links())}, or alpha_us,GB/s, such as 8,20."
        )
    if asked.usd_per_h is not None and not 0 < asked.usd_per_h < math.inf:
        raise RequestError(f"--price {asked.usd_per_h:g} is not possible; give USD an hour above 0.")
    links = {count: link_called(asked.link, count) for count in ranks}
    if wanted.quant != "none":
        raise RequestError(f"--tp: weights in {wanted.quant} are packed and cannot be cut; leave --quant out.")
    each = [(1, wanted), *((count, replace(wanted, ranks=count, link=links[count])) for count in ranks)]
    if on:
        answers = [(count, forecast_on(source, on, one)) for count, one in each]
        narrower: tuple[str, ...] = (_narrower_on(on),)
    else:
        known = run_facts(Path(source), wanted.engine)
        _check_cut(known, ranks)
        kernels, narrower = _narrower(known, [one for _, one in each[1:]], listener)
        answers = [(count, forecast_from_facts(known, one, kernels.get(count))) for count, one in each]
    one = answers[0][1]
    card, sheet = _card(source, on)
    usd_per_h, price = asked.usd_per_h, "" if asked.usd_per_h is None else f"USD {asked.usd_per_h:g} an hour a card."
    if usd_per_h is None and sheet is not None and (offer := cheapest(sheet)) is not None:
        usd_per_h = offer.usd_per_h
        age = age_words(offer.age_days(today))
        price = f"{sheet}: USD {offer.usd_per_h:g} an hour a card, {offer.provider}, {age}, {offer.source}."
    return RanksAnswer(
        source=one.source,
        model=one.model,
        precision=one.precision,
        on=f"each of several {card}",
        how=one.how,
        links=_link_lines(links),
        link=next(iter(links.values())).name,
        price=price,
        error=one.error,
        cells=across([(count, answer.cells) for count, answer in answers], usd_per_h),
        notes=(*narrower, *_notes(one, answers)),
    ), card


def parse_ranks(text: str) -> tuple[int, ...]:
    """`2,4,8`, ascending. Raises RequestError."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 2 or found[-1] > _MOST_RANKS:
        raise RequestError(f"--tp {text!r} is not possible; give numbers of cards from 2 to {_MOST_RANKS}: 2,4,8.")
    return tuple(found)


def _check_cut(known: RunFacts, ranks: Sequence[int]) -> None:
    """Raises RequestError for a run whose weights such numbers of ranks cannot have a part of."""
    model = known.facts.model
    if model.quant != "none" or model.kind == "gguf":
        packed = model.quant if model.quant != "none" else "a GGUF file"
        raise RequestError(
            f"--tp: the weights of {known.run.folder} are packed ({packed}) and cannot be cut; give a run of the model"
            " as it is."
        )
    skeleton = meta_model_of(known.run.folder, known.run.document)
    for count in ranks:
        check_ranks(skeleton, count)


def _card(source: str, on: str) -> tuple[str, str | None]:
    """(what the cards are called, their row of gpus.csv)."""
    if not on:
        device = read_document(Path(source)).device
        return device.name, device.datasheet
    if on.endswith(".json"):
        return "such cards", None
    try:
        sheet = gpu_called(on).gpu
    except RequestError:
        return on, None
    return sheet, sheet


def _link_lines(links: dict[int, Link]) -> tuple[str, ...]:
    return tuple(
        f"Link of {count}: {duration(link.alpha_s)} a message, {scaled(link.bus_bytes_per_s, 'B/s')} over it;"
        f" {link.source}."
        for count, link in links.items()
    )


def _narrower(
    known: RunFacts, each: Sequence[ForecastRequest], listener: QuietListener
) -> tuple[dict[int, ShardTime], tuple[str, ...]]:
    """(a rank's kernels by the number of ranks, how they are known)."""
    machine, foreign = machine_of(known.facts.device), ForeignLoad()
    if isinstance(machine, str):
        return {}, (_kept(machine),)
    found: dict[int, ShardTime] = {}
    for wanted in each:
        listener.stage(f"replaying linears of one of {wanted.ranks} ranks beside whole ones, {duration(SET_S)}")
        kernels = replay_shards(known, wanted, machine)
        if isinstance(kernels, str):
            return {}, (_kept(kernels),)
        found[wanted.ranks] = kernels
    return found, (
        "A rank's linears were replayed here, in turn with the whole ones; its attention and experts keep the share of"
        " their roof that the whole ones have.",
        *(f"Meanwhile {warning}" for warning in busy_warnings(machine.info, foreign)),
    )


def _kept(why: str) -> str:
    return (
        f"A narrower kernel keeps the share of its roof that the whole one has: none was run ({why}). A profile of the"
        " card knows kernels by their width (roofscope ceilings --out card.json, then MODEL --on card.json --tp)."
    )


def _narrower_on(on: str) -> str:
    """How it is known what one rank's kernels take on a card that was described."""
    if profile_of(on) is not None:
        return "A narrower kernel takes what the card's profile tells of its width."
    return "A rank attains as much of the card as whole models do by their published figures."


def _notes(one: Answer, answers: Sequence[tuple[int, Answer]]) -> tuple[str, ...]:
    """What such a forecast rests on."""
    loads = {cell.batch_size for cell in one.cells}
    return (
        "Messages hide behind nothing.",
        "Every rank has a card of its own, on CPUs a machine: ranks on one machine share its cores and its memory.",
        f"Cost is that of every token at its own batch ({significant(min(loads))} to {significant(max(loads))}).",
        *(note for _, answer in answers[:1] for note in answer.notes),
    )


_SECONDS_AN_HOUR = 3600
_WORDS = {2: "Two", 3: "Three", 4: "Four", 6: "Six", 8: "Eight"}
WORTH = 1.01
"""A step that gets faster by less than this is not faster."""


@dataclass(frozen=True)
class RankTime:
    """A step on so many cards."""

    ranks: int
    latency_s: float
    low_s: float
    high_s: float
    link_s: float
    """Of it, what the cards exchange results in."""
    tokens_per_s: float
    regime: str
    fits: bool
    usd_per_million: float | None
    """USD for a million tokens at this load; None without a price."""

    @property
    def card_s_per_million(self) -> float:
        """Seconds of a card that a million tokens take, all cards together."""
        return 1e6 * self.ranks / self.tokens_per_s


@dataclass(frozen=True)
class RankCell:
    """One step over the numbers of cards, from one upwards."""

    phase: Phase
    batch_size: int
    prompt_len: int
    context_len: int
    times: tuple[RankTime, ...]

    @property
    def base(self) -> RankTime | None:
        """The fewest cards that hold it; None: none of these numbers does."""
        return next((time for time in self.times if time.fits), None)

    def gain(self, time: RankTime) -> float:
        """How many times as fast as on the fewest cards that hold it; NaN where it does not fit."""
        return self.base.latency_s / time.latency_s if self.base and time.fits else math.nan

    @property
    def worse_from(self) -> int | None:
        """The fewest cards on which the step takes no less time than on the number before; None: it always gains."""
        fitting = [time for time in self.times if time.fits]
        for before, after in itertools.pairwise(fitting):
            if after.latency_s * WORTH > before.latency_s:
                return after.ranks
        return None


@dataclass(frozen=True)
class RanksAnswer:
    """A forecast over the number of cards, with its basis and its error."""

    source: str
    model: str
    precision: str
    on: str
    how: str
    links: tuple[str, ...]
    """What the cards are linked by, a line for each number of them."""
    link: str
    """By name."""
    price: str
    """Of a card, with its source; empty without one."""
    error: ForecastError
    cells: tuple[RankCell, ...]
    notes: tuple[str, ...] = ()

    def sentence(self, card: str) -> str:
        """`Two H100 SXM over pcie5x16 give 1.04x at batch 1 and 1.7x at batch 64.`; of decode where there is one."""
        phase = "decode" if any(cell.phase == "decode" for cell in self.cells) else "prefill"
        cells = [cell for cell in self.cells if cell.phase == phase]
        # The longest context of the smallest and the largest batch that fit: where a second card matters most.
        fitting = [cell for cell in cells if cell.base is not None]
        if not fitting:
            return f"No {phase} fits so many cards."
        depth = max(cell.prompt_len or cell.context_len for cell in fitting)
        of = sorted(
            (cell for cell in fitting if (cell.prompt_len or cell.context_len) == depth),
            key=lambda cell: cell.batch_size,
        )
        first, last = of[0], of[-1]
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


def across(found: Sequence[tuple[int, Sequence[ForecastCell]]], usd_per_h: float | None) -> tuple[RankCell, ...]:
    """Join the cells of several forecasts, one per number of GPUs, ascending; `usd_per_h` is the price of one GPU."""
    cells = []
    for index, first in enumerate(found[0][1]):
        times = []
        for ranks, forecast in found:
            cell = forecast[index]
            usd = None
            if usd_per_h is not None:
                usd = 1e6 * ranks * usd_per_h / _SECONDS_AN_HOUR / cell.tokens_per_s
            times.append(
                RankTime(
                    ranks, cell.latency_s, cell.low_s, cell.high_s, cell.terms.get("link_s", 0.0), cell.tokens_per_s,
                    cell.regime, cell.fits, usd,
                )
            )  # fmt: skip
        cells.append(RankCell(first.phase, first.batch_size, first.prompt_len, first.context_len, tuple(times)))
    return tuple(cells)
