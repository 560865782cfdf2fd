"""The answer of `why` as sentences, as tables, as JSON and as an HTML page."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from profiler.json_document import Document, view
from profiler.report.blocks import FULL, HTML, Lines, Section, Sentences, text_table
from profiler.units import duration, percent, several
from profiler.why_slow.findings import LEAST_SHARE, Finding, SlowModule, TriedChange, Why, callback_words, callbacks_s
from profiler.why_slow.observations import (
    Call,
    GraphBreak,
    Load,
    Observations,
    OwnLine,
    covered_s,
    most_at_once,
    padding_share,
    steady_s,
)

CALL_COLUMNS = ("where", "calls", "what", "time", "per call", "ran with")
_MOST_ROWS = 30
_NEAR = 0.7
"""Floor / time of the calls, from which on a script is near what the machine can do."""
_MUCH = 0.25
"""Share of the calls' time from which on one kind of module or own code is named first."""
_WORTH_A_ROW = 0.01
"""Share of the script's run time from which on a part of it has its own row."""
_UNUSUAL = {"gradients": "gradients", "training": "train mode", "compiled": "compiled", "outputs": "more outputs"}
"""Settings that are usually off, and words for them."""


def why_sentences(why: Why) -> list[str]:
    """The answer: the time of the script's calls, their floor, and the findings, the largest saving first."""
    seen = why.seen
    begun = "Interrupted: up to here " if seen.interrupted else ""
    lines = [*_slow_module(why), *_slow_code(why), f"{begun}{seen.script} {_spent(why)}."]
    if failed := [call for call in seen.calls if call.failed]:
        after = f"{duration(covered_s(failed))} ({'; '.join(dict.fromkeys(call.failed for call in failed))})"
        lines.append(
            f"{len(failed)} of them failed after {after}: this time includes them, but the floor and the trials leave"
            " them out."
        )
    if seen.calls and seen.unnoted:
        lines.append(f"{_capital(_unnoted_words(seen))}.")
    # `1. use_cache=False ...: 22.1 s (53 %). Remove it (script.py:31). [tried]`
    for number, item in enumerate(why.findings, 1):
        saves = f"{_capital(item.evidence)}: {saved_words(item)} ({_share_words(item)})"
        where = f" ({item.where})" if item.where else ""
        lines.append(f"{number}. {saves}. {_capital(item.change)}{where}. [{item.basis}]")
    if len(why.findings) > 1:
        lines.append("Each saving is that of one change; together they save less than their sum.")
    if unclear := [f"{trial.evidence} ({trial.where}, {percent(share)})" for trial, share in why.unclear]:
        lines.append(f"Unclear, as pairs disagree: {'; '.join(unclear)}. Try again when nothing else runs.")
    if not why.findings and not unclear and not seen.interrupted and (seen.calls or (seen.loads and not seen.unnoted)):
        lines.append(_nothing(why))
    if why.findings and (seen.loads or seen.steady_s < (1 - LEAST_SHARE) * seen.watched_s):
        warm = "warm calls" if seen.steady_s < seen.watched_s else "calls"
        loads = ", loads" if seen.loads else ""
        lines.append(f"Percentages refer to {duration(seen.steady_s)}: {warm}{loads} and tokenizers.")
    once = next((number for number, item in enumerate(why.findings, 1) if item.once), 0)
    saves, it = (f"of which only no. {once} saves some;", " it") if once else ("which no finding saves and", "")
    return lines + [
        f"First calls at {where} took {duration(first_s)}, and {duration(usual_s)} once warm."
        f" The rest is a one-time cost, {saves} no percentage includes{it}."
        for where, first_s, usual_s in why.first_calls
    ]


