"""What `generate` adds to a step, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.diagnosis.generate import PART_NAMES, GenerateTax
from profiler.record.run import Run
from profiler.timing.sampling import CLAIM_VISITS
from profiler.units import duration, percent

# Of the taxes of a run, those of so many cells a phase are told, from the smallest cell to the largest.
_MOST_CELLS = 3
_WORTH_A_WORD = 0.01
"""Of a tax: parts that take less are left to run.json."""


def generate_lines(run: Run) -> list[str]:
    """The tax of some cells with its interval and where it goes; the rest is in run.json."""
    lines = []
    for phase in ("decode", "prefill"):
        taxes = sorted(
            (tax for tax in run.document.generate if tax.phase == phase),
            key=lambda tax: (tax.batch_size * tax.key.cell.depth, tax.batch_size),
        )
        few = min(_MOST_CELLS, len(taxes))
        chosen = [taxes[number * (len(taxes) - 1) // max(1, few - 1)] for number in range(few)]
        lines += [_line(tax, run.document.software.get("transformers", "")) for tax in chosen]
    return lines


def _line(tax: GenerateTax, installed: str) -> str:
    step = "step" if tax.phase == "decode" else "prefill"
    version = tax.transformers or installed
    words = (
        f"transformers {version}'s generate adds {duration(tax.tax_s)}"
        f" ({duration(tax.low_s)} to {duration(tax.high_s)}) to our {step} of {duration(tax.own_s)}"
        f" at {tax.key.cell.batch_size} x {tax.key.cell.depth}, {percent(tax.tax_s / tax.own_s)}"
    )
    if not tax.is_claim:
        once = tax.visits < CLAIM_VISITS
        return f"{words}: {'each was visited once, which is no claim' if once else 'no more than noise'}"
    return f"{words}{': ' if tax.parts_s else ''}{'; '.join(_parts(tax))}"


def _parts(tax: GenerateTax) -> Iterator[str]:
    if tax.parts_s:
        ranked = sorted(tax.parts_s.items(), key=lambda item: -item[1])
        told = [item for item in ranked if abs(item[1]) >= _WORTH_A_WORD * abs(tax.tax_s)]
        yield ", ".join(
            f"{PART_NAMES[name]} {duration(part_s)} ({percent(part_s / tax.tax_s)})" for name, part_s in told
        )
    if tax.reads_a_token is not None:
        yield f"the host reads {tax.reads_a_token:g} value{'' if tax.reads_a_token == 1 else 's'} a token"
    if tax.streamer_s is not None:
        yield f"a streamer would add {duration(tax.streamer_s)}"
