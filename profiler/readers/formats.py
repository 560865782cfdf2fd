"""How a kind of file is recognised, and what its records say: a format, and its figures by the keys of `keys.py`."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from profiler.errors import RequestError
from profiler.readers import keys
from profiler.readers.figures import Covers, Figure, ForeignFile, Shape
from profiler.readers.sources import Source
from profiler.readers.values import (
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

_SECONDS = {"": 1.0, "ms": 1e-3, "ns": 1e-9}
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
    records: Callable[[Source], Iterable[Record]] = lambda source: source.records
    """The results in a file. Raises RequestError for several reports."""
    more: Callable[[Record], Record] = lambda record: {}
    """What a result says in more than a path, as further keys.

    `gpus` shared each step, `stages` of so many took turns, and its `remark` is about the whole file.
    """
    figures: Callable[[Record], Iterable[Figure]] = lambda record: [record["figure"]]
    """The figures of one result; without a function it is its key `figure`."""
    notes: Mapping[Covers, tuple[str, ...]] = field(default_factory=dict)
    """Caveats, by what a figure covers."""
    settings: Mapping[str, str] = field(default_factory=lambda: keys.SETTINGS)
    """Where the settings of a result are."""
    packed_dtype: str = ""
    """See `ForeignFile`."""
    repeated: bool = False
    """Whether results of equal settings are repetitions."""

    def knows(self, source: Source) -> bool:
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
        on_gpu = [each for each in records if each.get("gpu_layers") != 0] or [{}]
        gpus, *others = {whole_at(each, "gpus") for each in on_gpu}
        if others:
            raise RequestError("it has results of unequal numbers of GPUs; give each a file.")
        stages = sorted({whole_at(each, "stages") or 0 for each in on_gpu})
        several = f"its figures are of {stages[0]} to {stages[-1]} GPUs, whose memory is that of the most."
        remarks = [
            several if len(stages) > 1 and stages[0] else "",
            *(str(each.get("remark") or "") for each in records),
            *(each for source in sources for each in source.remarks),
        ]
        return ForeignFile(
            self.tool,
            _joined(figures) if self.repeated else figures,
            settings=shared,
            gpus=gpus,
            stages=stages[-1] or None,
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
        return shared, [
            replace(figure, settings=own, notes=(*self.notes.get(figure.covers, ()), *figure.notes))
            for record, own in zip(records, differing, strict=True)
            for figure in self.figures(record)
        ]


def _joined(figures: Sequence[Figure]) -> list[Figure]:
    """One figure for all that have the same settings, with a repetition for each."""
    runs: dict[tuple[object, ...], list[Figure]] = {}
    for figure in figures:
        runs.setdefault((figure.covers, figure.settings), []).append(figure)
    pairs = [(same[0], tuple(figure.time.value for figure in same)) for same in runs.values()]
    return [replace(first, time=Measured(median(all_s), values=all_s, repeats=len(all_s))) for first, all_s in pairs]


def batches(record: Record) -> Iterator[Figure]:
    """The times of batches of a known shape. Raises RequestError for what is no time or shape.

    A record may have further keys: `cached`, the tokens before the prompt; `cached_once`, those that all sequences
    share; `prompts`, if fewer than the sequences; `cap`, the most sequences at a time; `loop`, the steps in a decode's
    time; `repeats`, 0 if it does not say how often a time was measured; by what they cover, more `notes`; `bits` per
    weight; `n_gpu_layers`; `on_host`, what was in the host's memory.
    """
    return _timed({"loop": 1, "acceptance": -1, **record})


def request(record: Record) -> Iterator[Figure]:
    """The times of one request, which ran alone, by the same keys.

    Its first token comes with the prompt, so N tokens are N - 1 steps.
    """
    new = whole_at(record, keys.NEW_TOKENS, 0)
    steps = 1 if new is None else max(0, new - 1)
    few = [f"a mean of few steps: {steps}"] if new and steps < _FEW else []
    return _timed({**record, "batch_size": 1, "loop": steps, "notes": {"decode": few}})


def _timed(record: Record) -> Iterator[Figure]:
    paths = (keys.PROMPT_LEN, "cached", keys.NEW_TOKENS, "cap", keys.REQUESTS)
    shape = Shape(whole_at(record, "batch_size"), *(whole_at(record, path, 0) for path in paths))
    steps, bits = record["loop"], number_at(record, "bits")
    times: dict[Covers, Measured | None] = {
        "prefill": seconds_at(record, keys.PREFILL, shape.prompt_len),
        "decode": seconds_at(record, keys.DECODE, shape.new_tokens or 1) if steps else None,
        "generate": seconds_at(record, keys.GENERATE),
    }
    for covers, time_s in times.items():
        if time_s is None:
            continue
        batch = record.get("prompts", shape.batch_size) if covers == "prefill" else shape.batch_size
        figure = Figure(
            covers,
            replace(shape, batch_size=batch),
            replace(time_s, repeats=time_s.repeats or record.get("repeats", 1)),
            weight_bytes=bits and bits / 8,
            cached_once=record.get("cached_once", 0) if covers == "decode" else 0,
            gpu_layers=whole_at(record, "n_gpu_layers", 0),
            weights_on_host=bool(record.get("on_host")),
            notes=tuple(inner(record, f"notes.{covers}") or ()),
        )
        given = figure if covers == "prefill" else speculated(figure, record)
        yield replace(given, time=given.time.times(1 / steps)) if covers == "decode" else given


def seconds_at(record: Record, paths: str, tokens: float | None = None) -> Measured | None:
    """The first time at one of `paths` in seconds; None if it was not measured.

    A path may end with a unit, `prompt_ms:ms`; `rate:/s` is of `tokens` per second. Raises RequestError for no time.
    """
    for path, _, unit in (each.partition(":") for each in paths.split(" | ")):
        value = inner(record, path)
        if isinstance(value, list) and value:
            time = measured(median(number_of(item, path) for item in value), path, values=value)
        elif not isinstance(value, list) and number_at(record, path):
            time = measured(value, path)
        else:
            continue
        if unit != "/s":
            return time.times(_SECONDS[unit])
        if tokens:
            return time.of(tokens)
    return None


def client(record: Record, streams_by: str = "") -> Iterator[Figure]:
    """The figures of a prefill and a decode step, as the client of a loaded server measures them.

    A record may have further keys: `decoding`, the requests that decoded at a time, if the tool counted them; `groups`
    of GPUs, replicas or pipeline stages, that have a batch each at a time. Without a count, the batch of a decode step
    follows from the rate and the mean time per token (Little, Operations Research 9, 1961, 383-387), and so does the
    number of requests that wait for their first token; without a mean, from the median. It is never more than the cap.
    Raises RequestError for no number, and without a time per token if a prefill alone has no use: it names the option
    `streams_by`, which gives one.
    """
    paths = (keys.TO_FIRST, keys.PER_TOKEN, keys.BETWEEN, keys.MEAN_TO_FIRST, keys.MEAN_PER_TOKEN)
    ttft_s, tpot_s, itl_s, mean_ttft_s, mean_tpot_s = (
        time.value if (time := seconds_at(record, each)) else 0.0 for each in paths
    )
    if not tpot_s and streams_by:
        raise RequestError(f"it has no time between tokens; measure with {streams_by}.")
    if not ttft_s and not tpot_s:
        return
    cap = first_of(record, keys.CAP)
    most = math.inf if cap is None else number_of(cap, "the concurrency")
    counted, per_s = number_at(record, "decoding"), needed(record, keys.OUTPUT_PER_S)
    in_flight = min(most, counted or per_s * (mean_tpot_s or tpot_s) or most)
    prompt, new = (max(1, round(needed(record, each))) for each in (keys.CLIENT_PROMPT_LEN, keys.CLIENT_NEW_TOKENS))
    kv_itemsize = 1.0 if "fp8" in str(first_of(record, keys.CACHE_DTYPE)).lower() else None
    if ttft_s:
        notes = ["time to first token, including the queue, the network and other prompts", "one prompt assumed"]
        if (waiting := round(per_s / new * (mean_ttft_s or ttft_s))) > 1:
            notes.append(f"queueing: {waiting} requests wait for their first token at a time")
        shape, time_s = Shape(1, prompt, None, new), Measured(ttft_s, repeats=1)
        yield Figure("prefill", shape, time_s, kv_itemsize=kv_itemsize, notes=tuple(notes))
    if tpot_s:
        groups, chunk = whole_at(record, "groups") or 1, itl_s / tpot_s
        how = "counted by the tool" if counted else "estimated from rate x time per token"
        below = "" if math.isinf(most) else f", below the {most:g} that were allowed"
        notes = [f"batch {how}{below}" if round(in_flight) < most else "batch assumed to equal the concurrency"]
        if (batch := max(1, round(in_flight / groups))) < round(in_flight):
            notes.append(f"divided by {groups}, as so many replicas or pipeline stages have a batch each")
        if most > 1:
            notes.append("prefills of other requests may run in between")
        if first_of(record, keys.GIVES) is None and chunk > _CHUNKED:
            notes += [f"tokens arrive about {chunk:.2g} at a time: a step may give several, or the server chunks"]
        shape = Shape(batch, prompt, None, new, cap=None if cap is None else max(1, round(most)))
        time_s = Measured(tpot_s, repeats=1)
        yield speculated(Figure("decode", shape, time_s, kv_itemsize=kv_itemsize, notes=tuple(notes)), record)


def speculated(figure: Figure, record: Record) -> Figure:
    """A decode step, timed per token, or a generation, with the tokens that a step gives by speculative decoding.

    Their number is -1 without speculation, None if a file does not say. Raises RequestError for an impossible number.
    """
    acceptance, drafted = first_of(record, keys.GIVES), number_at(record, keys.DRAFTED)
    if acceptance in (None, -1):
        return replace(figure, tokens_given=None if acceptance is None else 1.0)
    given = max(1.0, number_of(acceptance, "the acceptance length"))
    if given == 1:
        return figure
    verified = 1 + drafted if drafted else number_at(record, keys.VERIFIED)
    processed = f"processes {verified:.3g}" if verified else "those it drafts in vain are not counted"
    note = f"a decode step gives {given:.3g} tokens per sequence by speculation, and {processed}"
    return replace(
        figure,
        time=figure.time.times(given) if figure.covers == "decode" else figure.time,
        tokens_given=given,
        tokens_processed=max(given, verified or 1.0),
        notes=(*figure.notes, note),
    )
