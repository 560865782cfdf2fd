"""The sentences and the table of a comparison."""

import re
from collections import Counter
from collections.abc import Iterator

from profiler.comparison.compare import Change, Comparison
from profiler.comparison.side import NOT_RECORDED, PROCESSOR, ROOFSCOPE, Side
from profiler.judge.breakdown import TERM_NAMES
from profiler.judge.difference import SAME
from profiler.report.blocks import Lines, Section, Sentences, TextTable, text_table
from profiler.units import duration, percent, several, signed_duration, utc_minute

# A smaller shift of the machine gets no sentence.
_LEAST_SHIFT = 0.005
_MOST_SENTENCES = 5
_GRID = r""" --(?:context-lens|prompts|prompt-lens|batch-sizes|new-tokens) (?:'[^']*'|"'"|[^\s'"])+"""


def changes_section(comparison: Comparison) -> Section:
    """The comparison of two runs: the answer, the settings that differ, and a table of cells."""
    return Section(
        "",
        [
            Sentences(comparison_sentences(comparison)),
            Lines(difference_lines(comparison)),
            Lines([column_words(comparison)], "dim"),
            changes_table(comparison),
            sides_lines(comparison),
            Lines([f"next: {next_step(comparison)}"]),
        ],
    )


def next_step(comparison: Comparison) -> str:
    """Return the one thing to do next, by the verdicts."""
    if not comparison.comparable:
        return f"measure both with the same {', '.join(each.name for each in comparison.differences if each.refuses)}"
    verdicts, after = {item.verdict for item in comparison.changes}, comparison.after
    if verdicts <= {"same", "inconclusive"} and "inconclusive" in verdicts:
        more = "a larger --budget" if after.tool == ROOFSCOPE else "more repetitions"
        return f"measure both again with {more}, when nothing else runs"
    keep = "keep the change; " if "faster" in verdicts and "slower" not in verdicts else ""
    if after.tool != ROOFSCOPE:
        return f"{keep}`roofscope place {after.name} --model MODEL --gpu GPU` compares the second with the ceilings"
    return f"{keep}`roofscope judge {after.name}` names what limits the second, and what would make it faster"


def sides_lines(comparison: Comparison) -> Lines:
    """The names of both sides with their dates or tools."""
    sides = (("before", comparison.before), ("after", comparison.after))
    return Lines([f"{word}: {side.name} ({utc_minute(side.created) or side.tool})" for word, side in sides], "dim")


def signed(share: float) -> str:
    """`0.071` -> `+7.1 %`, `3.768` -> `+377 %`."""
    return f"{100 * share:+.{0 if abs(share) >= 1 else 1}f} %"


def change_words(change: Change) -> str:
    """`7.1 % (5.9 to 8.3) slower: overhead +2.10 ms of +2.30 ms`, or `inconclusive (one repetition each)`."""
    if not change.difference.is_claim:
        return f"{change.verdict} ({change.because or interval_words(change)})"
    sign = 1 if change.verdict == "slower" else -1
    ends = sorted(100 * sign * end for end in (change.low, change.high))
    text = f"{100 * sign * change.change:.1f} % ({ends[0]:.1f} to {ends[1]:.1f}) {change.verdict}"
    gained = f" of {signed_duration(change.after_s - change.before_s)}" if change.moved else ""
    return f"{text}: {moved}{gained}" if (moved := moved_words(change)) else text


def moved_words(change: Change) -> str:
    """`overhead +2.10 ms`; empty without a claimed change or a time breakdown."""
    if change.moved is None:
        return "no term stands out" if change.terms and change.difference.is_claim else ""
    return f"{TERM_NAMES[change.moved]} {signed_duration(change.terms[change.moved])}"


def interval_words(change: Change) -> str:
    """`-1.2 .. +3.4 %`."""
    return f"{signed(change.low).removesuffix(' %')} .. {signed(change.high)}"


def comparison_sentences(comparison: Comparison) -> list[str]:
    """Sentences on how many cells changed, the machine's own part, and the cells that changed most."""
    if not comparison.comparable:
        return [f"Not comparable ({comparison.refusal}): side by side, without a verdict."]
    counts = Counter[str](item.verdict for item in comparison.changes)
    reasons = Counter(item.because for item in comparison.changes if item.because)
    words = (("slower", "slower"), ("faster", "faster"), ("same", "the same"), ("inconclusive", "inconclusive"))
    verdicts = [several(counts[name], f"is {word}", f"are {word}") for name, word in words if counts[name]]
    cells = several(len(comparison.changes), "common cell", "common cells")
    sentences = [f"Of {cells}, {', '.join(verdicts)}." if verdicts else "The two have no common cell."]
    sentences += shared_sentences(comparison)
    claims = [item for item in comparison.changes if item.difference.is_claim]
    claims.sort(key=lambda item: -abs(item.difference.log_ratio))
    sentences += [f"{item.name} is {change_words(item)}." for item in claims[:_MOST_SENTENCES]]
    lengths = sorted({(item.before.new_tokens or 0, item.after.new_tokens or 0) for item in comparison.changes})
    # The overall rates of other tools' runs depend on the number of tokens.
    for first, second in [each for each in lengths if all(each) and len(set(each)) > 1][:1]:
        sentences.append(
            f"The first wrote {first} tokens per sequence, the second {second}: times per step and per prompt can be"
            " compared, tokens/s and seconds of whole runs cannot."
        )
    if len(reasons) == 1 and sum(reasons.values()) == len(comparison.changes):
        sentences[0] = f"{sentences[0].removesuffix('.')} ({next(iter(reasons))})."
    elif reasons:
        groups = [f"{several(count, 'cell', 'cells')} ({why})" for why, count in reasons.most_common(3)]
        sentences.append(f"No verdict for {', '.join(groups)}.")
    return sentences


