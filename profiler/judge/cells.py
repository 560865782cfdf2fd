"""A judged cell as files have it: its row of cells.csv, and its evidence in run.json."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, get_type_hints

from profiler.facts.repetitions import Repetition, Status, median_issue_s
from profiler.facts.run_facts import DeviceFacts
from profiler.grid.cells import CellKey, KeyedRecord, Phase
from profiler.json_document import view
from profiler.judge.breakdown import TERMS
from profiler.judge.cell_stages import NO_TIME, Judged, Timed
from profiler.judge.difference import Difference, difference
from profiler.judge.regimes import Confidence, Evidence, Flag, Regime
from profiler.judge.savings import ChangeEffect
from profiler.stats import Estimate, Noise, narrow_enough, percentile

_UNKNOWN = math.nan
_ENERGY_TICK_S = 0.1
"""The longest update interval of NVML's energy counter (20 to 100 ms were seen on data-centre GPUs)."""
_ENERGY_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Shown:
    """How tables and exports show a column of cells.csv; a field without it is in the file only."""

    heading: str = ""
    """In tables; empty if none has it."""
    unit: Literal["", "s", "share", "tokens/s", "1/s", "bytes"] = ""
    """Empty if the value is shown as it is."""
    on_screens: bool = False
    """Whether the tables of terminals have it too, not only those of documents."""
    is_exported: bool = True