def _spent(why: Why) -> str:
    """What the script spent in which calls, and their floor."""
    calls, floor = why.seen.calls, why.floor
    if not calls and why.seen.unnoted:
        return f"ran, but no call was recorded: {_unnoted_words(why.seen)}"
    if not calls:
        return (
            "loaded a model but called none"
            if why.seen.loads
            else "called no language model in its own process; calls in other processes are not seen"
        )
    kinds = " and ".join(sorted({call.kind for call in calls}, reverse=True))
    spent = f"spent {duration(why.seen.calls_s)} in {several(len(calls), 'call', 'calls')} of {kinds}"
    if (at_once := most_at_once(calls)) > 1:
        spent += f", up to {at_once} at once (each second counts once)"
    if why.seen.waiting > LEAST_SHARE:
        spent += f", without the {duration(why.seen.waited_s)} in which the script waited for a core"
    floor_s, host_s = _floor_s(why)
    if floor_s is not None:
        spent += f"; the same tokens need {duration(floor_s)} on this machine, "
        spent += "without overhead, which is unknown" if host_s is None else f"{duration(host_s)} of it overhead"
    if floor and floor.left_out:
        spent += f", without {' and '.join(floor.left_out)}, which could not be counted"
    return spent


def _floor_s(why: Why) -> tuple[float | None, float | None]:
    """(seconds of the floor, overhead in them), with the overhead of the table: by itself, it may take longer."""
    if why.floor is None or why.floor.overhead_s is None:
        return why.floor.seconds if why.floor else None, None
    host_s = sum(part.seconds for part in time_parts(why) if part.what == _OVERHEAD)
    return why.floor.seconds - why.floor.overhead_s + host_s, host_s


def _slow_module(why: Why) -> list[str]:
    """A sentence about the module with the most time beyond its ceiling, if that is more than any finding saves."""
    if not why.modules:
        return []
    module, calls_s = why.modules[0], steady_s(why.seen.calls)
    beyond_s = sum(part.seconds for part in time_parts(why) if part.what == module_row(module))
    if beyond_s < _MUCH * calls_s or beyond_s <= _largest_s(why):
        return []
    count = round(module.calls)
    often = f"{several(count, 'call', 'calls')} a step" if count else "one call a prompt"
    return [
        f"{module.name} ({module.place}) takes {duration(beyond_s)} of {duration(calls_s)} beyond its ceiling,"
        f" in {often} ({module.where})."
    ]


def _largest_s(why: Why) -> float:
    return max((item.saves_s for item in why.findings), default=0.0)


def _slow_code(why: Why) -> list[str]:
    """A sentence about the script's own code, if it takes longer than any finding saves: its line with the most."""
    seen = why.seen
    own = [part for part in time_parts(why) if part.own_code]
    code_s = sum(part.seconds for part in own)
    if not own or code_s < max(_MUCH * seen.watched_s, _largest_s(why)):
        return []
    return [
        f"The script's own code takes {duration(code_s)} of {duration(code_s + seen.watched_s)} without imports,"
        f" {duration(own[0].seconds)} of it at {own[0].what.removeprefix(_AT_A_LINE)}."
    ]


def _unnoted_words(seen: Observations) -> str:
    times = f"{seen.unnoted.total()} times" if seen.unnoted.total() > 1 else "once"
    return f"recording failed {times}; what it missed is in none of these figures ({next(iter(seen.unnoted))})"


def _nothing(why: Why) -> str:
    """A sentence for an answer without findings: what was tried, and how near the script is to its floor."""
    calls_s = steady_s(why.seen.calls)
    share = (_floor_s(why)[0] or 0.0) / calls_s if calls_s else 0.0
    start = f"Nothing to change of {len(why.tried)} tried" if why.tried else "Nothing to change"
    if why.not_tried:
        found = f"Nothing was found in {several(len(why.tried), 'trial', 'trials')}, and others could not be made"
        start = f"{found if why.tried else 'Nothing could be tried'} (listed below)"
    if share >= _NEAR:
        return f"{start}: {percent(share)} of what this machine can do with this model."
    floor = f", and the floor is {percent(share)} of its time" if share and not why.not_tried else ""
    rest = next((f" The largest part of the rest is {part.what}: {duration(part.seconds)}."
                 for part in time_parts(why) if part.beyond_floor and why.floor), "")  # fmt: skip
    return f"{start}{floor}.{rest}"


def _share_words(item: Finding) -> str:
    return "once" if item.once else percent(item.share)


_OF_BASIS = {"at most": "at most ", "computed": "about "}


