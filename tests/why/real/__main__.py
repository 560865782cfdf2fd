"""Thirty real scripts: measure their cures by hand, run `roofscope why` on them, and print the table.

python -m tests.why.real measure [NAME ...]   seconds before and after each cure
python -m tests.why.real why [NAME ...]       run `roofscope why`, and keep its answers
python -m tests.why.real table                the answers compared with expected.toml, in Markdown
"""

import argparse
import json
import math

from .corpus import ANSWERS, Found, Script, saved_answers, scripts
from .runs import measure, run_why


def table(answers: dict[str, Found]) -> str:
    rows = [
        "| script | kind | cause | by hand | `why` | first finding | false findings | `why` took |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(script, answers.get(script.name)) for script in scripts()),
    ]
    verdicts = [answers[script.name].verdict(script) for script in scripts() if script.name in answers]
    sums = (
        f"`why` ran on {len(verdicts)} of the {len(scripts())} scripts. Its first finding is right in "
        f"{sum(each.first for each in verdicts)}: it names the cause, or reports nothing where nothing is wrong. Some "
        f"finding is right in {sum(each.named for each in verdicts)}. A finding is false in "
        f"{sum(bool(each.false) for each in verdicts)}. {sum(each.in_time for each in verdicts)} end within the budget."
    )
    return "\n".join([*rows, "", sums])


def _row(script: Script, found: Found | None) -> str:
    cause, by_hand, said = "none", "-", "-"
    if script.cures:
        main = script.cures[0]
        cause = f"`{main.finding}`"
        by_hand = "not measured" if math.isnan(main.saves_s) else f"{main.saves_s:.1f} of {main.before_s:.1f} s"
        if found and main.finding in dict(found.findings):
            said = f"{dict(found.findings)[main.finding]:.1f} s"
    answer = "not run | - | -"
    if found:
        first = f"`{found.findings[0][0]}`" if found.findings else "none"
        verdict = found.verdict(script)
        false = ", ".join(f"`{name}`" for name in verdict.false) or "-"
        answer = f"{first} | {false} | {found.why_s:.0f} s{'' if verdict.in_time else f' of {found.budget_s:.0f} s'}"
    return f"| [{script.name}]({script.source}) | {script.kind} | {cause} | {by_hand} | {said} | {answer} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "why", "table"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_intermixed_args()
    if options.what == "measure":
        for script in scripts(options.names):
            for cure in script.cures:
                before_s, after_s = measure(script, cure, options.rounds)
                print(script.name, cure.finding, f"before_s = {before_s:.2f}", f"after_s = {after_s:.2f}", flush=True)
        return
    answers = saved_answers()
    if options.what == "why":
        for script in scripts(options.names):
            found = answers[script.name] = run_why(script)
            print(script.name, found.findings, found.verdict(script), f"{found.why_s:.0f} s", flush=True)
            ANSWERS.write_text(json.dumps({name: vars(each) for name, each in answers.items()}, indent=1))
    print(table(answers))


if __name__ == "__main__":
    main()