@dataclass(frozen=True, slots=True)
class CellResult:
    """One row of cells.csv, with one field per column. A missing value is NaN, None or an empty text."""

    phase: Annotated[Phase, Shown("phase")]
    """`prefill` or `decode`."""
    batch_size: Annotated[int, Shown("batch")]
    """Sequences per batch."""
    prompt_len: Annotated[int, Shown("prompt")]
    """Prompt tokens per sequence, without a cached prefix; 0 if the cache was filled directly."""
    context_len: Annotated[int, Shown("context")]
    """Cached tokens at the step: in a prefill those of a prefix, in a decode those at the middle step of the loop."""
    new_tokens: int
    """Tokens decoded after the prompt."""
    status: Annotated[Status, Shown("status")]
    """`ok`, `oom`, `skipped`, `failed`; in runs recorded before 0.5.0 also `forecast`, from the measured cells."""
    latency_s: Annotated[float, Shown("time", "s", on_screens=True)] = _UNKNOWN
    """Median time of the whole prompt, or of one decode step."""
    latency_low_s: Annotated[float, Shown()] = _UNKNOWN
    """Lower end of the 95 % interval of `latency_s`, or of the 90 % interval of a forecast."""
    latency_high_s: Annotated[float, Shown()] = _UNKNOWN
    """Upper end of the same interval."""
    samples: int | None = None
    """Number of timed prefills or decode steps."""
    tokens_per_s: Annotated[float, Shown("tok/s", "tokens/s", on_screens=True)] = _UNKNOWN
    """Tokens of all sequences over the time."""
    tokens_per_s_per_seq: Annotated[float, Shown()] = _UNKNOWN
    """Tokens of one sequence over the time."""
    model_flops: int = 0
    """FLOPs that the algorithm needs."""
    model_bytes: int = 0
    """Bytes that the algorithm needs to move."""
    executed_flops: int = 0
    """FLOPs that the library's code executes."""
    executed_bytes: int = 0
    """Bytes that the library's code moves."""
    intensity: float = _UNKNOWN
    """Model FLOPs per model byte."""
    flops_per_s: Annotated[float, Shown("FLOP/s", "1/s", on_screens=True)] = _UNKNOWN
    """Model FLOPs over time."""
    bytes_per_s: Annotated[float, Shown("B/s", "1/s", on_screens=True)] = _UNKNOWN
    """Model bytes over time."""
    mfu: Annotated[float, Shown("MFU", "share")] = _UNKNOWN
    """Model FLOPs over time, as a share of the datasheet's dense peak."""
    mbu: Annotated[float, Shown("MBU", "share")] = _UNKNOWN
    """Model bytes over time, as a share of the datasheet's bandwidth."""
    attained: Annotated[float, Shown("% ceiling", "share", on_screens=True)] = _UNKNOWN
    """Attained share of the measured roofline."""
    floor_s: float = _UNKNOWN
    """Lower bound of the step on this device, from the operators' ceilings and overhead."""
    weights_s: float = _UNKNOWN
    """Term: reading the weights at the memory ceiling."""
    kv_s: float = _UNKNOWN
    """Term: reading and writing the KV cache at the memory ceiling."""
    compute_s: float = _UNKNOWN
    """Term: arithmetic at the compute ceiling."""
    kernel_s: float = _UNKNOWN
    """Term: time of the library's kernels beyond their ceilings at these shapes."""
    redundant_s: float = _UNKNOWN
    """Term: traffic and arithmetic that the algorithm does not need, outside of replayed kernels."""
    overhead_s: float = _UNKNOWN
    """Term: the host's overhead, as far as the device does not hide it."""
    unexplained_s: float = _UNKNOWN
    """Term: the rest of the measured time; negative if the other terms are too large."""
    regime: Annotated[Regime | None, Shown("regime", on_screens=True)] = None
    """The limit of the cell."""
    confidence: Annotated[Confidence | None, Shown("confidence", on_screens=True)] = None
    """Confidence in the regime."""
    peak_memory_bytes: Annotated[int | None, Shown("memory", "bytes", on_screens=True)] = None
    """Peak memory in use."""
    noise: Annotated[Noise | None, Shown("noise", is_exported=False)] = None
    """Noise of the measurement."""
    engine: Annotated[str, Shown("engine", on_screens=True)] = "eager"
    """The engine that ran the model."""
    ttft_s: Annotated[float, Shown("TTFT", "s")] = _UNKNOWN
    """Time to first token (prefill), the median."""
    first_step_s: float = _UNKNOWN
    """Time of the first decode step, in which a cache first grows; with vLLM the mean of a loop."""
    p90_s: Annotated[float, Shown()] = _UNKNOWN
    """90th percentile of the samples; missing with fewer than 10. Of decode, that of the time per output token."""
    p99_s: Annotated[float, Shown("p99", "s")] = _UNKNOWN
    """99th percentile of the samples; missing with fewer than 100."""
    issue_s: float = _UNKNOWN
    """Seconds until the host has submitted a decode step."""
    joules_per_token: float = _UNKNOWN
    """Energy of the device per token, over all sequences."""
    device_memory_bytes: float = _UNKNOWN
    """Device memory in use after the repetitions, by all processes (CUDA)."""
    stopped: str | None = None
    """Reason for the end of sampling: `interval` or `budget`."""
    dequantise_s: float = _UNKNOWN
    """Term: converting between formats."""
    link_s: float = _UNKNOWN
    """Term: transfer of weights from the host or the disk."""
    generate_s: float = _UNKNOWN
    """Term: overhead of transformers' `generate` over a step of the profiler's loop."""
    engine_s: float = _UNKNOWN
    """Term: time beyond the ceilings in an engine that loads the model itself."""
    padding_s: float = _UNKNOWN
    """Term: positions of a padded batch that hold no token of any prompt."""
    padding: float = _UNKNOWN
    """Share of a padded batch's positions that hold no token."""
    mask_s: float = _UNKNOWN
    """Time that the mask of a padded batch adds, compared with the same shape without a mask, timed in turn."""
    waiting_s: float = _UNKNOWN
    """Part of a decode step spent on ended sequences that wait for the last one of their batch."""
    repetitions: Annotated[int | None, Shown("repetitions")] = None
    """Number of repetitions. The interval of a single repetition covers only the variation within it."""
    ttft_p90_s: Annotated[float, Shown()] = _UNKNOWN
    """90th percentile of the time to first token (prefill); missing with fewer than 10 samples."""
    ttft_p99_s: Annotated[float, Shown()] = _UNKNOWN
    """99th percentile of the time to first token (prefill); missing with fewer than 100 samples."""
    ttft_p95_s: Annotated[float, Shown()] = _UNKNOWN
    """95th percentile of the time to first token (prefill); missing with fewer than 20 samples."""
    ttft_samples: Annotated[int | None, Shown()] = None
    """Samples of the time to first token (prefill)."""

    @property
    def key(self) -> CellKey:
        return CellKey.at(self.phase, self.batch_size, self.prompt_len, self.context_len, self.new_tokens, self.engine)

    @property
    def time(self) -> Estimate:
        return Estimate(self.latency_s, self.latency_low_s, self.latency_high_s, self.samples or 0)


