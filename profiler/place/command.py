"""`place`: another tool's figures under the roofs of a GPU or of this device."""

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
from profiler.place.place import Placed, doubts, placed
from profiler.predict.operator_arrays import Array
from profiler.readers.columns import Table
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figures, ForeignFile, figures_of
from profiler.units import scaled, several, short_count, significant

# Tools count buffers or tied weights otherwise; another model has another size altogether.
_SAME_PARAMS = 0.05
# 5 % less than what the weights need is a rounding of the card's memory, not a card that they do not fit.
_FITS = 1.05
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Shapes:
    """What a user says of a file that names no shapes: one value for all its figures, or one each."""

    prompt_lens: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlacedFile:
    """A whole file, placed."""

    file: ForeignFile
    model: str
    dtype: str
    quant: str
    under: RoofSet
    rows: Table[Placed]
    doubts: tuple[str, ...]
    own_bits: tuple[float, ...] = ()
    """Bits a weight that the file tells of its figures, ascending: where it does, their floors go by them."""

    @property
    def stored(self) -> str:
        """What the floors take the weights to be stored in."""
        if not self.own_bits:
            return f"in {self.dtype if self.quant == 'none' else f'{self.quant} and {self.dtype}'}"
        bits = " to ".join(dict.fromkeys(significant(each) for each in (self.own_bits[0], self.own_bits[-1])))
        return f"at the file's own {bits} bits a weight, products in {self.dtype},"


def place(
    path: Path, model: str, *, gpu: str = "", here: bool = False, quant: str = "none", shapes: Shapes | None = None
) -> PlacedFile:
    """Place the figures of a file under the datasheet of a card, or under the roofs measured here.

    Raises RequestError for a file that cannot be read or lacks shapes, a card or a model that is not known.
    """
    file = read_foreign(path)
    figures = _complete(_with_shapes(file.figures, shapes or Shapes()))
    left = int(figures.told("on_host").sum()) if not here or _here_is_card() else 0
    if left == len(figures):
        raise RequestError(
            f"{path}: no layer lay on the card (n_gpu_layers 0), so that its figures are the host's: none lies under a"
            " card's roofs."
        )
    if left:
        figures = figures_of(figure for figure in figures if not figure.on_host)
    devices = _devices(file, figures)
    card = None if here else _card(gpu, devices)
    source = resolve(model)
    told = file.settings.get("precision", "auto")
    work = counted_model(source, told if told in _DTYPES else "auto", quant, rented=True).work
    dtype = _own_dtype(work)
    under = card or _here_roofs(work, dtype)
    rows = placed(figures, *_floors(work, figures, under, dtype))
    found = [*_another(devices, figures, work, under), *_no_room(work, figures, under), *doubts(rows)]
    if left:
        were = several(left, "figure is left out: no layer of it", "figures are left out: no layer of theirs")
        found.append(f"{were} lay on the card (n_gpu_layers 0), so that they are the host's.")
    if here and None in rows.column("regime"):
        found.append("this device's roofs were measured now: measured in a busy minute they are too low.")
    own_bits = sorted(8 * width for width in set(figures.column("weight_bytes")) if width)
    return PlacedFile(file, source.name, dtype, quant, under, rows, tuple(found), tuple(own_bits))


def _with_shapes(figures: Figures, shapes: Shapes) -> Figures:
    if shapes == Shapes():
        return figures
    given = [
        _each(values, len(figures), option)
        for values, option in (
            (shapes.prompt_lens, "--prompt-lens"),
            (shapes.batch_sizes, "--batch-sizes"),
            (shapes.new_tokens, "--new-tokens"),
        )
    ]
    return figures_of(figure.with_shapes(*of_figure) for figure, *of_figure in zip(figures, *given, strict=True))


def _each(values: Sequence[int], figures: int, option: str) -> Sequence[int | None]:
    if len(values) == figures:
        return values
    if len(values) > 1:
        raise RequestError(
            f"{option}: {len(values)} values for {figures} figures; give one, or one each in their order."
        )
    return [values[0] if values else None] * figures


def _complete(figures: Figures) -> Figures:
    """Figures whose shapes are all known, each of one batch. Raises RequestError naming the options that tell them."""
    covers, batches, prompts, contexts, news = (
        figures.column(name) for name in ("covers", "batch_size", "prompt_len", "context_len", "new_tokens")
    )
    missing = []
    if None in batches:
        missing.append("--batch-sizes")
    if (None, None) in zip(prompts, contexts, strict=True):
        missing.append("--prompt-lens")
    # A whole decode loop that tells no tokens has steps that nobody knows.
    if ("generate", None) in zip(covers, news, strict=True) or 0 in figures.column("loop_tokens"):
        missing.append("--new-tokens")
    if missing:
        raise RequestError(f"the file does not say its shapes; give {' and '.join(missing)}.")
    shared = any(figures.column("requests"))
    return figures_of(figure.of_one_batch() for figure in figures) if shared else figures


