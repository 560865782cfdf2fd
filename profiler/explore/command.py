"""The numbers of the page of `explore`, those of `count` on a grid, and the page: one HTML file that opens offline."""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from profiler import report
from profiler.counting.cache import counted_model
from profiler.counting.grid_count import GpuFloors, GridCount, count_grid
from profiler.counting.preset_counts import CountedModel
from profiler.data.ceiling_set import CeilingSet, ceilings_called
from profiler.errors import ModelError, RequestError
from profiler.loading.source import resolve
from profiler.quant.registry import FORMATS, known_quant

DEFAULT_GPUS = ("T4", "L4", "RTX 4090", "A100 80GB SXM", "H100 SXM")
MOST_BATCH, MOST_CONTEXT = 1024, 262_144
_LEAST_CONTEXT = 16
_FOLDER = Path(__file__).parent
_STYLE = Path(report.__file__).parent / "templates" / "style.css"
MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class Gpu:
    """The ceilings of a GPU, for the roofline."""

    name: str
    room_bytes: float
    """Bytes that a model may take of its memory."""
    bytes_per_s: float
    dtype: str
    """The model's dtype; float16 where the GPU has no units for bfloat16."""
    flops_per_s: float
    """Peak of that dtype."""


@dataclass(frozen=True)
class StepColumns:
    """Prefills of a batch of prompts, or decode steps after as many cached tokens. Fields are places in `columns`."""

    flops: int
    bytes: int
    """Model bytes; neither has a value where the step fits none of the GPUs."""
    floor_s: Sequence[int]
    """For each GPU; without a value where the step does not fit."""
    limits: Sequence[str]
    """For each GPU, a letter per point: `m` memory, `c` compute, upper case if close to the limit, `-` for no fit.

    `p` and `q` are `m` and `c` of a step that fits only if its prompts are prefilled in chunks, as servers do.
    """


@dataclass(frozen=True)
class FormatColumns:
    quant: str
    weight_bytes: int
    cache_bytes: int
    """KV cache after the decode step: a place in `columns`, as the following."""
    needs_bytes: Sequence[int]
    """For each GPU: all tensors of the decode step at their peak, or the least in chunks if that does not fit."""
    prefill: StepColumns
    decode: StepColumns


@dataclass(frozen=True)
class ExploreDocument:
    """All that the page knows. A column has the value of the batch b and the context c at b * len(contexts) + c."""

    model: str
    dtype: str
    batches: Sequence[int]
    contexts: Sequence[int]
    gpus: Sequence[Gpu]
    formats: Sequence[FormatColumns]
    columns: Sequence[str]
    """Values of six digits with spaces between them, `-` for none; formats share those that are equal."""
    max_positions: int | None
    """The longest sequence that the model supports, in tokens; None if its config does not say."""


def explore_document(model: str, gpus: Sequence[str] = DEFAULT_GPUS, quants: Sequence[str] = ()) -> ExploreDocument:
    """Return the numbers of a model, by default in all formats that count it. Raises RequestError or ModelError."""
    source, ceilings = resolve(model), [ceilings_called(name) for name in gpus]
    counted: dict[str, CountedModel] = {}
    for quant in map(known_quant, quants or FORMATS):
        with suppress(*(() if quants or quant == "none" else (RequestError, ModelError))):
            counted[quant] = counted_model(source, quant=quant)
    first = next(iter(counted.values()))
    batches = grid_values(1, MOST_BATCH)
    contexts = grid_values(_LEAST_CONTEXT, MOST_CONTEXT)
    columns = _Columns()
    grids = [
        count_grid(
            source.name, each, quant, batch_sizes=batches, prompt_lens=contexts, context_lens=contexts, gpus=ceilings
        )
        for quant, each in counted.items()
    ]
    return ExploreDocument(
        source.name,
        first.dtype,
        batches,
        contexts,
        [_gpu(each, first.dtype) for each in ceilings],
        [_format(grid, columns) for grid in grids],
        list(columns),
        first.max_positions,
    )


def grid_values(least: int, most: int) -> list[int]:
    """Return powers of two and one and a half times each, from `least` to `most`, and `most`."""
    powers = [1 << bit for bit in range(most.bit_length())]
    between = [power + power // 2 for power in powers if power > 1]
    return sorted({value for value in (*powers, *between) if least <= value < most} | {most})


def _gpu(ceilings: CeilingSet, dtype: str) -> Gpu:
    rated = dtype if dtype in ceilings.flops_per_s else "float16"
    return Gpu(ceilings.device, ceilings.room_bytes, ceilings.bytes_per_s, rated, ceilings.peak(dtype, dtype))


class _Columns(dict[str, int]):
    def place(self, values: NDArray[np.float64], shown: NDArray[np.bool_]) -> int:
        """Return the place of a column, whose values are left out where they are not `shown`."""
        cells = (
            f"{value:.6g}".replace("e+", "e") if there else "-" for value, there in zip(values, shown, strict=True)
        )
        return self.setdefault(" ".join(cells), len(self))


def _format(grid: GridCount, columns: _Columns) -> FormatColumns:
    prefill = np.array(grid.phases) == "prefill"
    every = np.ones(np.count_nonzero(~prefill), dtype=bool)
    return FormatColumns(
        grid.quant,
        grid.weight_bytes,
        columns.place(grid.cache_bytes[~prefill], every),
        [
            columns.place(np.where(gpu.fits, gpu.need.peak_bytes, gpu.served_bytes)[~prefill], every)
            for gpu in grid.gpus
        ],
        _step(grid, prefill, columns),
        _step(grid, ~prefill, columns),
    )


def _step(grid: GridCount, phase: NDArray[np.bool_], columns: _Columns) -> StepColumns:
    """The columns of one phase. FLOPs of a step that fits none of these GPUs may exceed 64 bits, and are left out."""
    runs = np.any([gpu.runs[phase] for gpu in grid.gpus], axis=0)
    return StepColumns(
        columns.place(grid.model_flops[phase], runs),
        columns.place(grid.model_bytes[phase], runs),
        [columns.place(gpu.floor_s[phase], gpu.runs[phase]) for gpu in grid.gpus],
        ["".join(_letters(gpu, phase)) for gpu in grid.gpus],
    )


def _letters(gpu: GpuFloors, phase: NDArray[np.bool_]) -> Iterable[str]:
    points = (column[phase] for column in (gpu.bound, gpu.fits, gpu.tight, gpu.in_chunks))
    for bound, fits, tight, in_chunks in zip(*points, strict=True):
        letter = {"memory": "p", "compute": "q"}[bound] if in_chunks else bound[0] if fits else "-"
        yield letter.upper() if tight else letter


def explore_page(document: ExploreDocument) -> str:
    """Return the page of a model, which allows no connection. Raises RequestError for one of more than MOST_BYTES."""
    script = (_FOLDER / "explore.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = json.dumps(asdict(document), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    page = environment.get_template("explore.html.j2").render(
        document=document,
        # Ours, not a user's: the script and the style of this package, and JSON without a `<`.
        script=Markup(script),
        style=Markup(_STYLE.read_text(encoding="utf-8")),
        document_json=Markup(content),
        policy=(
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none';"
            " form-action 'none'"
        ),
    )
    if (nbytes := len(page.encode())) > MOST_BYTES:
        raise RequestError(
            f"this page would have {nbytes / 1e6:.1f} MB, and at most {MOST_BYTES / 1e6:.0f} MB are possible;"
            " name fewer with --gpu or --quant."
        )
    return page
