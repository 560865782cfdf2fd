"""What a row of the table of formats says: how a kind of file is recognised, and where it has what.

A place is a path of keys, `metrics.latency.median`. ` | ` is between paths of which the first with a value counts, and
` / ` between two numbers whose ratio it is (`readers/values.py`). The path of a time may end with its unit, `ttft:ms`.
A rate ends with `:/s`, in tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from profiler.errors import RequestError
from profiler.readers.figures import Covers, Figure, ForeignFile, Held, Shape, Tokens
from profiler.readers.sources import Source
from profiler.readers.values import (
    SECONDS,
    Measured,
    Record,
    apart,
    first_of,
    has,
    inner,
    measured,
    needed,
    number_at,
    number_of,
    whole_at,
)
from profiler.units import duration

# Tokens that arrive together, from which on a step gives several or the server sends them in chunks.
_CHUNKED = 1.5
_FEW = 32  # steps, of which a mean says little


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of JSON file or table. Its reader gets at least one record."""

    tool: str
    """Its name in messages."""
    has: Collection[str]
    """Paths of keys that its first record has, whatever their values."""
    records: Callable[[Source], Sequence[Record]] = lambda source: source.records
    """The results in a file. Raises RequestError for several reports."""
    more: Callable[[Record], Record] = lambda record: {}
    """What a result says in more than a path, as further keys; its `remark` is about the whole file."""
    figures: Callable[[Record], Sequence[Figure]] = lambda record: [record["figure"]]
    """The figures of one result: `Steps`, `Client`, or a function; else it is its key `figure`."""
    gpus: str = "gpus"
    """Where the number of GPUs that shared each step is."""
    stages: str = "stages"
    """Where the number of groups of them that took turns is."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Where the settings of a result are, by the name that a comparison uses; of a mapping, each key is a setting."""
    packed_dtype: str = ""
    """See `ForeignFile`."""
    repeated: bool = False
    """Whether results of equal settings are repetitions."""

    def knows(self, source: Source) -> bool:
        """Whether a source is of this kind."""
        return all(has(source.records[0], paths) for paths in self.has)

    def read(self, sources: Sequence[Source]) -> ForeignFile:
        """The content of a file's sources of this kind. Raises RequestError for a broken one.

        Figures carry the settings in which their records differ, and the number of their table if none of them tells
        two figures apart; the file has the settings that all share.
        """
        records = [
            {**result, "table": number, **self.more(result)}
            for number, source in enumerate(sources, 1)
            for result in self.records(source)
        ]
        shared, figures = self._figures(records, self.settings)
        if len(sources) > 1 and len({replace(figure, time=Measured(1.0)) for figure in figures}) < len(figures):
            shared, figures = self._figures(records, {"table": "table", **self.settings})
        gpus, *others = {(whole_at(each, self.gpus), whole_at(each, self.stages) or 1) for each in records or [{}]}
        if others:
            raise RequestError("it has results of unequal numbers of GPUs; give each a file.")
        remarks = [*(each.get("remark") for each in records), *(each for source in sources for each in source.remarks)]
        return ForeignFile(
            self.tool,
            _joined(figures) if self.repeated else figures,
            settings=shared,
            gpus=gpus[0],
            stages=gpus[1],
            packed_dtype=self.packed_dtype,
            remarks=tuple(filter(None, dict.fromkeys(remarks))),
        )

    def _figures(self, records: Sequence[Record], settings: Mapping[str, str]) -> tuple[dict[str, str], list[Figure]]:
        """(the settings that all records share, the figures with those that differ)."""
        rows: list[dict[str, object]] = []
        for record in records:
            rows.append({})
            for name, paths in settings.items():
                value = first_of(record, paths)
                rows[-1].update(value if isinstance(value, Mapping) else {name: value})
        shared, differing = apart(rows)
        pairs = zip(records, differing, strict=True)
        return shared, [replace(each, settings=own) for record, own in pairs for each in self.figures(record)]


def _joined(figures: Sequence[Figure]) -> list[Figure]:
    """One figure for all that have the same settings, with a repetition for each."""
    runs: dict[tuple[object, ...], list[Figure]] = {}
    for figure in figures:
        runs.setdefault((figure.covers, figure.settings), []).append(figure)
    pairs = [(same[0], tuple(figure.time.value for figure in same)) for same in runs.values()]
    return [replace(first, time=Measured(median(all_s), values=all_s, repeats=len(all_s))) for first, all_s in pairs]


