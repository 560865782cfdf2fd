"""What ran, and what changes the time: kernels, formats, caches, changes, engines, drafts, padding, experts, ranks."""

import re
import statistics
from collections.abc import Iterator, Set

from profiler.facts.change_ids import ATTENTION, CACHES, STEPS, WEIGHTS, ChangeId
from profiler.facts.measurements import Drafting
from profiler.judge.answer import budget_for
from profiler.judge.cell_stages import RaggedStep
from profiler.judge.cells import CellEvidence
from profiler.judge.difference import is_claim
from profiler.judge.engine_differences import PART_NAMES, GenerateOverhead, where_it_lies
from profiler.quant.registry import FORMATS
from profiler.report.blocks import FULL, HTML, Block, Lines, Picture, Section, ShellCommand, text_table
from profiler.report.selection import evidence_of, first_engine, selected_cells, spanning
from profiler.report.time_breakdown import WORTH_SHOWING
from profiler.stats import CLAIM_REPETITIONS
from profiler.store.folder import Run
from profiler.units import duration, percent, saving, scaled, several, signed_duration, significant

_DENSE = ("float32", "bfloat16", "float16")
_CACHE_WORDS = {
    "dynamic": "dynamic, copied at every step",
    "static": "static, read to its last slot",
    "paged": "paged, written in place",
    "quantized": "quantised, converted at every step",
}
# A dtype whose matmul throughput is below this share of float32's is emulated.
_EMULATED_SHARE = 0.9


def ran(run: Run) -> Section | None:
    """Part, execution path, and the time that its changes save or cost in the cell in which they were tried."""
    if not run.measured:
        return None
    model, device = run.model, run.document.device
    tried = [item for item in run.document.evidence if any(effect.basis == "tried" for effect in item.changes)]
    # The smallest decode step, or else the smallest prefill.
    first = min(tried, key=lambda item: (item.phase, item.batch_size, item.prompt_len), default=None)
    rows = [("arithmetic", _arithmetic(run), _instead(first, {ChangeId.DTYPE}))]
    # The modules of an engine that owns its model cannot be read.
    if first_engine(run) not in run.document.engine.owned:
        formats = _instead(first, {ChangeId.FORMAT})
        formats += _no_verdict(first, ChangeId.FORMAT) if formats else ""
        rows += [
            (f"{count} linear{'' if count == 1 else 's'}", kind, "" if number else formats)
            for number, (kind, count) in enumerate(model.linears.items())
        ]
        kernels = _instead(first, ATTENTION)
        rows += [(name, text, kernels if name == "decode attention" else "") for name, text in _attention(run)]
    if model.experts is not None:
        rows.append(("experts", model.experts, _instead(first, {ChangeId.EXPERTS})))
    if path := run.document.counting.paths.get(f"{first_engine(run)} decode"):
        kept = _CACHE_WORDS[path.cache] + (f": {path.cache_format.name}" if path.cache_format else "")
        rows.append(("cache", kept, _instead(first, CACHES | STEPS)))
    for name, item in run.document.engine.owned.items():
        cache = f"{scaled(item.cache_bytes, 'B')} reserved for its cache"
        rows.append((name, f"{item.version}; {cache}; loaded, compiled and warm after {duration(item.load_s)}", ""))
    if device.kind == "cpu":
        rows.append(("threads", str(device.threads), _instead(first, {ChangeId.THREADS})))
    elif "MIG" in device.name:
        rows.append(("card", f"a slice of one: {device.name}", ""))
    headings = ("part", "what ran here", f"tried in its place at {first.key.name}" if first else "")
    blocks = [text_table(headings, rows, wrapped=headings[1:]), *linears(run)]
    return Section("What ran", blocks, "reported by the libraries on this device", FULL, folded=True)


def _arithmetic(run: Run) -> str:
    dtype, ceilings = run.model.dtype, run.document.ceilings.ceilings
    ceiling, float32 = ceilings.compute.get(dtype), ceilings.compute.get("float32")
    if ceiling is None or float32 is None or run.document.device.kind != "cpu" or dtype == "float32":
        return dtype
    if ceiling.per_s < _EMULATED_SHARE * float32.per_s:
        return f"{dtype}, emulated: matmuls reach {percent(ceiling.per_s / float32.per_s)} of float32's"
    return f"{dtype}, native: matmuls reach {scaled(ceiling.per_s, 'FLOP/s')}"


