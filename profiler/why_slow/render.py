"""The answer of `why` as sentences, as tables, as JSON and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiler.json_document import Document, view
from profiler.report.blocks import FULL, HTML, Lines, Section, Sentences, text_table
from profiler.units import duration, percent, several
from profiler.why_slow.breakdown import TimePart, between_row, module_row, time_parts
from profiler.why_slow.findings import LEAST_SHARE, CallFloor, Finding, FirstCall, SlowModule, TriedChange, Why
from profiler.why_slow.observations import (
    Call,
    GraphBreak,
    Load,
    Observations,
    UnrecordedCall,
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
"""Share of the calls' time from which on one kind of module is named first."""
_WORTH_A_ROW = 0.01
"""Share of the script's run time from which on a part of it has its own row."""
_UNUSUAL = {"gradients": "gradients", "training": "train mode", "compiled": "compiled", "outputs": "more outputs"}
"""Settings that are usually off, and words for them."""


def why_sentences(why: Why) -> list[str]:
    """The answer: the time of the script's calls, their floor, and the findings, the largest saving first."""
    seen = why.seen
    kinds = sorted({call.kind for call in seen.calls}, reverse=True)
    calls = f"{several(len(seen.calls), 'call', 'calls')} of {' and '.join(kinds)}"
    if (at_once := most_at_once(seen.calls)) > 1:
        calls += f", up to {at_once} at once (each second counts once)"
    spent = f"{seen.script} spent {duration(seen.calls_s)} in {calls}"
    floor = f"; the same tokens need {_floor_words(why.floor)}" if why.floor else ""
    begun = "Interrupted: up to here " if seen.interrupted else ""
    lines = [
        *_slow_module(why),
        *_slow_loop(why),
        f"{begun}{spent}{floor}." if seen.calls else f"{begun}{_without_calls(seen)}.",
    ]
    lines += _failed(seen)
    if seen.calls and seen.unnoted:
        lines.append(f"{_capital(_unnoted_words(seen.unnoted))}.")
    lines += [finding_sentence(number, item) for number, item in enumerate(why.findings, 1)]
    if len(why.findings) > 1:
        lines.append("Each saving is that of one change; together they save less than their sum.")
    for trial in why.undecided:
        lines.append(
            f"Unclear: {trial.evidence} ({trial.where}); without it a call takes {percent(trial.saving)} less by the"
            f" median of {len(trial.rounds)} pairs, but the pairs disagree. Try again when nothing else runs."
        )
    if why.too_close:
        names = ", ".join(f"{trial.id} ({trial.where}, {percent(why.share_of(trial))})" for trial in why.too_close)
        lines.append(f"Unclear, and less than a tenth each: {names}.")
    has_advice = why.findings or why.undecided or why.too_close
    if not has_advice and not seen.interrupted and (seen.calls or not seen.unnoted):
        lines.append(_nothing(why))
    if why.findings and (seen.loads or seen.steady_s < (1 - LEAST_SHARE) * seen.watched_s):
        warm = "warm calls" if seen.steady_s < seen.watched_s else "calls"
        loads = ", loads" if seen.loads else ""
        lines.append(f"Percentages refer to {duration(seen.steady_s)}: {warm}{loads} and tokenizers.")
    saved_once = next((number for number, item in enumerate(why.findings, 1) if item.once), None)
    return [*lines, *(_first_call(firsts, saved_once) for firsts in _by_line(why.first_calls))]


def _slow_module(why: Why) -> list[str]:
    """A sentence about the module with the most time beyond its roof, if that is more than any finding saves."""
    calls_s = steady_s(why.seen.calls)
    if not why.modules:
        return []
    module = why.modules[0]
    beyond_s = module.beyond_s
    if why.floor:  # as the table has it: a repetition among other processes also waits for them
        beyond_s = sum(part.seconds for part in time_parts(why) if part.what == module_row(module))
    if beyond_s < _MUCH * calls_s or beyond_s <= max((item.saves_s for item in why.findings), default=0.0):
        return []
    count = round(module.calls)
    often = f"{several(count, 'call', 'calls')} a step" if count else "one call a prompt"
    beyond = f"takes {duration(beyond_s)} of {duration(calls_s)} beyond its roof"
    return [f"{module.name} ({module.place}) {beyond}, in {often} ({module.where})."]


