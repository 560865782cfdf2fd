"""`place`: compare the figures of another tool's file with the roofs of a GPU or of this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.cache import counted_model
from profiler.counting.floor import DENSE_BYTES, collectives_s, roof_times
from profiler.counting.memory_need import cache_bytes
from profiler.counting.operators import Experts, ModelWork, RecurrentState
from profiler.counting.preset_counts import CountedModel
from profiler.data import datasheets as datasheet
from profiler.data.links import link_called, link_of
from profiler.data.roof_set import RoofSet, datasheet_roofs
from profiler.errors import ModelError, RequestError
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.ranges import parse_in_order
from profiler.json_document import view
from profiler.loading.source import ModelSource, resolve
from profiler.place.place import PlacedFile, PlaceRoofs, doubts, placed
from profiler.predict.operator_arrays import Array
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figure, ForeignFile
from profiler.units import scaled, several, short_count, significant

# Tools differ in whether they count buffers and tied weights. Another model differs by far more.
_SAME_PARAMS = 0.05
_DTYPES = ("float32", "bfloat16", "float16")
_MOST_GPUS = 1024
# The rule for room leaves 2 % of a GPU's memory between blocks, which another tool's allocator may use.
_FULLEST = 1.02
# What is left for the weights outside of the experts must be between 2 and 32 bits each, or the experts are not as
# published.
_REST_BYTES = (0.25, 4.0)


def place(
    path: Path,
    model: str,
    *,
    gpu: str = "",
    here: bool = False,
    quant: str = "none",
    tp: int = 0,
    link: str = "",
    prompt_lens: str = "",
    batch_sizes: str = "",
    new_tokens: str = "",
) -> PlacedFile:
    """Compare the figures of a file with the datasheet roofs of one or more GPUs, or with roofs measured here.

    `tp` is the number of GPUs that share each step; 0 is the number that the file names, else 1. The last three are
    shapes for a file that names none, in the range grammar: one value for all figures, or one per figure. Raises
    RequestError for an unreadable file, missing shapes, an unknown GPU, link or model.
    """
    given = {"--prompt-lens": prompt_lens, "--batch-sizes": batch_sizes, "--new-tokens": new_tokens}
    shapes = {option: parse_in_order(text, option) for option, text in given.items()}
    file = read_foreign(path)
    figures = _with_shapes(file.figures, shapes)
    _require_shapes(figures)
    is_cpu = False
    if here:
        from profiler.device.device import resolve_device  # loads torch, as only --here needs
        from profiler.roofs.measure import here_roofs

        is_cpu = resolve_device("auto").type == "cpu"
    on_gpu = [figure for figure in figures if is_cpu or figure.gpu_layers != 0]
    if not on_gpu:
        raise RequestError(
            f"{path}: no layer was on the GPU (n_gpu_layers 0 or devices none), so its figures are the host's and"
            " cannot be compared with a GPU's roofs."
        )
    named = [value for figure in on_gpu for name, value in figure.settings if name == "device"]
    devices = sorted({file.settings.get("device", ""), *named} - {""})
    gpus = _gpus(file, tp, here)
    sheet = None if here else _sheet(gpu, devices)
    source = resolve(model)
    precision = file.settings.get("precision", "auto")
    counted = counted_model(source, precision if precision in _DTYPES else "auto", quant, rented=True)
    work = counted.work
    # The dtype of the cache is also the dtype in which quantised linears return their results.
    dtype = (work.of_kind(AttentionCore) or work.operators)[0].dtype_name
    under = here_roofs(work, dtype) if sheet is None else datasheet_roofs(sheet, gpus)
    # Stages work in turn: they add memory, not speed.
    stages = file.stages if tp in (0, file.gpus) else 1
    room_bytes = (under.room_bytes or 0) * stages or None
    figures = [_of_one_batch(figure, counted, room_bytes) for figure in on_gpu]
    line, link_s, unknown_link = _linked(sheet, gpus, link, source, figures)
    widths = [_widths(figure, counted) for figure in figures]
    floors = zip(*_floors(work, figures, under, dtype, widths, file.packed_dtype), link_s, strict=True)
    figures = [_with_offload(figure, work) for figure in figures]
    fits = [
        room_bytes is None or figure.weights_on_host or _needs(figure, counted) <= _FULLEST * room_bytes
        for figure in figures
    ]
    rows = [placed(figure, *floor, fit) for figure, floor, fit in zip(figures, floors, fits, strict=True)]
    in_turn = (
        f"it ran on {stages * gpus} GPUs that hold layers in turn: the roofs are those of {gpus}, though a prompt in"
        " chunks may use more at a time."
    )
    warnings = [
        *([in_turn] if stages > 1 else []),
        *file.remarks,
        *_mismatches(file, devices, figures, counted, sheet.gpu if sheet else under.device, quant),
        *_no_room([f for f, fit in zip(figures, fits, strict=True) if not fit], len(rows), counted, under, room_bytes),
        *unknown_link,
        *doubts(rows),
    ]
    if tp and file.gpus and tp != file.gpus:
        warnings.append(f"the file says that {several(file.gpus, 'GPU', 'GPUs')} shared each step, not {tp}.")
    if left_out := len(file.figures) - len(on_gpu):
        count = several(left_out, "figure is left out, as it", "figures are left out, as they")
        warnings.append(f"{count} ran with no layer on the GPU (n_gpu_layers 0 or devices none).")
    if here and any(row.regime is None for row in rows):
        warnings.append("this device's roofs were measured just now; if the device was busy, they are too low.")
    if here and file.packed_dtype and any(map(_is_packed, figures)):
        warnings.append(f"{file.tool} multiplies packed weights in {file.packed_dtype}, whose rate here is not known.")
    return PlacedFile(
        tool=file.tool,
        file=file.name,
        model=source.name,
        dtype=dtype,
        quant=quant,
        stored=_stored(counted, figures, widths, quant, dtype, _product_dtype(file, figures, under, dtype)),
        roofs=view(PlaceRoofs, under),
        warnings=warnings,
        gpus=gpus,
        link=line,
        rows=rows,
    )


def _with_shapes(figures: Sequence[Figure], shapes: Mapping[str, Sequence[int]]) -> Sequence[Figure]:
    """The figures with one value for all of them, or one for each. Raises RequestError for any other number."""
    given: list[Sequence[int | None]] = []
    for option, values in shapes.items():
        if len(values) > 1 and len(values) != len(figures):
            raise RequestError(
                f"{option}: {len(values)} values for {len(figures)} figures; give one, or one per figure in order."
            )
        given.append(values if len(values) == len(figures) else [values[0] if values else None] * len(figures))
    return [figure.with_shapes(*own) for figure, *own in zip(figures, *given, strict=True)]


def _require_shapes(figures: Sequence[Figure]) -> None:
    """Raises RequestError with the options to give if shapes are missing."""
    missing = []
    if any(figure.batch_size is None and figure.cap is None for figure in figures):
        missing.append("--batch-sizes")
    if any(figure.depth is None for figure in figures):
        missing.append("--prompt-lens")
    # The number of steps in a whole decode loop is unknown without the number of its tokens.
    if any((figure.covers == "generate" and not figure.new_tokens) or figure.loop_tokens == 0 for figure in figures):
        missing.append("--new-tokens")
    if missing:
        raise RequestError(f"the file does not say its shapes; give {' and '.join(missing)}.")


def _of_one_batch(figure: Figure, counted: CountedModel, room_bytes: int | None) -> Figure:
    """The figure of one batch of its requests; without a batch size the largest that fits, which needs least."""
    if figure.batch_size is None:
        most = figure.cap or 1
        if room_bytes and (per_sequence := int(cache_bytes(counted.work, 1, _tokens(figure)))):
            most = min(most, max(1, int((room_bytes - _weight_bytes(figure, counted)) // per_sequence)))
        note = f"batch unknown: {most} at a time assumed, the most that were in flight and fit, for the least floor"
        figure = replace(figure, batch_size=most, notes=(*figure.notes, note))
    return figure.of_one_batch()


def _with_offload(figure: Figure, work: ModelWork) -> Figure:
    """The figure with a note if a part of its bytes is in the host's memory, so that it need not fit the GPU."""
    layers = sum(op.count for op in (*work.of_kind(AttentionCore), *work.of_kind(RecurrentState)))
    few = figure.gpu_layers is not None and figure.gpu_layers < layers
    parts = [
        *([f"{figure.gpu_layers} of {layers} layers were on the GPU"] if few else []),
        *(["experts were in the host's memory"] if figure.weights_on_host and not few else []),
        *(["the cache was in the host's memory"] if figure.cache_on_host else []),
    ]
    notes = [f"{part}: the host's memory has another, lower roof" for part in parts]
    return replace(figure, weights_on_host=few or figure.weights_on_host, notes=(*figure.notes, *notes))


