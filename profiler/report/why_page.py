"""why.html: the answer, its evidence and every call of a script on one page."""

from __future__ import annotations

from profiler.diagnosis.why import Why
from profiler.report.html import templates
from profiler.report.why import CALL_COLUMNS, call_rows, note_lines, why_sentences
from profiler.units import duration

FINDING_COLUMNS = ("finding", "saves", "share", "line", "evidence", "change")
TRIAL_COLUMNS = ("tried", "line", "what", "rounds", "saving")


def html_why(why: Why) -> str:
    """One HTML document; needs nothing but the answer."""
    findings = [
        [item.id, duration(item.saves_s), _percent(item.share), item.where, item.evidence, item.change]
        for item in why.findings
    ]
    trials = [
        [trial.id, trial.where, trial.shape, str(len(trial.rounds)), _percent(trial.saving)] for trial in why.tried
    ]
    return (
        templates()
        .get_template("why.html.j2")
        .render(
            script=why.seen.script,
            answer=why_sentences(why),
            finding_columns=FINDING_COLUMNS,
            findings=findings,
            call_columns=CALL_COLUMNS,
            calls=call_rows(why),
            trial_columns=TRIAL_COLUMNS,
            trials=trials,
            notes=[*why.seen.warnings, *note_lines(why)],
        )
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