def saved_words(item: Finding) -> str:
    """`1.20 s`, `at most 1.20 s` for a bound, or `about 1.20 s` for an estimate."""
    return f"{_OF_BASIS.get(item.basis, '')}{duration(item.saves_s)}"


def _capital(text: str) -> str:
    head, _, _ = text.partition(" ")
    return text if any(sign in head for sign in "_=.(") else text[:1].upper() + text[1:]


def note_lines(why: Why) -> list[str]:
    """How the savings were determined, graph breaks, and the cost of recording."""
    lines = [f"{number}. {item.basis}: {item.how}" for number, item in enumerate(why.findings, 1)]
    if breaks := why.seen.graph_breaks:
        often = several(sum(item.count for item in breaks), "time", "times")
        lines.append(
            f"torch.compile broke the code into pieces {often}, and Python runs between them: {breaks[0].reason}."
            " fullgraph=True names the line; the seconds are unknown"
        )
    share = 100 * why.seen.overhead_s / why.seen.wall_s if why.seen.wall_s else 0.0
    return [*lines, f"recording took {duration(why.seen.overhead_s)} of {duration(why.seen.wall_s)} ({share:.2g} %)"]


def call_rows(why: Why) -> list[list[str]]:
    """One row per line, kind and settings of calls, in the order of CALL_COLUMNS, the slowest first."""
    groups: dict[tuple[object, ...], list[Call]] = {}
    for call in why.seen.calls:
        key = (call.where, call.kind, call.model, bool(call.failed), call.settings)
        groups.setdefault(key, []).append(call)
    return [
        [calls[0].where, str(len(calls)), _shapes(calls), duration(covered_s(calls)),
         duration(statistics.mean(call.seconds for call in calls)), ", ".join(_ran_with(calls))]
        for calls in sorted(groups.values(), key=lambda calls: -covered_s(calls))[:_MOST_ROWS]
    ]  # fmt: skip


def _shapes(calls: Sequence[Call]) -> str:
    """`generate 1 x 12..83 + 24`: the shapes of calls of one kind in words, with the range of each number."""
    shape, passed = f"{calls[0].kind} {_range(call.batch_size for call in calls)}", _range(c.prompt_len for c in calls)
    shape += f" x {passed}" if passed != "0" else ""
    new, cached = _range(call.new_tokens for call in calls), _range(call.context_len for call in calls)
    return shape + (f" + {new}" if new != "0" else f" @ {cached}" if cached != "0" else "")


def _range(sizes: Iterable[int]) -> str:
    ordered = sorted(sizes)
    return f"{ordered[0]}..{ordered[-1]}" if ordered[0] < ordered[-1] else str(ordered[0])


def _ran_with(calls: Sequence[Call]) -> list[str]:
    """Settings that decide how fast these calls can be, in words; usual values are left out."""
    call, settings, padding = calls[0], calls[0].settings, padding_share(calls)
    words = [
        settings.dtype,
        settings.attention,
        "no cache" if settings.cache is False else "",
        f"{percent(padding)} padding" if padding else "",
        *(word for name, word in _UNUSUAL.items() if getattr(settings, name)),
        settings.placement,
        *(f"{count} {name}" for name in ("beams", "answers") if (count := getattr(settings, name)) > 1),
        "failed" if call.failed else "",
    ]
    return [word for word in words if word]


@dataclass(frozen=True)
class TimePart:
    """A part of a script's time."""

    what: str
    seconds: float
    beyond_floor: bool = False
    """Whether it is part of warm calls, but not of their floor."""
    own_code: bool = False
    """Whether it is the script's own code, outside of its models' calls, without imports."""