def _slow_loop(why: Why) -> list[str]:
    """A sentence about the script's own code between forwards, if it takes longer than any finding saves."""
    parts = {part.what: part.seconds for part in time_parts(why)}
    code_s, where = max(
        ((parts.get(between_row(item), 0.0), item.where) for item in why.seen.between), default=(0.0, "")
    )
    seen = why.seen
    if code_s < max(_MUCH * seen.watched_s, *(item.saves_s for item in why.findings), 0.0):
        return []
    return [
        f"The script's own code between its forwards takes {duration(code_s)} of {duration(seen.wall_s)} ({where})."
    ]


def _by_line(firsts: Sequence[FirstCall]) -> list[list[FirstCall]]:
    """The first calls of a line together if each was the only one of its kind, and the others by themselves."""
    lines: dict[object, list[FirstCall]] = {}
    for number, first in enumerate(firsts):
        alone = first.again and first.calls == 1
        lines.setdefault(first.where if alone else number, []).append(first)
    return list(lines.values())


def _first_call(firsts: Sequence[FirstCall], saved_once: int | None) -> str:
    """Slow first calls of a line; `saved_once` is the number of the finding that saves some of their one-time costs."""
    first = firsts[0]
    if not first.again:
        return (
            f"The first of {first.calls} similar calls at {first.where} took {duration(first.first_s)}, the others"
            f" {duration(first.usual_s)}: leave out the first if you time them."
        )
    which = f"The first of {first.calls} similar calls" if first.calls > 1 else "The only call of its kind"
    if len(firsts) > 1:
        which = f"The {len(firsts)} calls of different shapes"
    first_s, usual_s = sum(item.first_s for item in firsts), sum(item.usual_s for item in firsts)
    saves = "which no finding saves and" if saved_once is None else f"of which only no. {saved_once} saves some;"
    return (
        f"{which} at {first.where} took {duration(first_s)}, and {duration(usual_s)} when repeated. The"
        f" rest is a one-time cost, {saves} no percentage includes{' it' if saved_once else ''}."
    )


def _failed(seen: Observations) -> list[str]:
    """A sentence about calls that raised an exception, which the script may have caught."""
    failed = [call for call in seen.calls if call.failed]
    if not failed:
        return []
    reasons = "; ".join(dict.fromkeys(call.failed for call in failed))
    return [
        f"{len(failed)} of them failed after {duration(covered_s(failed))} ({reasons}): this time includes them, but"
        " the floor and the trials leave them out."
    ]


def _without_calls(seen: Observations) -> str:
    if seen.unnoted:
        return f"{seen.script} ran, but no call was recorded: {_unnoted_words(seen.unnoted)}"
    return f"{seen.script} loaded a model but called none"


def _unnoted_words(unnoted: UnrecordedCall) -> str:
    times = f"{unnoted.count} times" if unnoted.count > 1 else "once"
    return f"recording failed {times}; what it missed is in none of these figures ({unnoted.reason})"


def _nothing(why: Why) -> str:
    """A sentence for an answer without findings: what was tried, and how near the script is to its floor."""
    calls_s = steady_s(why.seen.calls)
    share = why.floor.seconds / calls_s if why.floor and calls_s else None
    near = f": {percent(share)} of what this machine can do with this model" if share and share >= _NEAR else ""
    if why.not_tried:
        trials = several(len(why.tried), "trial", "trials")
        start = (
            f"Nothing was found in {trials}, and others could not be made" if why.tried else "Nothing could be tried"
        )
        return f"{start} (listed below){near}.{'' if near else _largest_rest(why)}"
    tried = f" of {len(why.tried)} tried" if why.tried else ""
    if share is None or near:
        return f"Nothing to change{tried}{near}."
    return f"Nothing to change{tried}, and the floor is {percent(share)} of its time.{_largest_rest(why)}"


def _largest_rest(why: Why) -> str:
    """A sentence about the largest part of the script's time beyond the floor of its calls."""
    beyond = [part for part in time_parts(why) if part.beyond_floor]
    if not beyond or why.floor is None:
        return ""
    return f" The largest part of the rest is {beyond[0].what}: {duration(beyond[0].seconds)}."


