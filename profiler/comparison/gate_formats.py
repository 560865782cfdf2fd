"""A gate as a line for CI, on the terminal, as JUnit and as GitHub annotations."""

import math
from xml.etree import ElementTree

from profiler.comparison.gate import Gate, GatedCell, PhaseGate
from profiler.comparison.text import change_texts, change_words, difference_lines, shared_sentences, sides_lines, signed
from profiler.effort import STANDARD
from profiler.report.blocks import Lines, Section, Sentences, text_table
from profiler.units import several


def gate_section(gate: Gate) -> Section:
    """A gate: its outcome in one line, the settings that differ, and a table of cells."""
    lines = [*shared_sentences(gate.comparison), *difference_lines(gate.comparison)]
    table = text_table(
        ("cell", "before", "after", "change", "with its phase", "gate"),
        gate_rows(gate),
        texts=("gate",),
        caption="with its phase: the change estimated from all cells of the phase, with its 95 % interval;"
        " open: not decided",
    )
    return Section("", [Sentences([gate_line(gate)]), Lines(lines), table, sides_lines(gate.comparison)])


def gate_line(gate: Gate) -> str:
    """The outcome in one line, with the limits and the change of each phase."""
    if gate.outcome == "not comparable":
        return f"not comparable: {gate.comparison.refusal}; `roofscope compare --anyway` shows them side by side"
    limits = ", ".join(f"{phase.phase} {signed(phase.max_slowdown)}" for phase in gate.phases)
    phases = "; ".join(_phase_words(phase) for phase in gate.phases)
    if gate.outcome == "pass":
        return f"pass: nothing is slower than allowed ({limits}), no cell by twice that: {phases}"
    if gate.outcome == "slower":
        slower = [cell for cell in gate.cells if cell.gate == "slower"]
        text = f"slower beyond doubt than allowed ({limits}): {phases}"
        if not slower:
            return text
        worst = max(slower, key=lambda cell: cell.pooled)
        return f"{text}; {len(slower)} of {len(gate.cells)} cells, most {worst.name}, {change_words(worst)}"
    return f"cannot tell (allowed: {limits}): {phases}; {budget_words(gate)}"


def _phase_words(phase: PhaseGate) -> str:
    return f"{phase.phase} {_interval(phase.change, phase.low, phase.high)}"


def _interval(middle: float, low: float, high: float) -> str:
    if not math.isfinite(high):
        return "unknown"
    return f"{signed(middle)} ({100 * low:+.1f} to {100 * high:+.1f})"


def budget_words(gate: Gate) -> str:
    """What would decide the open cells: more budget, more repetitions, or a quiet machine."""
    open_cells = [cell for cell in gate.cells if cell.gate == "open"]
    disturbed = [cell for cell in open_cells if cell.disturbed]
    if disturbed:
        cells = several(len(disturbed), "cell was", "cells were")
        cores = max(cell.foreign_cores for cell in disturbed)
        return f"{cells} measured while others kept up to {cores:.1f} cores busy: measure again on a quiet machine"
    with_spread = [cell for cell in open_cells if cell.repetitions]
    budgets_s = [cell.more_s for cell in with_spread if 0 < cell.more_s < math.inf]
    # Another tool's file does not say how long a repetition takes.
    untimed = sum(not cell.more_s for cell in with_spread)
    drifted = sum(cell.drifted for cell in with_spread)
    at_threshold = len(with_spread) - len(budgets_s) - untimed - drifted
    budget_s = sum(budgets_s) / STANDARD.shares["timing"]
    needs = {
        f"about {budget_s:.0f} s more of --budget in each of the two runs": len(budgets_s),
        "more repetitions": untimed,
        "a file with every repetition": len(open_cells) - len(with_spread),
    }
    parts = [f"{several(count, 'cell needs', 'cells need')} {what}" for what, count in needs.items() if count]
    if at_threshold:
        parts.append(f"{several(at_threshold, 'is', 'are')} at the threshold itself, where no budget helps")
    if drifted:
        cells, again = several(drifted, "cell", "cells"), "measure again on a quiet machine"
        parts.append(f"in {cells} the machine itself drifted by as much as is allowed: {again}")
    return ", ".join(parts) or "too few repetitions to decide a single cell"


def gate_rows(gate: Gate) -> list[list[str]]:
    """One row per cell: its name, both times, the change, that with its phase, the decision and why it is open."""
    rows = []
    for phase in gate.phases:
        for cell in phase.cells:
            word: str = "SLOWER" if cell.gate == "slower" else cell.gate
            if cell.gate == "open" and cell.pooled_low > phase.max_slowdown:
                word = "open: disturbed" if cell.disturbed else "open: few repetitions"
            rows.append(
                [cell.name, *change_texts(cell), _interval(cell.pooled, cell.pooled_low, cell.pooled_high), word]
            )
    return rows


def gate_junit(gate: Gate) -> str:
    """JUnit XML with one test per cell: slower cells fail, open cells are skipped.

    Sides that are not comparable give one test with an error. Format: https://llg.cubic.org/docs/junit/.
    """
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(suites, "testsuite", name="roofscope gate")

    def case(result: str, message: str, **attributes: str) -> None:
        test = ElementTree.SubElement(suite, "testcase", attributes)
        if result:
            ElementTree.SubElement(test, result, message=message)

    if gate.outcome == "not comparable":
        case("error", gate_line(gate), classname="roofscope", name="comparable")
    for phase in gate.phases:
        kind = f"roofscope.{phase.phase}"
        case("failure" if phase.gate == "slower" else "", _phase_words(phase), classname=kind, name="all cells")
        for cell in phase.cells:
            result = {"slower": "failure", "open": "skipped"}.get(cell.gate, "")
            case(result, _cell_words(cell), classname=kind, name=cell.name, time=f"{cell.after_s:.6g}")
    suite.set("tests", str(len(suite)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"*/{tag}"))))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _cell_words(cell: GatedCell) -> str:
    return f"{change_words(cell)}; with its phase {_interval(cell.pooled, cell.pooled_low, cell.pooled_high)}"


def gate_github(gate: Gate) -> str:
    """GitHub workflow commands (annotations): one for the outcome, an error per slower cell, notices on the machine."""
    level = {"pass": "notice", "inconclusive": "warning"}.get(gate.outcome, "error")
    lines = [_annotation(level, "roofscope gate", gate_line(gate))]
    lines += [_annotation("error", cell.name, _cell_words(cell)) for cell in gate.cells if cell.gate == "slower"]
    lines += [_annotation("notice", "roofscope gate", line) for line in shared_sentences(gate.comparison)]
    return "\n".join(lines)


def _annotation(level: str, title: str, message: str) -> str:
    """`::error title=...::...`, escaped as in actions/toolkit, command.ts."""
    data = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    name = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{data}"


GATE_FORMATS = {"junit": gate_junit, "github": gate_github}
"""Formats of a gate for CI systems."""