def _attention(run: Run) -> Iterator[tuple[str, str]]:
    for name, path in run.document.counting.paths.items():
        engine, _, phase = name.rpartition(" ")
        masked = "" if path.masked_kernel == path.kernel else f", {path.masked_kernel} where a mask is passed"
        if engine == first_engine(run):
            kernel = f", {path.kernel} kernel{masked}" if path.attention == "sdpa" else ""
            yield f"{phase} attention", f"{path.attention}{kernel}"


def _instead(evidence: CellEvidence | None, changes: Set[ChangeId]) -> str:
    return "; ".join(
        f"{effect.change} {saving(effect.saves_s)}"
        for effect in (evidence.changes if evidence else ())
        if effect.basis == "tried" and effect.id in changes
    )


def _no_verdict(evidence: CellEvidence | None, change: ChangeId | None) -> str:
    """Return that trials of formats judge none where steps wait for the host, whatever their weights."""
    if evidence is None or evidence.regime != "overhead-bound" or change not in WEIGHTS:
        return ""
    return "; the step waits for the host, so this judges no format: *all linears of a step* does"


def linears(run: Run) -> list[Block]:
    """Return all linears of a decode step by format and number of rows, and the formats that save nothing."""
    times = run.document.format_linears.times if run.document.format_linears else ()
    counts, table, lines = sorted({item.rows for item in times}), [], []
    for name in dict.fromkeys(item.format for item in times):
        mine = {item.rows: item for item in times if item.format == name}
        shown = [
            f"{duration(each.median_s)} ± {significant(100 * each.half_width_s / each.median_s, 2)} %"
            for each in (item.time for item in mine.values())
        ]
        shown += [""] * (len(counts) - len(mine)) + [", ".join(dict.fromkeys(item.kernel for item in mine.values()))]
        table.append([name, *shown])
        dense = sorted((item for item in times if item.format in _DENSE), key=lambda item: -item.time.median_s)
        fastest = {item.rows: item for item in dense if item.rows in mine}
        if name in FORMATS and fastest and not any(mine[rows].is_faster_than(item) for rows, item in fastest.items()):
            library = f"{FORMATS[name].package}'s".replace("s's", "s'")
            lines.append(f"{library} {FORMATS[name].bits:g}-bit kernels ({name}) save nothing here")
    way = "replayed as CUDA graphs, without the host" if any(item.graph for item in times) else "timed on a CPU"
    headings = ("all linears of a step", *(several(rows, "row", "rows") for rows in counts), "kernel")
    return [text_table(headings, table, wrapped=headings[-1:], caption=f"read from memory, {way}"), Lines(lines)]


def changes(run: Run) -> Section:
    """What would change the time of the cells of `selected_cells`, by change: what was measured comes first."""
    evidence = evidence_of(run)
    judged = [result for result in selected_cells(run) if result.key in evidence]
    effects = [(effect, result) for result in judged for effect in evidence[result.key].changes]
    found = [pair for pair in effects if abs(pair[0].saves_s) >= WORTH_SHOWING * pair[1].latency_s]
    by_basis = sorted(found, key=lambda pair: ("measured", "tried", "computed").index(pair[0].basis))
    names = list(dict.fromkeys(effect.change for effect, _ in by_basis))
    rows = []
    for effect, result in sorted(found, key=lambda pair: names.index(pair[0].change)):
        because = f"{effect.basis}: {effect.because}{_no_verdict(evidence[result.key], effect.id)}"
        share = percent(effect.saves_s / result.latency_s)
        rows.append([effect.change, result.key.name, effect.amount, share, because])
    note = (
        "measured in this run, tried on this device, or computed from the cell's breakdown; a negative saving is a cost"
    )
    headings = ("change", "cell", "saves", "of the step", "because")
    blocks: list[Block] = [text_table(headings, rows, texts=("cell",), wrapped=("change", "because"))]
    for item in run.document.not_tried:
        blocks.append(ShellCommand(f"{item.change} (not tried)", item.how))
        if item.preparing_s:
            # An option that the command has already gets a new value.
            command = f"{re.sub(r' --budget [^ ]+', '', run.document.command)} --budget {budget_for(item.preparing_s)}"
            blocks.append(ShellCommand(f"try {item.change}", command))
    return Section("What would change it", blocks, note, HTML, folded=True)


