"""Another tool's figures under the roofs of a card, or of this device: counted, placed, and doubted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.diagnosis.foreign import Placed, doubts, placed
from profiler.diagnosis.tables import Table
from profiler.errors import RequestError
from profiler.job.walks import known_model
from profiler.loading.catalog import resolve
from profiler.machine import datasheet
from profiler.record.readers.figures import Figures, ForeignFile, figures_of
from profiler.record.readers.reading import read_foreign
from profiler.units import count, scaled, several, significant
from profiler.work.attention import AttentionCore
from profiler.work.operators import ModelWork, Operator
from profiler.work.step import ExecutionPath, Step

# Tools count buffers or tied weights otherwise; another model has another size altogether.
_SAME_PARAMS = 0.05
# 5 % less than what the weights need is a rounding of the card's memory, not a card that they do not fit.
_FITS = 1.05
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Under:
    """The roofs that figures are placed under."""

    name: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """By dtype."""
    memory_bytes: int | None = None

    @property
    def device(self) -> str:
        """The card's or the machine's own name."""
        return self.name.rpartition(", ")[0]

    def peak(self, dtype: str, own: str) -> float:
        """Of a dtype that has no unit here the model's own, or float32's, holds."""
        for name in (dtype, own, "float32"):
            if self.flops_per_s.get(name):
                return self.flops_per_s[name]
        return max(self.flops_per_s.values())


@dataclass(frozen=True)
class Shapes:
    """What a user says of a file that names no shapes: one value for all its figures, or one each."""

    prompt_lens: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """A whole file, placed."""

    file: ForeignFile
    model: str
    dtype: str
    quant: str
    under: Under
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
) -> Placement:
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
    work = known_model(source, told if told in _DTYPES else "auto", quant, rented=True).work
    dtype = _own_dtype(work)
    under = card or here_roofs(work, dtype)
    rows = placed(figures, *_floors(work, figures, under, dtype))
    found = [*_another(devices, figures, work, under), *_no_room(work, figures, under), *doubts(rows)]
    if left:
        were = several(left, "figure is left out: no layer of it", "figures are left out: no layer of theirs")
        found.append(f"{were} lay on the card (n_gpu_layers 0), so that they are the host's.")
    if here and None in rows.column("regime"):
        found.append("this device's roofs were measured now: measured in a busy minute they are too low.")
    own_bits = sorted(8 * width for width in set(figures.column("weight_bytes")) if width)
    return Placement(file, source.name, dtype, quant, under, rows, tuple(found), tuple(own_bits))


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


def _card(gpu: str, devices: Sequence[str]) -> Under:
    if gpu:
        return _of_sheet(datasheet.gpu_called(gpu))
    known = datasheet.called(devices[0]) if len(devices) == 1 else []
    if len(known) == 1:
        return _of_sheet(known[0])
    ran_on = f" (it ran on {' and '.join(devices)})" if devices else ""
    raise RequestError(f"under whose roofs? Give --gpu CARD, or --here for this device's own{ran_on}.")


def _of_sheet(sheet: datasheet.Datasheet) -> Under:
    peaks = {name: peak for name in _DTYPES if (peak := sheet.peak_flops_per_s(name))}
    return Under(f"{sheet.gpu}, datasheet", sheet.bandwidth_bytes_per_s, peaks, sheet.memory_bytes)


def _here_is_card() -> bool:
    from profiler.machine.device import resolve_device

    return str(resolve_device("auto").type) != "cpu"


def here_roofs(work: ModelWork, dtype: str) -> Under:
    """The roofs of this device, measured, or kept for a day."""
    from profiler.machine.device import resolve_device, software
    from profiler.machine.machine import machine_for
    from profiler.roofs.cache import cached
    from profiler.roofs.measure import measure
    from profiler.roofs.products import measurable_dtypes
    from profiler.roofs.values import Ceilings

    machine = machine_for(resolve_device("auto"))
    used = {operator.dtype_name for operator in work.operators if operator.dtype.itemsize > 0}
    dtypes = [name for name in measurable_dtypes(machine.device) if name in {*used, dtype, "float32"}]

    def measure_missing(known: Ceilings | None) -> Ceilings:
        return measure(machine, dtypes, model_dtype=dtype, known=known)

    found = cached(measure_missing, machine, software(), fresh=False)
    ceilings = found.only(dtypes, dtype, machine.info.datasheet)
    if not ceilings.judges:
        why = next(iter(found.missing.values()))
        raise RequestError(f"--here: the roofs of this device could not be measured ({why}); give --gpu CARD.")
    rates = {name: ceilings.compute_flops_per_s(name) for name in dtypes}
    return Under(f"{machine.info.name}, measured", ceilings.memory_bytes_per_s, rates, machine.info.memory_bytes)


def _another(devices: Sequence[str], figures: Figures, work: ModelWork, under: Under) -> list[str]:
    """What the file says of its model and its device, where that is not what it is placed under."""
    found = []
    for params in sorted(set(filter(None, figures.column("params")))):
        if abs(params / work.params - 1) > _SAME_PARAMS:
            found.append(f"the file is of a model of {count(params)} parameters, this one has {count(work.params)}.")
    for device in devices:
        names = {sheet.gpu.lower() for sheet in datasheet.called(device)} | {device.lower()}
        if not any(under.device.lower() in name for name in names):
            found.append(f"the file says that it ran on {device}, not on {under.device}.")
    return found


def _devices(file: ForeignFile, figures: Figures) -> list[str]:
    """All that a file says these figures ran on."""
    own = [value for settings in set(figures.column("settings")) for name, value in settings if name == "device"]
    return sorted({file.settings.get("device", ""), *own} - {""})


def _no_room(work: ModelWork, figures: Figures, under: Under) -> list[str]:
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


_Array = NDArray[Any]


def _floors(work: ModelWork, figures: Figures, under: Under, dtype: str) -> tuple[_Array, _Array]:
    """The least time of what each figure covers by side, all of them counted in one go."""
    batch, prompt, cached_len, new, width, kv = (
        figures.numbers(name)
        for name in ("batch_size", "prompt_len", "context_len", "new_tokens", "weight_bytes", "kv_itemsize")
    )
    covers = np.array(figures.column("covers"))
    prefills = covers != "decode"
    # A median over a decode loop describes its middle step; the first new token comes from the prefill itself.
    steps = np.select([covers == "generate", covers == "decode"], [new - 1, 1.0], 0.0)
    prefill = least(work, Step(batch, np.maximum(1, prompt), cached_len), under, dtype, width, kv)
    decode = least(work, Step(batch, 1, prompt + cached_len + new // 2), under, dtype, width, kv)
    compute_s, memory_s = (prefills * first + steps * then for first, then in zip(prefill, decode, strict=True))
    return compute_s, memory_s


def least(work: ModelWork, step: Step, under: Under, dtype: str, width: _Array, kv: _Array) -> tuple[_Array, _Array]:
    """Seconds by side of the steps of an array: sum over operators of max(FLOPs / peak, bytes / bandwidth).

    `width` are bytes a weight, `kv` those of an element of the cache, where a file tells them; 0 where it does not.
    """
    zeros = np.zeros_like(np.asarray(step.batch), dtype=np.float64)
    compute_s, memory_s = zeros.copy(), zeros.copy()
    for operator in work.operators:
        need = operator.work(step, ExecutionPath())
        weights = need.weight_bytes * np.where(width > 0, width / _itemsize(operator), 1.0)
        cache = (need.kv_read_bytes + need.kv_write_bytes) * np.where(kv > 0, kv / operator.dtype.itemsize, 1.0)
        nbytes = zeros + weights + cache + need.embedding_bytes + need.logits_bytes
        moved_s = nbytes / under.bytes_per_s
        done_s = (zeros + need.model_flops) / under.peak(operator.dtype_name, dtype)
        compute_s += np.where(done_s > moved_s, done_s, 0.0)
        memory_s += np.where(done_s > moved_s, 0.0, moved_s)
    return compute_s, memory_s


def _itemsize(operator: Operator) -> float:
    """Bytes of one weight as it was counted; those that a quantisation wrote fewer for keep their own count."""
    return max(1.0, float(operator.dtype.itemsize))