def difference_of(before: CellResult, after: CellResult) -> Difference:
    """The difference of a cell's times in two runs."""
    repetitions = [row.repetitions for row in (before, after) if row.repetitions is not None]
    return difference(before.time, after.time, min(repetitions) if len(repetitions) == 2 else None)


CELL_COLUMNS = tuple(item.name for item in fields(CellResult))
"""The columns of cells.csv, in their order."""
SHOWN: dict[str, Shown] = {
    name: shown
    for name, hint in get_type_hints(CellResult, include_extras=True).items()
    for shown in getattr(hint, "__metadata__", ())
}
"""How the columns that tables or exports have are shown, in the order of cells.csv."""


def row_of(cell: Timed | Judged, device: DeviceFacts) -> CellResult:
    """The row of a cell: its counted work, its time if it has one, its terms and its limit if it was judged."""
    timed = cell.timed if isinstance(cell, Judged) else cell
    operators, time_s = timed.operators, timed.time
    flops, nbytes = sum(item.flops for item in operators), sum(item.model_bytes for item in operators)
    row = CellResult(
        **timed.key.columns,
        status=timed.status,
        model_flops=int(flops),
        model_bytes=round(nbytes),
        executed_flops=int(sum(item.executed_flops for item in operators)),
        executed_bytes=round(sum(item.executed_bytes for item in operators)),
        intensity=flops / nbytes if nbytes else _UNKNOWN,
    )
    if time_s is NO_TIME:
        return row
    row = replace(
        row,
        latency_s=time_s.median_s,
        latency_low_s=time_s.low_s,
        latency_high_s=time_s.high_s,
        tokens_per_s=timed.tokens_per_s,
        tokens_per_s_per_seq=timed.tokens / timed.key.cell.batch_size / timed.latency_s,
    )
    if timed.status == "ok":
        row = _with_repetitions(row, timed, device)
    return _with_verdict(row, cell) if isinstance(cell, Judged) else row


def _with_repetitions(row: CellResult, cell: Timed, device: DeviceFacts) -> CellResult:
    """The row with rates, percentiles, memory and energy; MFU is that of PaLM (arXiv:2204.02311)."""
    repetitions, is_decode = cell.repetitions, cell.key.phase == "decode"
    samples = [seconds for of_repetition in cell.samples for seconds in of_repetition]
    first_s = [] if is_decode else [ttft_s for repetition in repetitions for ttft_s in repetition.ttfts_s]
    peaks_bytes = [each.peak_memory_bytes for each in repetitions if each.peak_memory_bytes is not None]
    decodes = repetitions if is_decode else ()
    peak, bandwidth = device.datasheet_flops_per_s, device.datasheet_bytes_per_s
    return replace(
        row,
        samples=cell.time.samples,
        repetitions=len(cell.samples),
        noise=cell.noise.grade,
        stopped="interval" if narrow_enough(cell.time, len(cell.samples)) else "budget",
        flops_per_s=cell.flops_per_s,
        bytes_per_s=cell.bytes_per_s,
        mfu=cell.flops_per_s / peak if peak else _UNKNOWN,
        mbu=cell.bytes_per_s / bandwidth if bandwidth else _UNKNOWN,
        p90_s=percentile(samples, 90),
        p99_s=percentile(samples, 99),
        peak_memory_bytes=max(peaks_bytes, default=None),
        device_memory_bytes=_median([repetition.device_memory_bytes for repetition in repetitions]),
        ttft_s=_median(first_s),
        ttft_p90_s=percentile(first_s, 90),
        ttft_p95_s=percentile(first_s, 95),
        ttft_p99_s=percentile(first_s, 99),
        ttft_samples=None if is_decode else len(first_s),
        first_step_s=_median([repetition.decode_s[0] for repetition in decodes]),
        issue_s=_or_nan(median_issue_s(decodes)),
        joules_per_token=_or_nan(joules_a_token(decodes)),
    )