def _floor_words(floor: CallFloor) -> str:
    """`9.80 s on this machine, 250 ms of it dispatch`."""
    left_out = f", without {' and '.join(floor.left_out)}, which could not be counted" if floor.left_out else ""
    if floor.dispatch_s is None:
        return f"{duration(floor.seconds)} on this machine, without dispatch, which is unknown{left_out}"
    return f"{duration(floor.seconds)} on this machine, {duration(floor.dispatch_s)} of it dispatch{left_out}"


def finding_sentence(number: int, item: Finding) -> str:
    """`1. use_cache=False ...: 22.1 s (53 %). Remove it (script.py:31). [tried]`."""
    where = f" ({item.where})" if item.where else ""
    return (
        f"{number}. {_capital(item.evidence)}: {saved_words(item)} ({_share_words(item)})."
        f" {_capital(item.change)}{where}. [{item.basis.split(':')[0]}]"
    )


def _share_words(item: Finding) -> str:
    return "once" if item.once else percent(item.share)


def saved_words(item: Finding) -> str:
    """`1.20 s`, `at most 1.20 s` for a bound, or `about 1.20 s` for an estimate."""
    return f"{'at most ' if item.is_bound else 'about ' if item.is_estimate else ''}{duration(item.saves_s)}"


def _capital(text: str) -> str:
    head, _, _ = text.partition(" ")
    return text if any(sign in head for sign in "_=.(") else text[:1].upper() + text[1:]


def note_lines(why: Why) -> list[str]:
    """How the savings were determined, graph breaks, and the cost of recording."""
    lines = [f"{number}. {item.basis}" for number, item in enumerate(why.findings, 1)]
    if breaks := why.seen.graph_breaks:
        count = sum(item.count for item in breaks)
        lines.append(
            f"torch.compile broke the code into pieces {several(count, 'time', 'times')}, and Python runs between them:"
            f" {breaks[0].reason}. fullgraph=True names the line; the seconds are unknown"
        )
    share = 100 * why.seen.overhead_s / why.seen.wall_s if why.seen.wall_s else 0.0
    return [*lines, f"recording took {duration(why.seen.overhead_s)} of {duration(why.seen.wall_s)} ({share:.2g} %)"]


def _incomplete(why: Why) -> list[str]:
    """Warnings about what was seen, and the changes that were not tried."""
    return [*why.seen.warnings, *(f"not tried: {text}" for text in why.not_tried)]


def call_rows(why: Why) -> list[list[str]]:
    """One row per line, kind and settings of calls, in the order of CALL_COLUMNS, the slowest first."""
    groups: dict[tuple[object, ...], list[Call]] = {}
    for call in why.seen.calls:
        key = (call.where, call.kind, call.model, bool(call.failed), call.settings)
        groups.setdefault(key, []).append(call)
    ordered = sorted(groups.values(), key=lambda calls: -covered_s(calls))
    return [_row(calls) for calls in ordered[:_MOST_ROWS]]


def _row(calls: Sequence[Call]) -> list[str]:
    seconds = sum(call.seconds for call in calls)
    first = calls[0]
    return [
        first.where,
        str(len(calls)),
        _shapes(calls),
        duration(covered_s(calls)),
        duration(seconds / len(calls)),
        ", ".join(_ran_with(first, padding_share(calls))),
    ]


def _shapes(calls: Sequence[Call]) -> str:
    """`generate 1 x 12..83 + 24`: the shapes of calls of one kind in words, with the range of each number."""
    shape = f"{calls[0].kind} {_range(call.batch_size for call in calls)} x {_range(call.prompt_len for call in calls)}"
    new, cached = _range(call.new_tokens for call in calls), _range(call.context_len for call in calls)
    return shape + (f" + {new}" if new != "0" else f" @ {cached}" if cached != "0" else "")


def _range(sizes: Iterable[int]) -> str:
    ordered = sorted(sizes)
    return f"{ordered[0]}..{ordered[-1]}" if ordered[0] < ordered[-1] else str(ordered[0])


