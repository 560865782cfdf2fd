"""Thirty real scripts: measure their cures by hand, run `roofscope why` on them, and print the table.

python -m tests.why.real measure [NAME ...]   seconds before and after each cure
python -m tests.why.real why [NAME ...]       run `roofscope why`, and keep its answers
python -m tests.why.real table                the answers compared with expected.toml, in Markdown
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .corpus import Found, scripts
from .runs import CACHE, measure, run_why


def table(answers: dict[str, Found]) -> str:
    """A row per script, and the sums."""
    rows = [
        "| script | kind | cause | by hand | `why` | first finding | false findings | `why` took |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for script in scripts():
        if script.name not in answers:
            continue
        found = answers[script.name]
        verdict = found.verdict(script)
        verdicts.append(verdict)
        cause = f"`{script.cures[0].finding}`" if script.cures else "none"
        by_hand = f"{script.cures[0].saves_s:.1f} of {script.cures[0].before_s:.1f} s" if script.cures else "-"
        said = dict(found.findings).get(script.cures[0].finding) if script.cures else None
        first = f"`{found.findings[0][0]}`" if found.findings else "none"
        false = ", ".join(f"`{name}`" for name in verdict.false) or "-"
        rows.append(
            f"| [{script.name}]({script.source}) | {script.kind} | {cause} | {by_hand} "
            f"| {'-' if said is None else f'{said:.1f} s'} | {first} | {false} "
            f"| {found.why_s:.0f} s{'' if verdict.in_time else f' of {found.budget_s:.0f} s'} |"
        )
    sums = (
        f"Of {len(verdicts)} scripts, the answer comes first in {sum(each.first for each in verdicts)} and is named in "
        f"{sum(each.named for each in verdicts)}; {sum(bool(each.false) for each in verdicts)} have false findings; "
        f"{sum(each.in_time for each in verdicts)} end within the budget."
    )
    return "\n".join([*rows, "", sums])


def saved_answers(file: Path) -> dict[str, Found]:
    """The answers of earlier runs by script; empty without the file."""
    entries = json.loads(file.read_text()) if file.exists() else {}
    return {
        name: Found(**entry | {"findings": tuple((finding, saves_s) for finding, saves_s in entry["findings"])})
        for name, entry in entries.items()
    }


def main() -> None:
    """Measure cures, run `why`, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "why", "table"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--answers", type=Path, default=CACHE / "answers.json")
    options = parser.parse_intermixed_args()
    if options.what == "measure":
        for script in scripts(options.names):
            for cure in script.cures:
                before_s, after_s = measure(script, cure, options.rounds)
                print(script.name, cure.finding, f"before_s = {before_s:.2f}", f"after_s = {after_s:.2f}", flush=True)
        return
    answers = saved_answers(options.answers)
    if options.what == "why":
        for script in scripts(options.names):
            found = answers[script.name] = run_why(script)
            print(script.name, found.findings, found.verdict(script), f"{found.why_s:.0f} s", flush=True)
            options.answers.write_text(json.dumps({name: vars(each) for name, each in answers.items()}, indent=1))
    print(table(answers))


if __name__ == "__main__":
    main()
