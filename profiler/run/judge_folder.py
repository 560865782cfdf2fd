"""Judge a run folder from its facts, right after the run or years later."""

from dataclasses import replace
from pathlib import Path

from profiler.data.datasheets import gpus
from profiler.facts.measurements import Drafting, ExpertsTouched, FormatLinears, Quality
from profiler.facts.overhead import overhead_seconds
from profiler.facts.repetitions import Repetition
from profiler.facts.run_facts import Facts
from profiler.facts.telemetry import health
from profiler.fallbacks import fallback_sentences
from profiler.json_document import view
from profiler.judge.demand import over_the_run
from profiler.judge.judge_run import Judgement, judge_run
from profiler.judge.module_times import group_times
from profiler.judge.warnings import run_remarks, run_warnings
from profiler.predict.published_efficiency import compiled_step_s
from profiler.store.document import SCHEMA_VERSION, ActivityRecord, ExpertsRecord
from profiler.store.folder import (
    Run,
    read_document,
    read_facts,
    read_gathered,
    write_cells,
    write_document,
    write_operators,
)
from profiler.units import duration


def judge_folder(folder: Path, *, finished: bool = False) -> Run:
    """Judge a run from its facts on disk, and write run.json, cells.csv and operators.csv.

    `finished` marks the run as finished, in the last file that is written: a run whose table could not be written can
    then be resumed. Neither torch nor a device is needed. Raises RunError if the folder's facts are damaged or missing.
    """
    document = read_document(folder)
    gathered = read_gathered(folder)
    facts = read_facts(folder, document, gathered)
    judgement = judge_run(facts)
    hooked_steps = facts.hooked.values() if document.looked_inside else ()
    by_engine: dict[str, list[Repetition]] = {}
    for cell, repetitions in facts.repetitions.items():
        by_engine.setdefault(cell.engine, []).extend(repetitions)
    preparation_s = {name: sum(each.preparation_s for each in of_engine) for name, of_engine in by_engine.items()}
    remarks = run_remarks(facts, judgement.judged)
    document = replace(
        document,
        schema_version=SCHEMA_VERSION,
        finished=finished or document.finished,
        engine=replace(document.engine, preparation_s=preparation_s, differences=judgement.differences),
        ceilings=replace(
            document.ceilings,
            overhead_s=overhead_seconds(facts.overhead) or document.ceilings.overhead_s,
            full_clock=over_the_run(facts).ceilings.full_clock() if facts.device.kind == "cuda" else {},
        ),
        health=replace(document.health, readings=health(facts.readings)),
        evidence=judgement.evidence,
        scaling=judgement.scaling,
        breakdown=tuple(item for hooked in hooked_steps for item in group_times(facts, hooked)),
        activity=tuple(view(ActivityRecord, item, **key.columns) for key, item in gathered.activity.items()),
        quality=gathered.latest(Quality),
        drafting=gathered.latest(Drafting),
        format_linears=gathered.latest(FormatLinears),
        generate=judgement.generate,
        ragged=tuple(cell.ragged for cell in judgement.judged if cell.ragged),
        experts_touched=tuple(
            view(ExpertsRecord, item, **item.key.columns) for item in gathered.latest_by(ExpertsTouched, "key")
        ),
        answer=(*judgement.answer.sentences, *_of_other_engines(facts, judgement)),
        advised=judgement.answer.advised,
        not_tried=judgement.answer.not_tried,
        warnings=(
            *document.set_up_warnings,
            *fallback_sentences(document.fallbacks, on_gpu=document.device.kind != "cpu"),
            *(part.sentence for part in document.missing),
            *([document.ended_by] if document.ended_by else []),
            *run_warnings(facts, judgement.judged),
            *remarks,
        ),
        remarks=tuple(remarks),
    )
    write_operators(folder, facts)
    write_cells(folder, judgement.cells)
    write_document(folder, document)
    return Run(folder, document, judgement.cells)


def _of_other_engines(facts: Facts, judgement: Judgement) -> list[str]:
    """What published figures say of vLLM and similar engines, next to the advice on a step of transformers."""
    steps = [cell for cell in judgement.judged if cell.key.phase == "decode"]
    steps = [cell for cell in steps if cell.key.cell.engine not in facts.owning_engines]
    sheet, model = next((gpu for gpu in gpus() if gpu.gpu == facts.device.datasheet), None), facts.model
    if sheet is None or not steps or not judgement.answer.sentences:
        return []
    first = min(steps, key=lambda cell: (cell.key.cell.batch_size, cell.key.cell.depth))
    found = compiled_step_s(first.timed.operators, sheet, model.quant, model.dtype, first.key.cell.batch_size)
    if found is None:
        return []
    low_s, high_s, figures = found
    return [
        f"vLLM and similar engines: {duration(low_s)} to {duration(high_s)} for this step, by {figures} published"
        " figures, not measured here."
    ]
