"""`place`: compare the figures of another tool's file with the roofs of a GPU or of this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.cache import counted_model
from profiler.counting.floor import RoofSet, roof_times
from profiler.counting.operators import ModelWork
from profiler.data import datasheets as datasheet
from profiler.errors import RequestError
from profiler.facts.step import ExecutionPath, Step
from profiler.loading.source import resolve
from profiler.place.place import PlacedFigure, doubts, placed
from profiler.predict.operator_arrays import Array
from profiler.readers.columns import Table
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figures, ForeignFile, figures_of
from profiler.units import scaled, several, short_count, significant

# Tools differ in whether they count buffers and tied weights. Another model differs by far more.
_SAME_PARAMS = 0.05
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Shapes:
    """Shapes that the user gives for a file that names none: one value for all figures, or one per figure."""

    prompt_lens: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlacedFile:
    """The figures of a file, compared with roofs."""

    file: ForeignFile
    model: str
    dtype: str
    quant: str
    under: RoofSet
    rows: Table[PlacedFigure]
    doubts: tuple[str, ...]
    own_bits: tuple[float, ...] = ()
    """Bits per weight that the file names, ascending; the floors of its figures are computed from them."""

    @property
    def stored(self) -> str:
        """The precision of the weights that the floors assume, in words."""
        if not self.own_bits:
            return f"in {self.dtype if self.quant == 'none' else f'{self.quant} and {self.dtype}'}"
        bits = " to ".join(dict.fromkeys(significant(width) for width in (self.own_bits[0], self.own_bits[-1])))
        return f"at the file's own {bits} bits per weight, products in {self.dtype},"


def place(
    path: Path, model: str, *, gpu: str = "", here: bool = False, quant: str = "none", shapes: Shapes | None = None
) -> PlacedFile:
    """Compare the figures of a file with the datasheet roofs of a GPU, or with roofs measured on this device.

    Raises RequestError for an unreadable file, missing shapes, an unknown GPU or an unknown model.
    """
    file = read_foreign(path)
    figures = _complete(_with_shapes(file.figures, shapes or Shapes()))
    on_host = int(figures.filled("on_host").sum()) if not here or _is_gpu_here() else 0
    if on_host == len(figures):
        raise RequestError(
            f"{path}: no layer was on the GPU (n_gpu_layers 0), so its figures are the host's and cannot be compared"
            " with a GPU's roofs."
        )
    if on_host:
        figures = figures_of(figure for figure in figures if not figure.on_host)
    devices = _devices(file, figures)
    datasheet_roofs = None if here else _datasheet_roofs(gpu, devices)
    source = resolve(model)
    precision = file.settings.get("precision", "auto")
    work = counted_model(source, precision if precision in _DTYPES else "auto", quant, rented=True).work
    # The dtype of the cache is also the dtype in which quantised linears return their results.
    cores = work.of_kind(AttentionCore)
    dtype = (cores or work.operators)[0].dtype_name
    under = datasheet_roofs or _roofs_here(work, dtype)
    rows = placed(figures, *_floors(work, figures, under, dtype))
    warnings = [*_mismatches(devices, figures, work, under), *_no_room(work, figures, under), *doubts(rows)]
    if on_host:
        count = several(on_host, "figure is left out, as it", "figures are left out, as they")
        warnings.append(f"{count} ran with no layer on the GPU (n_gpu_layers 0).")
    if here and None in rows.column("regime"):
        warnings.append("this device's roofs were measured just now; if the device was busy, they are too low.")
    own_bits = sorted(8 * width for width in set(figures.column("weight_bytes")) if width)
    return PlacedFile(file, source.name, dtype, quant, under, rows, tuple(warnings), tuple(own_bits))


def _with_shapes(figures: Figures, shapes: Shapes) -> Figures:
    if shapes == Shapes():
        return figures
    given = [
        _per_figure(values, len(figures), option)
        for values, option in (
            (shapes.prompt_lens, "--prompt-lens"),
            (shapes.batch_sizes, "--batch-sizes"),
            (shapes.new_tokens, "--new-tokens"),
        )
    ]
    return figures_of(figure.with_shapes(*of_figure) for figure, *of_figure in zip(figures, *given, strict=True))


def _per_figure(values: Sequence[int], figure_count: int, option: str) -> Sequence[int | None]:
    """One value per figure, None if there is none. Raises RequestError for any other number of values."""
    if len(values) == figure_count:
        return values
    if len(values) > 1:
        raise RequestError(
            f"{option}: {len(values)} values for {figure_count} figures; give one value, or one per figure in order."
        )
    return [values[0] if values else None] * figure_count


def _complete(figures: Figures) -> Figures:
    """The figures, each of one batch. Raises RequestError with the options to give if shapes are missing."""
    covers, batches, prompts, contexts, news = (
        figures.column(name) for name in ("covers", "batch_size", "prompt_len", "context_len", "new_tokens")
    )
    missing = []
    if None in batches:
        missing.append("--batch-sizes")
    if (None, None) in zip(prompts, contexts, strict=True):
        missing.append("--prompt-lens")
    # The number of steps in a whole decode loop is unknown without the number of its tokens.
    if ("generate", None) in zip(covers, news, strict=True) or 0 in figures.column("loop_tokens"):
        missing.append("--new-tokens")
    if missing:
        raise RequestError(f"the file does not say its shapes; give {' and '.join(missing)}.")
    shared = any(figures.column("requests"))
    return figures_of(figure.of_one_batch() for figure in figures) if shared else figures


def _datasheet_roofs(gpu: str, devices: Sequence[str]) -> RoofSet:
    """Roofs of the GPU that the user names, else of the one that the file names. Raises RequestError without one."""
    if gpu:
        sheet = datasheet.gpu_called(gpu)
    else:
        sheets = datasheet.called(devices[0]) if len(devices) == 1 else []
        if len(sheets) != 1:
            ran_on = f" The file names {' and '.join(devices)}." if devices else ""
            raise RequestError(f"which GPU's roofs? Give --gpu NAME, or --here for this device's own.{ran_on}")
        sheet = sheets[0]
    peaks = {name: peak for name in _DTYPES if (peak := sheet.peak_flops_per_s(name))}
    return RoofSet(f"{sheet.gpu}, datasheet", sheet.bandwidth_bytes_per_s, peaks, sheet.room_bytes)


# torch is loaded only for --here, hence the imports in these two functions.
def _is_gpu_here() -> bool:
    from profiler.device.device import resolve_device

    return str(resolve_device("auto").type) != "cpu"


def _roofs_here(work: ModelWork, dtype: str) -> RoofSet:
    from profiler.roofs.measure import here_roofs

    return here_roofs(work, dtype)


def _mismatches(devices: Sequence[str], figures: Figures, work: ModelWork, under: RoofSet) -> list[str]:
    """Warnings if the file names another model size or another device than the ones it is compared with."""
    warnings = []
    for params in sorted(set(filter(None, figures.column("params")))):
        if abs(params / work.params - 1) > _SAME_PARAMS:
            warnings.append(
                f"the file's model has {short_count(params)} parameters, but this model has {short_count(work.params)}."
            )
    for device in devices:
        names = {sheet.gpu.lower() for sheet in datasheet.called(device)} | {device.lower()}
        if not any(under.device.lower() in name for name in names):
            warnings.append(f"the file says that it ran on {device}, not on {under.device}.")
    return warnings


def _devices(file: ForeignFile, figures: Figures) -> list[str]:
    """The devices that the file names for these figures, sorted."""
    own = [value for settings in set(figures.column("settings")) for name, value in settings if name == "device"]
    return sorted({file.settings.get("device", ""), *own} - {""})


def _no_room(work: ModelWork, figures: Figures, under: RoofSet) -> list[str]:
    """A warning if the weights exceed the memory of the GPU."""
    bytes_per_weight = float(figures.numbers("weight_bytes").max(initial=0.0))
    step = Step(1, 1, 0)
    needed_bytes = (
        work.params * bytes_per_weight
        if bytes_per_weight
        else sum(float(operator.work(step, ExecutionPath()).weight_bytes) for operator in work.operators)
    )
    if under.room_bytes is None or needed_bytes <= under.room_bytes:
        return []
    return [
        f"the weights need {scaled(needed_bytes, 'B')}, but {under.device} has room for"
        f" {scaled(under.room_bytes, 'B')}: the file must come from several GPUs, another GPU or another precision."
    ]


def _floors(work: ModelWork, figures: Figures, under: RoofSet, dtype: str) -> tuple[Array, Array]:
    """(compute-bound seconds, memory-bound seconds), each float[figures]: the least time of what each figure covers."""
    batch, prompt, cached_len, new, width, kv = (
        figures.numbers(name)
        for name in ("batch_size", "prompt_len", "context_len", "new_tokens", "weight_bytes", "kv_itemsize")
    )
    covers = np.array(figures.column("covers"))
    prefills = covers != "decode"
    # The context of a loop's middle step represents its median step; the prefill makes the first new token.
    steps = np.select([covers == "generate", covers == "decode"], [new - 1, 1.0], 0.0)
    prefill = roof_times(work, Step(batch, np.maximum(1, prompt), cached_len), under, dtype, width, kv)
    decode = roof_times(work, Step(batch, 1, prompt + cached_len + new // 2), under, dtype, width, kv)
    compute_s, memory_s = (
        prefills * prefill_s + steps * decode_s for prefill_s, decode_s in zip(prefill, decode, strict=True)
    )
    return compute_s, memory_s