def _gpus(file: ForeignFile, tp: int, here: bool) -> int:
    """The number of GPUs whose roofs add up. Raises RequestError for an impossible one."""
    if tp < 0 or tp > _MOST_GPUS:
        raise RequestError(f"--tp {tp} is not possible; give the number of GPUs that shared each step.")
    if here and tp > 1:
        raise RequestError("--here measures one device; give --gpu NAME for the roofs of several.")
    return 1 if here else tp or file.gpus or 1


def _sheet(gpu: str, devices: Sequence[str]) -> datasheet.Datasheet:
    """The datasheet of the GPU that the user names, else of the one that the file names. Raises RequestError."""
    if gpu:
        return datasheet.gpu_called(gpu)
    sheets = datasheet.called(devices[0]) if len(devices) == 1 else []
    if len(sheets) != 1:
        ran_on = f" The file names {' and '.join(devices)}." if devices else ""
        raise RequestError(f"which GPU's roofs? Give --gpu NAME, or --here for this device's own.{ran_on}")
    return sheets[0]


def _linked(
    sheet: datasheet.Datasheet | None, gpus: int, text: str, source: ModelSource, figures: Sequence[Figure]
) -> tuple[str, list[float | None], list[str]]:
    """(the link's name, least seconds of the messages of each figure, a warning if they are not known).

    Messages have the activations' width, so those of packed weights are counted with dense ones.
    """
    unknown: list[float | None] = [None] * len(figures)
    if gpus == 1 and text:
        raise RequestError(f"--link {text} is the link between several GPUs; give their number with --tp.")
    link = link_called(text, gpus) if text else None if sheet is None or gpus == 1 else link_of(sheet, gpus)
    if link is None:
        return "", unknown, []
    reason = ""
    for dtype in ("auto", "bfloat16"):
        try:
            rank = counted_model(source, dtype, rented=True, ranks=gpus).work
        except (RequestError, ModelError) as error:
            reason = str(error)
            continue
        steps, *of_phase = _steps(figures)
        prefill_s, decode_s = (collectives_s(rank, step, ExecutionPath(), link) for step in of_phase)
        has_prefill = np.array([figure.covers != "decode" for figure in figures])
        return link.name, (has_prefill * prefill_s + steps * decode_s).tolist(), []
    return "", unknown, [f"the time of the link between {gpus} GPUs is not known: {reason}"]