def time_parts(why: Why) -> list[TimePart]:
    """The parts of the script's run time, which add up to it, the largest first.

    Calls of several threads overlap, so each part of them gets its share of the covered time. Waiting for a core is in
    none of the other parts, except in calls of a GPU.
    """
    seen = why.seen
    scale = seen.calls_s / max(sum(call.seconds for call in seen.calls), 1e-9)
    done = [call for call in seen.calls if not call.failed]
    generates = [call for call in done if call.forward_s is not None]
    at_tokens = {callback_words(*each): scale * seconds for each, seconds in callbacks_s(generates).items()}
    at_tokens_s = sum(at_tokens.values())
    around_s = scale * sum(max(0.0, call.seconds - (call.forward_s or 0.0)) for call in generates)
    own_s = max(0.0, around_s - at_tokens_s)
    forwards_s = max(0.0, scale * sum(call.steady_s for call in done) - at_tokens_s - own_s)
    parts = [
        TimePart("one-time costs of first calls", seen.calls_s - steady_s(seen.calls)),
        TimePart("calls that failed", scale * sum(call.seconds for call in seen.calls if call.failed)),
        *(TimePart(f"{name}, at every token", seconds, beyond_floor=True) for name, seconds in at_tokens.items()),
        TimePart("generate's own work: choosing tokens, masks, checks for the end", own_s, beyond_floor=True),
        TimePart("loading models", seen.loads_s),
        TimePart(f"tokenizers ({seen.text_where})", seen.text_s),
        TimePart("recording these calls", seen.overhead_s),
    ]
    left_s = max(0.0, seen.wall_s - forwards_s - sum(part.seconds for part in parts))
    waited_s = min(left_s, seen.waited_s)
    parts += [
        *_own_code(seen, left_s - waited_s),
        *_forwards(forwards_s, why),
        TimePart("waiting for a core that other processes used", waited_s),
    ]
    return sorted((part for part in parts if part.seconds > 0), key=lambda part: -part.seconds)


# At most so many lines have a row.
_MOST_LINES = 8
_AT_A_LINE = "the script's code at "


def _own_code(seen: Observations, other_s: float) -> list[TimePart]:
    """The rest of the run time, by the sampled lines of the script's own code, which also waited for a core."""
    sampled_s = max(seen.sampled_s, sum(line.seconds for line in seen.own_lines))
    scale = min(1.0, other_s / sampled_s) if sampled_s else 0.0  # of waits for a GPU, which is in calls meanwhile
    shown = [TimePart(f"{_AT_A_LINE}{line.words}", scale * line.seconds, own_code=True)
             for line in seen.own_lines[:_MOST_LINES]]  # fmt: skip
    shown.append(TimePart("making models", scale * seen.making_s))
    return [*shown, TimePart("imports and the script's other code", other_s - sum(part.seconds for part in shown))]


def module_row(module: SlowModule) -> str:
    """The name of the part of a module's time beyond its ceiling."""
    return f"{module.name} beyond its ceiling ({module.place})"


_OVERHEAD = "overhead of Python and torch, at least"
# At most so many modules have a row, each with at least this share of what is beyond the floor.
_MOST_MODULES, _WORTH_A_MODULE = 3, 0.1


def _forwards(left_s: float, why: Why) -> Iterator[TimePart]:
    """The time of warm forward passes: its floor, and what is beyond that. No part is longer than what is left."""
    floor = why.floor
    host_s = floor.overhead_s or 0.0 if floor else 0.0
    # At most; 0 without a measured bandwidth of the link. It comes last: a transfer may overlap with all else.
    link_s = sum(item.saves_s for item in why.findings if item.id == "offload" and item.basis == "at most")
    named = (
        ("kernels at the ceilings of this machine: the least time", floor.seconds - host_s if floor else 0.0, False),
        (_OVERHEAD, host_s, False),
        ("work that the tokens do not need: padding, prompts computed again", floor.needless_s if floor else 0.0, True),
        ("weights over the link, at most", link_s, True),
    )
    for what, part_s, beyond in named:
        yield TimePart(what, min(left_s, part_s), beyond)
        left_s -= min(left_s, part_s)
    if floor is None:
        yield TimePart("the rest of forward passes" if link_s else "forward passes", left_s)
        return
    shown = [module for module in why.modules[:_MOST_MODULES] if module.beyond_s >= _WORTH_A_MODULE * left_s]
    for module in shown:
        yield TimePart(module_row(module), min(left_s, module.beyond_s), beyond_floor=True)
        left_s -= min(left_s, module.beyond_s)
    kernels = "other kernels" if shown else "kernels (modules unknown)"
    yield TimePart(f"{kernels} slower than the ceilings, and overhead beyond that", left_s, beyond_floor=True)