@dataclass(frozen=True)
class Steps:
    """Where the times of batches of a known shape are, or of one request, which ran alone.

    A record may have further keys: `cached`, the tokens before the prompt; `cap`, the most sequences at a time; `loop`,
    the steps in a decode's time; by what they cover, more `notes` and the seconds of a step of the `clock`;
    `acceptance` and `verified`, the tokens that a step gives and processes; `bits` per weight; `n_gpu_layers`;
    `on_host`, what was in the host's memory.
    """

    prompt_len: str = "input_len"
    """Prompt tokens that were computed."""
    new_tokens: str = "output_len"
    prefill: str = ""
    """The time of a prefill: a number, or a list of repetitions, whose median counts."""
    decode: str = ""
    """The same of a decode step, or of `loop` steps."""
    generate: str = ""
    """The same of a whole `generate`."""
    batch_size: str = "batch_size"
    """Empty for one request. Its first token comes with the prompt, so N tokens are N - 1 steps."""
    requests: str = "requests"
    """How many sequences shared the time, if it is not one batch's."""
    repeats: int = 0
    """How often a time was measured, if the file has no repetitions; 0: it does not say."""
    notes: Mapping[Covers, tuple[str, ...]] = field(default_factory=dict)

    def __call__(self, record: Record) -> list[Figure]:
        """The figures of the times that a record has. Raises RequestError for what is no time or shape."""
        is_one, figures = not self.batch_size, []
        paths = (self.prompt_len, "cached", self.new_tokens, "cap", self.requests, "n_gpu_layers")
        prompt, cached, new, cap, requests, layers = (whole_at(record, path, 0 if is_one else 1) for path in paths)
        batch = 1 if is_one else whole_at(record, self.batch_size)
        loop = new and new - 1 if is_one else whole_at(record, "loop", 0)
        shape, bits = Shape(batch, prompt, cached, new, cap, requests), number_at(record, "bits")
        held = Held(bits and bits / 8, gpu_layers=layers, weights_on_host=bool(record.get("on_host")))
        times: dict[Covers, str] = {"prefill": self.prefill, "decode": self.decode, "generate": self.generate}
        for covers, time_at in times.items():
            steps = loop if covers == "decode" and loop is not None else 1
            tokens = prompt if covers == "prefill" else new or 1
            if not time_at or not steps or not (time_s := seconds_at(record, time_at, tokens)):
                continue
            time_s, clock_s = time_s.times(1 / steps), number_at(record, f"clock.{covers}") or 0.0
            time_s = replace(time_s, repeats=time_s.repeats or self.repeats, rounding=clock_s or time_s.rounding)
            notes = [*self.notes.get(covers, ()), *(inner(record, f"notes.{covers}") or ())]
            notes += [f"its clock steps by {duration(clock_s)}"] * (clock_s > 0)
            if is_one and covers == "decode" and new and steps < _FEW:
                notes.append(f"a mean of few steps: {steps}")
            figure = Figure(covers, shape, time_s, held=held, notes=tuple(notes))
            if covers != "prefill":
                figure = speculated(figure, record.get("acceptance", None if is_one else -1), record.get("verified"))
            figures.append(figure)
        return figures


def seconds_at(record: Record, paths: str, tokens: int | None = None) -> Measured | None:
    """The first time at one of `paths` in seconds; None if it was not measured.

    A path may end with a unit, which gives way to the one that is next to the time: `prompt_ms:ms`. `rate:/s` is of
    `tokens` per second. Raises RequestError for what is no time.
    """
    for path_and_unit in paths.split(" | "):
        path, _, unit = path_and_unit.partition(":")
        value = inner(record, path)
        if isinstance(value, list) and value:
            time = measured(median(number_of(item, path) for item in value), path, values=value)
        elif not isinstance(value, list) and (number := number_at(record, path)):
            time = Measured(number) if " / " in path else measured(value, path)
        else:
            continue
        if unit != "/s":
            return time.times(SECONDS.get(str(inner(record, f"{path.rpartition('.')[0]}.unit")), SECONDS[unit]))
        if tokens:
            return time.of(tokens)
    return None