def _mismatches(
    file: ForeignFile, devices: Sequence[str], figures: Sequence[Figure], counted: CountedModel, gpu: str, quant: str
) -> list[str]:
    """Warnings if the file names another model size, device or precision than the ones it is compared with."""
    warnings, params = [], counted.work.params
    for own in sorted({figure.params for figure in figures if figure.params}):
        if abs(own / params - 1) > _SAME_PARAMS:
            warnings.append(
                f"the file's model has {short_count(own)} parameters, but this model has {short_count(params)}."
            )
    for device in devices:
        names = {sheet.gpu.lower() for sheet in datasheet.called(device)} | {device.lower()}
        if not any(gpu.lower() in name for name in names):
            warnings.append(f"the file says that it ran on {device}, not on {gpu}.")
    settings = [{**file.settings, **dict(figure.settings)} for figure in figures]
    own_quant = ", ".join(sorted({own.get("quantization", "-") for own in settings} - {"-"}))
    if own_quant and quant == "none" and counted.published is None and not any(f.weight_bytes for f in figures):
        warnings.append(
            f"the file says that its weights were quantised ({own_quant}), but they are counted in {counted.dtype}:"
            " give --quant, or the quantised model's own folder."
        )
    return warnings


def _weight_bytes(figure: Figure, counted: CountedModel) -> float:
    return counted.work.params * figure.weight_bytes if figure.weight_bytes else counted.weight_bytes