def shared_sentences(comparison: Comparison) -> Iterator[str]:
    """Sentences of compare and gate: cells that only one side has, and claimed shifts of the machine itself."""
    pair = (("first", comparison.before, comparison.only_before), ("second", comparison.after, comparison.only_after))
    for (name, side, count), (other_name, other, _) in (pair, pair[::-1]):
        if count and comparison.comparable:
            cells = several(count, "cell is", "cells are")
            yield f"{cells} only in the {name}{measuring(other_name, other, side)}."
    for shift in comparison.shifts:
        if shift.claimed and abs(shift.ratio - 1) > _LEAST_SHIFT:
            by = f"{percent(abs(shift.ratio - 1))} {'slower' if shift.ratio > 1 else 'faster'}"
            roof_ratio = shift.roof_ratio if shift.told_by == "sentinel" else None
            source = "probe" if shift.told_by == "sentinel" else "ceilings"
            ceilings = f" ({percent(abs(roof_ratio - 1))} by its ceiling)" if roof_ratio else ""
            divided = any(item.machine for item in comparison.changes)
            effect = "changes exclude this, times include it" if divided else "changes and times include it"
            yield f"The machine itself was {by} at {shift.resource} by its {source}{ceilings}; {effect}."


def measuring(name: str, run: Side, other: Side) -> str:
    """`; to measure the second on the other grid: COMMAND`, with its own options; empty if it is the same grid."""
    own, grid = ("".join(re.findall(_GRID, side.command)) for side in (run, other))
    command = re.sub(rf"{_GRID}| --budget \S+", "", run.command) + grid
    return f"; to measure the {name} on the other grid: `{command}`" if own and grid and own != grid else ""


def difference_lines(comparison: Comparison) -> list[str]:
    """Lines on the settings that differ, the most important first, and on processors that neither run recorded."""
    first, second = comparison.before, comparison.after
    named_alike = first.settings.keys() == second.settings.keys()
    none = "no known setting differs between the two" if named_alike else "no setting that both name differs"
    lines = [f"differs: {item.words}" for item in comparison.differences] or [none]
    if all(side.settings.get(PROCESSOR) == NOT_RECORDED for side in (first, second)):
        lines.append(f"neither run recorded its processor's family; several are named {first.settings['device']}")
    for word, side, other in (("before", first, second), ("after", second, first)):
        # llama-bench's tables, for one, leave out what has its default value.
        only = [f"{name} {value}" for name, value in side.settings.items() if name not in other.settings]
        if only and ROOFSCOPE not in (side.tool, other.tool):
            lines.append(f"{word}: only this file says {', '.join(only)}")
        lines += [f"{word}: {remark}" for remark in side.remarks]
    return lines


def changes_table(comparison: Comparison) -> TextTable:
    """Return a row per cell; with a reason each, unless the first sentence has the only one."""
    rows = []
    for item in comparison.changes:
        # The interval of another tool's single run is only what such runs usually have.
        least = 2 if item.before.is_foreign and item.after.is_foreign else 1
        interval = interval_words(item) if item.repetitions >= least and item.low < item.high else "-"
        rows.append([item.name, *change_texts(item), interval, item.verdict if comparison.comparable else "-"])
    reasons = [moved_words(item) or (item.because if comparison.comparable else "") for item in comparison.changes]
    headings = ["cell", "before", "after", "change", "interval", "verdict"]
    if len(set(reasons)) > 1 or any(map(moved_words, comparison.changes)):
        headings.append("reason")
        rows = [[*row, reason] for row, reason in zip(rows, reasons, strict=True)]
    return text_table(headings, rows, texts=("verdict",), wrapped=("reason",))


def change_texts(change: Change) -> tuple[str, str, str]:
    """`10.0 ms`, `10.7 ms`, `+7.0 %`."""
    return duration(change.before_s), duration(change.after_s), signed(change.change)


def column_words(comparison: Comparison) -> str:
    """A legend for the rows: what `change` means, and what makes a verdict inconclusive."""
    divided = any(item.machine for item in comparison.changes)
    drift = "; the machine's own drift is taken off, times include it" if divided else ""
    if not divided and ROOFSCOPE in (comparison.before.tool, comparison.after.tool):
        drift = "; the machine's own drift is not taken off"
    words = f"change: how much longer the cell takes after than before{drift}"
    if not comparison.comparable or all(item.verdict != "inconclusive" for item in comparison.changes):
        return words
    return f"{words}. inconclusive: the interval contains 0 and more than {percent(SAME)}, or there is a reason"