def _with_verdict(row: CellResult, judged: Judged) -> CellResult:
    terms, ragged = judged.terms, judged.ragged
    row = replace(
        row,
        attained=terms.attained,
        floor_s=terms.floor_s,
        regime=judged.verdict.regime,
        confidence=judged.verdict.confidence,
        **{term: getattr(terms, term) for term in TERMS},
    )
    if ragged is None:
        return row
    waiting_s = ragged.waiting_s if row.phase == "decode" else _UNKNOWN
    return replace(row, padding=ragged.padding, mask_s=_or_nan(ragged.mask_s), waiting_s=waiting_s)


def joules_a_token(repetitions: Sequence[Repetition]) -> float | None:
    """Joules per generated token over all repetitions; None if the energy counter is too coarse for their length.

    A repetition that had little time generated fewer tokens than its cell has. A GPU updates its counter a few times
    per second. So a repetition may be charged no tick, or one too many: the sum over n repetitions is off by about
    sqrt(n) / 2 ticks.
    """
    metered = [(repetition, repetition.energy_j) for repetition in repetitions if repetition.energy_j is not None]
    seconds = sum(repetition.wall_s for repetition, _ in metered)
    if not metered or math.sqrt(len(metered)) / 2 * _ENERGY_TICK_S > _ENERGY_TOLERANCE * seconds:
        return None
    generated = sum(repetition.cell.batch_size * (1 + len(repetition.decode_s)) for repetition, _ in metered)
    return sum(joules for _, joules in metered) / generated


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _median(values: Sequence[float | None]) -> float:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else math.nan


@dataclass(frozen=True, slots=True)
class CellEvidence(KeyedRecord):
    """The evidence of a verdict, and the changes of its cell."""

    regime: Regime
    """The limit of the cell."""
    confidence: Confidence
    """Confidence in the regime."""
    flags: tuple[Flag, ...]
    """Properties of the cell besides its regime, such as `kv-bound`."""
    signals: tuple[Evidence, ...]
    """What votes for or against each regime."""
    conflicts: tuple[str, ...]
    """Signals that vote against the label."""
    split_half_widths_s: Mapping[str, float]
    """Half width of the interval of each term of the time breakdown."""
    noise_reasons: tuple[str, ...]
    """Why the measurement is noisy; empty if it is not."""
    predicted_peak_memory_bytes: int
    """Peak memory by the memory model."""
    changes: tuple[ChangeEffect, ...] = ()
    """Changes that would save time, the largest saving first."""
    first_use_s: float | None = None
    """Seconds of a decode step at a KV length that is new to the process; None if it takes no longer."""
    unexplained_in_s: Mapping[str, float] = field(default_factory=dict)
    """Unexplained seconds by group of operators, the largest first; empty if they were not measured by group."""


def evidence_of(judged: Judged, peak_bytes: int, unexplained_in_s: Mapping[str, float]) -> CellEvidence:
    """The evidence of a cell's verdict, with its predicted peak memory."""
    return view(
        CellEvidence,
        judged.verdict,
        **judged.key.columns,
        signals=judged.verdict.evidence,
        conflicts=tuple(item.signal for item in judged.verdict.conflicts),
        split_half_widths_s=judged.terms.half_widths_s,
        noise_reasons=judged.timed.noise.reasons,
        predicted_peak_memory_bytes=peak_bytes,
        changes=judged.changes,
        first_use_s=judged.timed.first_use_s,
        unexplained_in_s=unexplained_in_s,
    )