def _own_dtype(work: ModelWork) -> str:
    """The dtype of the model's cache, which its quantised products give their results in."""
    cores = [operator for operator in work.operators if isinstance(operator, AttentionCore)]
    return (cores or work.operators)[0].dtype_name


def _card(gpu: str, devices: Sequence[str]) -> RoofSet:
    if gpu:
        return _of_sheet(datasheet.gpu_called(gpu))
    known = datasheet.called(devices[0]) if len(devices) == 1 else []
    if len(known) == 1:
        return _of_sheet(known[0])
    ran_on = f" (it ran on {' and '.join(devices)})" if devices else ""
    raise RequestError(f"under whose roofs? Give --gpu CARD, or --here for this device's own{ran_on}.")


def _of_sheet(sheet: datasheet.Datasheet) -> RoofSet:
    peaks = {name: peak for name in _DTYPES if (peak := sheet.peak_flops_per_s(name))}
    return RoofSet(f"{sheet.gpu}, datasheet", sheet.bandwidth_bytes_per_s, peaks, sheet.memory_bytes)


def _here_is_card() -> bool:
    from profiler.device.device import resolve_device

    return str(resolve_device("auto").type) != "cpu"


def _here_roofs(work: ModelWork, dtype: str) -> RoofSet:
    from profiler.roofs.measure import here_roofs

    return here_roofs(work, dtype)


def _another(devices: Sequence[str], figures: Figures, work: ModelWork, under: RoofSet) -> list[str]:
    """What the file says of its model and its device, where that is not what it is placed under."""
    found = []
    for params in sorted(set(filter(None, figures.column("params")))):
        if abs(params / work.params - 1) > _SAME_PARAMS:
            found.append(
                f"the file is of a model of {short_count(params)} parameters, this one has {short_count(work.params)}."
            )
    for device in devices:
        names = {sheet.gpu.lower() for sheet in datasheet.called(device)} | {device.lower()}
        if not any(under.device.lower() in name for name in names):
            found.append(f"the file says that it ran on {device}, not on {under.device}.")
    return found


def _devices(file: ForeignFile, figures: Figures) -> list[str]:
    """All that a file says these figures ran on."""
    own = [value for settings in set(figures.column("settings")) for name, value in settings if name == "device"]
    return sorted({file.settings.get("device", ""), *own} - {""})


def _no_room(work: ModelWork, figures: Figures, under: RoofSet) -> list[str]:
    stored = float(figures.numbers("weight_bytes").max(initial=0.0))
    needed = work.params * stored if stored else float(_weight_bytes(work))
    if under.memory_bytes is None or needed <= _FITS * under.memory_bytes:
        return []
    return [
        f"the weights need {scaled(needed, 'B')}, {under.device} has {scaled(under.memory_bytes, 'B')}:"
        " several cards, another card or another precision ran."
    ]


def _weight_bytes(work: ModelWork) -> float:
    step = Step(1, 1, 0)
    return sum(float(operator.work(step, ExecutionPath()).weight_bytes) for operator in work.operators)


def _floors(work: ModelWork, figures: Figures, under: RoofSet, dtype: str) -> tuple[Array, Array]:
    """The least time of what each figure covers by side, all of them counted in one go."""
    batch, prompt, cached_len, new, width, kv = (
        figures.numbers(name)
        for name in ("batch_size", "prompt_len", "context_len", "new_tokens", "weight_bytes", "kv_itemsize")
    )
    covers = np.array(figures.column("covers"))
    prefills = covers != "decode"
    # A median over a decode loop describes its middle step; the first new token comes from the prefill itself.
    steps = np.select([covers == "generate", covers == "decode"], [new - 1, 1.0], 0.0)
    prefill = roof_times(work, Step(batch, np.maximum(1, prompt), cached_len), under, dtype, width, kv)
    decode = roof_times(work, Step(batch, 1, prompt + cached_len + new // 2), under, dtype, width, kv)
    compute_s, memory_s = (prefills * first + steps * then for first, then in zip(prefill, decode, strict=True))
    return compute_s, memory_s