def _ran_with(call: Call, padding: float) -> list[str]:
    """Settings that decide how fast a call can be, in words; usual values are left out."""
    settings = call.settings
    words = [word for word in (settings.dtype, settings.attention) if word]
    if settings.cache is False:
        words.append("no cache")
    if padding:
        words.append(f"{percent(padding)} padding")
    words += [word for name, word in _UNUSUAL.items() if getattr(settings, name)]
    words += [settings.placement] if settings.placement else []
    words += [
        f"{count} {name}" for count, name in ((settings.beams, "beams"), (settings.answers, "answers")) if count > 1
    ]
    return [*words, "failed"] if call.failed else words


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
    floor_dispatch_s: float | None
    """The part of `floor_s` that is dispatch; null if unknown."""
    time: Sequence[TimePart]
    """Where `wall_s` went, the largest part first; the parts add up to it."""
    graph_breaks: Sequence[GraphBreak]
    warnings: Sequence[str]
    interrupted: bool
    answer: Sequence[str]
    findings: Sequence[Finding]
    tried: Sequence[TriedChange]
    not_tried: Sequence[str]
    modules: Sequence[SlowModule]
    """Modules of the most expensive calls, the most time beyond their roofs first; empty if unknown."""


def why_document(why: Why) -> WhyDocument:
    """The JSON document of an answer."""
    seen = why.seen
    return view(
        WhyDocument,
        seen,
        calls_at_once=most_at_once(seen.calls),
        floor_s=why.floor.seconds if why.floor else None,
        floor_dispatch_s=why.floor.dispatch_s if why.floor else None,
        time=time_parts(why),
        answer=why_sentences(why),
        findings=why.findings,
        tried=why.tried,
        not_tried=why.not_tried,
        modules=why.modules[:_MOST_ROWS],
    )


def time_rows(why: Why) -> list[list[str]]:
    """Where the time went, in the order of TIME_COLUMNS; parts of less than 1 % share the last row."""
    wall_s, parts = max(why.seen.wall_s, 1e-9), time_parts(why)
    shown = [part for part in parts if part.seconds >= _WORTH_A_ROW * wall_s]
    rest_s = sum(part.seconds for part in parts) - sum(part.seconds for part in shown)
    shown += [TimePart("all else", rest_s)] if rest_s > 0 and len(shown) < len(parts) else []
    return [[part.what, duration(part.seconds), percent(part.seconds / wall_s)] for part in shown]


TIME_COLUMNS = ("part", "time", "share")
FINDING_COLUMNS = ("finding", "saves", "share", "line", "evidence", "change")
TRIAL_COLUMNS = ("tried", "line", "what", "rounds", "saving")


def why_sections(why: Why) -> list[Section]:
    """The sections of a report: the answer, findings, calls, trials and notes."""
    findings = [
        [item.id, saved_words(item), _share_words(item), item.where, item.evidence, item.change]
        for item in why.findings
    ]
    trials = [
        [trial.id, trial.where, trial.shape, str(len(trial.rounds)), percent(trial.saving)] for trial in why.tried
    ]
    legend = "what: batch x prompt tokens, + new tokens or @ cached tokens"
    calls = text_table(CALL_COLUMNS, call_rows(why), texts=("what",), wrapped=("ran with",), caption=legend)
    parts = text_table(TIME_COLUMNS, time_rows(why), ranked=True)
    finding_table = text_table(FINDING_COLUMNS, findings, texts=("line",), wrapped=("evidence", "change"))
    largest_first = "the largest saving first; seconds of this script, with their basis in the notes"
    whole = f"all {duration(why.seen.wall_s)} of the script"
    seen_any = bool(why.seen.calls or why.seen.loads)
    in_turn = "the same call, unchanged and changed in turn, on the script's model"
    return [
        Section("", [Sentences(why_sentences(why))]),
        Section("What to change", [finding_table], largest_first, HTML),
        Section("Where the time went", [parts] if seen_any else [], whole),
        Section("Calls", [calls], "measured as the script ran", FULL),
        Section("Trials", [text_table(TRIAL_COLUMNS, trials, texts=("line", "what"))], in_turn, HTML),
        Section("Notes", [Lines(note_lines(why), "dim")], media=FULL),
        Section("", [Lines(_incomplete(why), "warning")]),
    ]


def html_why(why: Why) -> str:
    """The answer as one HTML document."""
    from profiler.report.html import html_page

    return html_page(f"Why is {why.seen.script} slow?", "", why_sections(why))