def engines(run: Run) -> Section:
    """What engines save compared with the first, what `generate` adds, and what drafts give."""
    rows = []
    for item in (each for each in run.document.engine.differences if each.is_claim):
        ends_s = sorted((abs(item.low_s), abs(item.high_s)))
        cell, terms = item.key.on(item.against).name, ", ".join(where_it_lies(item))
        rows.append([cell, item.engine, saving(item.saves_s), " to ".join(map(duration, ends_s)), terms])
    headings = ("cell", "engine", "per step", "interval", "in which terms")
    picture = Picture("waterfall", "The smallest step of each engine, term by term", (run,))
    blocks = [
        *([picture] if len({cell.engine for cell in run.measured}) > 1 else []),
        text_table(headings, rows, texts=headings[:4], wrapped=headings[4:]),
        Lines([*no_claim_lines(run), *generate_lines(run)]),
        Lines([_drafting_line(run.document.drafting)] if run.document.drafting else []),
    ]
    note = f"measured in turns, compared with {first_engine(run)}, the profiler's loop, or no drafts"
    return Section("Engines, generate and drafts", blocks, note, FULL, folded=True)


def no_claim_lines(run: Run) -> list[str]:
    """Return in how many cells engines differ by no more than noise, or were repeated too rarely."""
    differences = run.document.engine.differences
    once = sum(item.repetitions < CLAIM_REPETITIONS for item in differences)
    noise = len(differences) - sum(item.is_claim for item in differences) - once
    lines = [f"in {several(noise, 'cell', 'cells')} engines differ by no more than noise"] if noise else []
    if once:
        cells = f"{several(once, 'cell has', 'cells have')} only one repetition of an engine"
        lines.append(f"{cells}: no difference is claimed; a larger --budget gives more")
    return lines


# At most this many cells per phase have their generate overhead printed, from the smallest cell to the largest.
_MOST_CELLS = 3
# Parts below this share of the overhead of generate are only in run.json.
_LEAST_SHARE = 0.01


def generate_lines(run: Run) -> list[str]:
    """Return the overhead of generate in some cells, with its interval and parts; the others are in run.json."""
    by_size = sorted(run.document.generate, key=lambda item: (item.batch_size * item.key.cell.depth, item.batch_size))
    decode_first = sorted(spanning(by_size, _MOST_CELLS), key=lambda item: item.phase)
    return [_generate_line(item, run) for item in decode_first]


def _generate_line(overhead: GenerateOverhead, run: Run) -> str:
    step, added_s = "step" if overhead.phase == "decode" else "prefill", overhead.tax_s
    version = overhead.transformers or run.document.software.get("transformers", "")
    low, high, own = map(duration, (overhead.low_s, overhead.high_s, overhead.own_s))
    text = (
        f"transformers {version}'s generate adds {duration(added_s)} ({low} to {high}) to the {step} of {own} in the"
        f" profiler's loop at {overhead.batch_size} x {overhead.key.cell.depth}, {percent(added_s / overhead.own_s)}"
    )
    if not is_claim(overhead.low_s, overhead.high_s, overhead.repetitions):
        once = overhead.repetitions < CLAIM_REPETITIONS
        return f"{text}: {'one repetition each, too few for a claim' if once else 'no more than noise'}"
    ranked = sorted((overhead.parts_s or {}).items(), key=lambda item: -item[1])
    shown = [(PART_NAMES[name], part_s) for name, part_s in ranked if abs(part_s) >= _LEAST_SHARE * abs(added_s)]
    parts = [", ".join(f"{name} {duration(part_s)} ({percent(part_s / added_s)})" for name, part_s in shown)]
    if overhead.reads_a_token is not None:
        plural = "" if overhead.reads_a_token == 1 else "s"
        parts.append(f"the host reads {overhead.reads_a_token:g} value{plural} per token")
    if overhead.streamer_s is not None:
        parts.append(f"a streamer would add {duration(overhead.streamer_s)}")
    return ": ".join(filter(None, (text, "; ".join(filter(None, parts)))))