def _tokens(figure: Figure) -> int:
    """Tokens of a sequence in the cache in the middle of what the figure covers, as on average on a server."""
    return max(1, (figure.depth or 0) + (0 if figure.covers == "prefill" else (figure.new_tokens or 0) // 2))


def _needs(figure: Figure, counted: CountedModel) -> float:
    """Bytes of the stored weights, and of the cache if it is on the GPU."""
    if figure.cache_on_host:
        return _weight_bytes(figure, counted)
    cores = counted.work.of_kind(AttentionCore)
    width = figure.kv_itemsize / cores[0].itemsize if figure.kv_itemsize and cores else 1.0
    cache = float(cache_bytes(counted.work, figure.batch_size or 1, _tokens(figure), shared=figure.shared))
    return _weight_bytes(figure, counted) + cache * width


def _no_room(
    outside: Sequence[Figure], all_count: int, counted: CountedModel, under: RoofSet, room_bytes: int | None
) -> list[str]:
    """A sentence about figures whose weights, or weights and cache, exceed the memory of the GPUs."""
    if not outside or room_bytes is None:
        return []
    largest = max(outside, key=lambda figure: _needs(figure, counted))
    needs, weights = _needs(largest, counted), _weight_bytes(largest, counted)
    what, instead = f"the weights need {scaled(weights, 'B')}", "or another precision"
    if weights <= room_bytes:
        cache = f"the cache of {largest.batch_size} x {_tokens(largest)} tokens"
        what, instead = f"the weights and {cache} need {scaled(needs, 'B')}", "or a cache in fewer bits"
    which = "the file" if len(outside) == all_count else f"{len(outside)} of {all_count} figures"
    return [
        f"{what}, but {under.device} has room for {scaled(room_bytes, 'B')}: {which} must come from several GPUs"
        f" (--tp N), another GPU {instead}, and is not judged."
    ]


def _widths(figure: Figure, counted: CountedModel) -> tuple[float, float]:
    """(bytes per weight of experts, of all other weights) as the file stores them; 0: as they are counted.

    Experts in a published format keep it; what is left of the file's bytes is that of the other weights. If that is no
    possible width, both have the mean.
    """
    if not figure.weight_bytes:
        return 0.0, 0.0
    experts = counted.work.of_kind(Experts)
    weights = sum(op.count * op.num_experts * sum(ins * outs for ins, outs in op.matrices) for op in experts)
    if counted.published and 0 < weights < counted.work.params:
        packed = sum(op.count * op.num_experts * op.expert_bytes for op in experts)
        left = (counted.work.params * figure.weight_bytes - packed) / (counted.work.params - weights)
        if _REST_BYTES[0] <= left <= _REST_BYTES[1]:
            return packed / weights, left
    return figure.weight_bytes, figure.weight_bytes


def _is_packed(figure: Figure) -> bool:
    return 0 < (figure.weight_bytes or 0.0) < DENSE_BYTES


def _product_dtype(file: ForeignFile, figures: Sequence[Figure], under: RoofSet, dtype: str) -> str:
    """The dtype of the products with weights that the file stores in other bits than the model's."""
    own = "float16" if dtype == "bfloat16" and dtype not in under.flops_per_s else dtype
    packs = any(map(_is_packed, figures))
    return file.packed_dtype if packs and under.flops_per_s.get(file.packed_dtype, 0.0) > under.peak(own, own) else own


def _stored(
    counted: CountedModel,
    figures: Sequence[Figure],
    widths: Sequence[tuple[float, float]],
    quant: str,
    dtype: str,
    product_dtype: str,
) -> str:
    own = sorted({8 * figure.weight_bytes for figure in figures if figure.weight_bytes})
    if not own:
        packed = counted.published if quant == "none" else quant
        return f"in {f'{packed} and ' if packed else ''}{dtype}"
    bits = " to ".join(dict.fromkeys(significant(width) for width in (own[0], own[-1])))
    split = ""
    if counted.work.of_kind(Experts):
        experts, rest = max(widths)
        split = (
            " (a mean: the weights that a token uses may be wider)"
            if experts == rest
            else f" ({significant(8 * experts)} in the experts, {significant(8 * rest, 2)} elsewhere)"
        )
    return f"at the file's own {bits} bits per weight{split}, products in {product_dtype},"


def _steps(figures: Sequence[Figure]) -> tuple[Array, Step, Step]:
    """(decode steps of each figure, its prefill, its median decode step); arrays are [n] of floats.

    Floats, since counts may exceed int64. A verifying step processes all drafted tokens.
    """
    batch, prompt, cached_len, new, shared = (
        np.array([float(getattr(figure, name) or 0) for figure in figures])
        for name in ("batch_size", "prompt_len", "context_len", "new_tokens", "shared")
    )
    steps = np.array([figure.decode_steps for figure in figures])
    query = np.array([max(figure.step_tokens, figure.verified_tokens or 1.0) for figure in figures])
    decode = Step(batch, query, prompt + cached_len + new // 2, shared, asked=query)
    return steps, Step(batch, np.maximum(1, prompt), cached_len), decode


def _floors(
    work: ModelWork,
    figures: Sequence[Figure],
    under: RoofSet,
    dtype: str,
    widths: Sequence[tuple[float, float]],
    packed_dtype: str,
) -> tuple[list[float], list[float]]:
    """(compute-bound seconds, memory-bound seconds) of the least time of what each figure covers."""
    steps, *of_phase = _steps(figures)
    has_prefill = np.array([figure.covers != "decode" for figure in figures])
    experts, rest = np.array(widths).T
    kv = np.array([figure.kv_itemsize or 0.0 for figure in figures])
    prefill, decode = (roof_times(work, step, under, dtype, rest, kv, experts, packed_dtype) for step in of_phase)
    compute_s, memory_s = (has_prefill * first + steps * each for first, each in zip(prefill, decode, strict=True))
    return compute_s.tolist(), memory_s.tolist()