@dataclass(frozen=True)
class WhyDocument(Document):
    """`roofscope why --format json`, and why.json."""

    script: str
    calls: Sequence[Call]
    loads: Sequence[Load]
    wall_s: float
    calls_s: float
    """Seconds in calls of models."""
    calls_at_once: int
    """Most calls at one time."""
    steady_s: float
    """Seconds of warm calls, loads and tokenizers, to which the shares of findings refer."""
    text_s: float
    """Seconds in tokenizers."""
    overhead_s: float
    """Seconds that the recording took."""
    floor_s: float | None
    """Seconds that the same tokens need on this machine; null if unknown."""
    floor_overhead_s: float | None
    """The part of `floor_s` that is overhead; null if unknown."""
    time: Sequence[TimePart]
    """Where `wall_s` went, the largest part first; the parts add up to it."""
    own_lines: Sequence[OwnLine]
    """Lines of the script's own code, by samples, the longest first."""
    graph_breaks: Sequence[GraphBreak]
    warnings: Sequence[str]
    interrupted: bool
    answer: Sequence[str]
    findings: Sequence[Finding]
    tried: Sequence[TriedChange]
    not_tried: Sequence[str]
    modules: Sequence[SlowModule]
    """Modules of the most expensive calls, the most time beyond their ceilings first; empty if unknown."""


def why_document(why: Why) -> WhyDocument:
    seen, (floor_s, host_s) = why.seen, _floor_s(why)
    return view(
        WhyDocument,
        seen,
        calls_at_once=most_at_once(seen.calls),
        floor_s=floor_s,
        floor_overhead_s=host_s,
        time=time_parts(why),
        own_lines=seen.own_lines[:_MOST_ROWS],
        answer=why_sentences(why),
        findings=why.findings,
        tried=why.tried,
        not_tried=why.not_tried,
        modules=why.modules[:_MOST_ROWS],
    )


def why_sections(why: Why) -> list[Section]:
    # Parts of less than 1 % share the last row.
    wall_s, parts = max(why.seen.wall_s, 1e-9), time_parts(why)
    shown = [part for part in parts if part.seconds >= _WORTH_A_ROW * wall_s]
    if len(shown) < len(parts):
        shown.append(TimePart("all else", sum(part.seconds for part in parts if part not in shown)))
    if not why.seen.calls and not why.seen.loads and why.seen.unnoted:
        shown = []
    times = [[part.what, duration(part.seconds), percent(part.seconds / wall_s)] for part in shown]
    calls = text_table(
        CALL_COLUMNS, call_rows(why), texts=("what",), wrapped=("ran with",),
        caption="what: batch x prompt tokens, + new tokens or @ cached tokens",
    )  # fmt: skip
    part_table = text_table(("part", "time", "share"), times, ranked=True)
    finding_table = text_table(
        ("finding", "saves", "share", "line", "evidence", "change"),
        [[item.id, saved_words(item), _share_words(item), item.where, item.evidence, item.change]
         for item in why.findings],
        texts=("line",), wrapped=("evidence", "change"),
    )  # fmt: skip
    trial_table = text_table(
        ("tried", "line", "what", "rounds", "saving"),
        [[trial.id, trial.where, trial.shape, str(len(trial.rounds)), percent(trial.saving)] for trial in why.tried],
        texts=("line", "what"),
    )
    incomplete = [*why.seen.warnings, *(f"not tried: {text}" for text in why.not_tried)]
    return [
        Section("", [Sentences(why_sentences(why))]),
        Section(
            "What to change",
            [finding_table],
            "the largest saving first; seconds of this script, with their basis in the notes",
            HTML,
        ),
        Section("Where the time went", [part_table], f"all {duration(why.seen.wall_s)} of the script"),
        Section("Calls", [calls], "measured as the script ran", FULL),
        Section("Trials", [trial_table], "the same call, unchanged and changed in turn, on the script's model", HTML),
        Section("Notes", [Lines(note_lines(why), "dim")], media=FULL),
        Section("", [Lines(incomplete, "warning")]),
    ]


def html_why(why: Why) -> str:
    from profiler.report.html import html_page

    return html_page(f"Why is {why.seen.script} slow?", "", why_sections(why))
