"""The JSON document and the CSV table of `count`. Integers stay integers."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from profiler.counting.count import RankShare, SharedPrefix, StepCount
from profiler.counting.crosscheck import CounterDifference
from profiler.counting.floor import GpuRow
from profiler.counting.model_numbers import ModelNumbers
from profiler.counting.operators import Operator
from profiler.facts.operators import GemmShape
from profiler.facts.step import ExecutionPath, Work, bytes_by_kind, plain_number
from profiler.json_document import Document, view
from profiler.units import escape_formula

Number = int | float
_CSV_COLUMNS = ("name", "group", "count", "dtype", "model_flops", "executed_flops", "model_bytes", "executed_bytes")


@dataclass(frozen=True)
class OperatorRow:
    """The work of one operator in the step."""

    name: str
    group: str
    count: int
    """Equal operators in the model; the figures are their sum."""
    dtype: str
    model_flops: Number
    executed_flops: Number
    vector_flops: Number
    weight_bytes: Number
    kv_read_bytes: Number
    kv_write_bytes: Number
    model_bytes: Number
    executed_bytes: Number
    link_bytes: Number


@dataclass(frozen=True)
class ExecutedBytes:
    """Executed bytes beyond model bytes."""

    activations: Number
    avoidable: Mapping[str, Number]
    """By cause."""
    total: Number


@dataclass(frozen=True)
class GgufRow:
    """The formats of the weights in a GGUF file."""

    types: Sequence[str]
    """ggml's names of its quantised types, the type of most weights first."""
    kept_by_kernels: bool
    """Whether transformers loads this architecture packed on a device that has a kernel for it."""
    name: str


@dataclass(frozen=True)
class CrosscheckRow:
    """The FLOPs of the same step by torch's own counter."""

    counter: str
    flops: int
    walk_flops: int
    """FLOPs of roofscope's walk over the modules."""
    equal: bool
    differences: Sequence[CounterDifference]
    left_out: Sequence[CounterDifference]
    """Modules whose matmuls are not model work."""


@dataclass(frozen=True)
class CountDocument(Document):
    """`roofscope count --format json`."""

    model: str
    params: int
    dtype: str
    quant: str
    published: str | None
    """The packed format of the published checkpoint, in which weights are counted; null: dense, or as requested."""
    gguf: GgufRow | None
    """The formats in a GGUF file; its weights are counted dense, as transformers loads them."""
    note: str
    """The note of the model's preset."""
    phase: str
    batch: Number
    query_tokens: Number
    context_tokens: Number
    model_flops: Number
    executed_flops: Number
    vector_flops: Number
    bytes: Mapping[str, Number]
    """Model bytes by kind, and their total."""
    executed_bytes: ExecutedBytes
    avoidable_flops: Mapping[str, Number]
    """By cause."""
    intensity: float
    """Model FLOPs per model byte."""
    coverage: float
    """Share of the parameters that the count understands."""
    unknown: Sequence[str]
    path: ExecutionPath
    operators: Sequence[OperatorRow]
    tp: RankShare | None = None
    """Only with `--tp`: the share of one rank."""
    gemms: Sequence[GemmShape] | None = None
    """Only with `--gemm-census`."""
    gpus: Sequence[GpuRow] | None = None
    """Only with `--gpu`: the floor on each GPU, or why there is none."""
    crosscheck: CrosscheckRow | None = None
    """Only with `--crosscheck`."""
    prefix: SharedPrefix | None = None
    """Only with `--prefix`."""
    numbers: ModelNumbers | None = None
    """The architecture, the KV cache, and what each GPU allows; not with `--tp`."""


def count_document(counted: StepCount, numbers: ModelNumbers | None = None) -> CountDocument:
    """Return the document of a counted step."""
    work, step = counted.work, counted.step
    return view(
        CountDocument,
        counted,
        gguf=view(GgufRow, counted.gguf) if counted.gguf else None,
        batch=plain_number(step.batch),
        query_tokens=plain_number(step.query),
        context_tokens=plain_number(step.context),
        model_flops=plain_number(work.model_flops),
        executed_flops=plain_number(work.executed_flops),
        vector_flops=plain_number(work.vector_flops),
        bytes=bytes_by_kind(work),
        executed_bytes=ExecutedBytes(
            plain_number(work.activation_bytes),
            {cause: plain_number(value) for cause, value in work.avoidable_bytes.items()},
            plain_number(work.executed_bytes),
        ),
        avoidable_flops={cause: plain_number(value) for cause, value in work.avoidable_flops.items()},
        intensity=float(work.intensity),
        operators=[_operator_row(operator, part) for operator, part in counted.by_operator],
        tp=counted.share,
        gemms=counted.gemms or None,
        gpus=counted.gpus or None,
        crosscheck=view(CrosscheckRow, counted.crosscheck) if counted.crosscheck else None,
        numbers=numbers,
    )


def _operator_row(operator: Operator, work: Work) -> OperatorRow:
    amounts = (plain_number(getattr(work, item.name)) for item in fields(OperatorRow)[4:])
    return OperatorRow(operator.name, operator.group, operator.count, operator.dtype_name, *amounts)


def count_csv(counted: StepCount) -> str:
    """Return the operators as CSV, with unrounded numbers."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in count_document(counted).operators:
        writer.writerow({**vars(row), "name": escape_formula(row.name)})
    return buffer.getvalue()