def _drafting_line(found: Drafting) -> str:
    if not found.steps:
        length = several(found.new_tokens, "token", "tokens")
        return f"one step with drafts of {found.draft} gave the answer of {length}: use more --new-tokens to compare"
    low, middle, high = min(found.speedups), statistics.median(found.speedups), max(found.speedups)
    verdict = "no more than noise" if found.pays is None else f"drafts {'pay' if found.pays else 'do not pay'} here"
    same = "the same as" if found.same_tokens == found.new_tokens else f"the same {found.same_tokens} tokens as"
    return (
        f"drafts of {found.draft} at batch 1: {significant(found.tokens_per_step)} tokens per step in"
        f" {duration(statistics.median(found.assisted_s) / found.steps)}, without them one in"
        f" {duration(statistics.median(found.plain_s) / (found.new_tokens - 1))}: {significant(middle)}x as fast"
        f" ({significant(low)} to {significant(high)}); {verdict}. A built-in text was continued by {found.new_tokens},"
        f" {same} without drafts; your text may accept more or fewer"
    )


def conditions(run: Run) -> Section:
    """What padding takes at each batch size, which experts real prompts use, and the link between ranks."""
    times_s = {result.key: result.latency_s for result in run.measured}
    steps = [step for step in run.document.ragged if step.batch_size > 1]
    padding = [line for step in steps for line in _ragged_step_lines(step, times_s[step.key])]
    note = "measured: padded steps and the same shape without a mask, routed experts, and the link between ranks"
    ranks = Lines(_ranks_lines(run), media=FULL)
    return Section("Padding, experts and ranks", [Lines([*padding, *_experts_lines(run)]), ranks], note, folded=True)


def _ragged_step_lines(step: RaggedStep, latency_s: float) -> Iterator[str]:
    is_prefill, lens = step.phase == "prefill", step.prompt_lens
    word = "prefill" if is_prefill else "decode step"
    shape = f"{len(lens)} prompts of {min(lens)} to {max(lens)} tokens"
    lost = f"padding takes {duration(step.padding_s)} of the {duration(latency_s)} {word}"
    if is_prefill:
        useful = f"{percent(step.useful_flops / step.executed_flops)} of its FLOPs are the prompts' own"
        yield f"{shape}: {percent(step.padding)} of the positions are padding; {lost}; {useful}; {_mask(step)}"
    else:
        waiting = "all sequences write the same number of tokens, so none waits for another"
        if step.waiting:
            share = percent(step.waiting)
            waiting = f"sequences that have ended wait {share} of the time, {duration(step.waiting_s)} of each step"
        yield f"{shape}: {lost}, which reads it again; {_mask(step)}; {waiting}"


def _mask(step: RaggedStep) -> str:
    if step.mask_s is None or step.mask_low_s is None or step.mask_high_s is None:
        return "the cost of its mask is not known"
    text = (
        f"its mask {'adds' if step.mask_s >= 0 else 'saves'} {duration(abs(step.mask_s))}"
        f" ({signed_duration(step.mask_low_s)} to {signed_duration(step.mask_high_s)}) compared with that shape without"
        " one"
    )
    if is_claim(step.mask_low_s, step.mask_high_s, step.repetitions):
        return text
    return f"{text}, {'one repetition each' if step.repetitions < CLAIM_REPETITIONS else 'no more than noise'}"


_FEWER_EXPERTS = 0.9
"""Below this share of the expected experts, the counted bytes of weights are clearly too high."""


def _experts_lines(run: Run) -> list[str]:
    steps, prompts = run.document.experts_touched, run.document.grid.prompts
    if not prompts or not (steps or run.model.experts):
        return []
    if not steps:
        return ["The experts that the prompts use are not known: the code does not show what the router chose."]
    fewest = min(steps, key=lambda step: step.touched / step.expected)
    share = fewest.touched / fewest.expected
    text = (
        f"{fewest.key.name} uses {fewest.touched:.1f} of {fewest.experts} experts of a layer, {percent(share)} of those"
        f" that the counts expect ({fewest.expected:.1f}, if each were chosen equally often)"
    )
    return [text + (": its counted bytes, floor and ceiling share are too high" if share < _FEWER_EXPERTS else "")]


def _ranks_lines(run: Run) -> list[str]:
    link = run.document.ceilings.collective
    if run.document.ranks < 2 or link is None:
        return []
    return [
        f"{run.document.ranks} ranks, each with {scaled(run.model.storage_bytes, 'B')} of weights, by {link.name}:"
        f" {duration(link.alpha_s)} per message and {scaled(link.bus_bytes_per_s, 'B/s')} (busbw)"
    ]