@dataclass(frozen=True, kw_only=True)
class Client:
    """Where the client of a loaded server writes its means and medians: the typical value, then the mean."""

    prompt_len: str = "prompt_len"
    new_tokens: str = "new_tokens"
    output_per_s: str
    """New tokens of all requests per second."""
    to_first: str
    """The time to the first token."""
    per_token: str
    """The time per token after the first."""
    cap: str = "cap"
    """The most requests allowed at a time."""
    acceptance: str = "acceptance"
    """Tokens per step, the one that every step gives included; -1 without speculative decoding."""
    drafted: str = ""
    """Tokens per step that were drafted. A step processes one more."""
    verified: str = ""
    """Tokens per step that were processed."""
    itl: str = ""
    """The typical time between arrivals, of one token or several."""
    decoding: str = ""
    """Requests that decoded at a time, if the tool counted them."""
    groups: str = "groups"
    """Groups of GPUs, replicas or pipeline stages, that have a batch each at a time."""
    streams_by: str = ""
    """The option without which a file has no time per token; empty if a prefill alone has a use."""

    def __call__(self, record: Record) -> list[Figure]:
        """The figures of a prefill and a decode step, as the client measures them. Raises RequestError for no number.

        Without a count, the batch of a decode step follows from the rate and the mean time per token (Little,
        Operations Research 9, 1961, 383-387), and so does the number of requests that wait for their first token;
        without a mean, from the median. It is never more than the cap.
        """
        means = [paths.split(" | ")[-1] for paths in (self.to_first, self.per_token)]
        ttft_s, tpot_s, itl_s, mean_ttft_s, mean_tpot_s = (
            time.value if (time := seconds_at(record, paths)) else 0.0
            for paths in (self.to_first, self.per_token, self.itl, *means)
        )
        if not tpot_s and self.streams_by:
            raise RequestError(f"it has no time between tokens; measure with {self.streams_by}.")
        if not ttft_s and not tpot_s:
            return []
        cap, acceptance = first_of(record, self.cap), first_of(record, self.acceptance)
        most = math.inf if cap is None else number_of(cap, "the concurrency")
        counted, per_s = number_at(record, self.decoding), needed(record, self.output_per_s)
        in_flight = min(most, counted or per_s * (mean_tpot_s or tpot_s) or most)
        prompt, new = (max(1, round(needed(record, paths))) for paths in (self.prompt_len, self.new_tokens))
        cache = str(first_of(record, "server_info.kv_cache_dtype | engine.kv_cache_dtype | kv_cache_dtype")).lower()
        held, figures = Held(kv_itemsize=1.0 if "fp8" in cache else None), []
        if ttft_s:
            notes = ["time to first token, including the queue, the network and other prompts", "one prompt assumed"]
            if (waiting := round(per_s / new * (mean_ttft_s or ttft_s))) > 1:
                notes.append(f"queueing: {waiting} requests wait for their first token at a time")
            first_s = Measured(ttft_s, repeats=1)
            figures.append(Figure("prefill", Shape(1, prompt, None, new), first_s, held=held, notes=tuple(notes)))
        if tpot_s:
            groups, chunk = whole_at(record, self.groups) or 1, itl_s / tpot_s
            how = "counted by the tool" if counted else "estimated from rate x time per token"
            below = "" if math.isinf(most) else f", below the {most:g} that were allowed"
            notes = [f"batch {how}{below}" if round(in_flight) < most else "batch assumed to equal the concurrency"]
            if (batch := max(1, round(in_flight / groups))) < round(in_flight):
                notes.append(f"divided by {groups}, as so many replicas or pipeline stages have a batch each")
            if most > 1:
                notes.append("prefills of other requests may run in between")
            if acceptance is None and chunk > _CHUNKED:
                notes += [f"tokens arrive about {chunk:.2g} at a time: a step may give several, or the server chunks"]
            shape = Shape(batch, prompt, None, new, None if cap is None else max(1, round(most)))
            decode = Figure("decode", shape, Measured(tpot_s, repeats=1), held=held, notes=tuple(notes))
            drafted = number_at(record, self.drafted)
            figures.append(speculated(decode, acceptance, 1 + drafted if drafted else number_at(record, self.verified)))
        return figures


def speculated(figure: Figure, acceptance: object, verified: float | None = None) -> Figure:
    """A decode step, timed per token, or a generation, with the tokens that a step gives by speculative decoding.

    `acceptance` is their number as the file has it: -1 without speculation, None if it does not say. `verified` are the
    tokens per sequence that a step processes. Raises RequestError for an impossible number.
    """
    if acceptance in (None, "", -1):
        return replace(figure, tokens=Tokens(None if acceptance is None else 1.0))
    given = max(1.0, number_of(acceptance, "the acceptance length"))
    if given == 1:
        return figure
    processed = f"processes {verified:.3g}" if verified else "those it drafts in vain are not counted"
    note = f"a decode step gives {given:.3g} tokens per sequence by speculation, and {processed}"
    time = figure.time.times(given) if figure.covers == "decode" else figure.time
    tokens = Tokens(given, max(given, verified or 1.0))
    return replace(figure, time=time, tokens=tokens, notes=(*figure.notes, note))
