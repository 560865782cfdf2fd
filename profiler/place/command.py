"""`place`: compare the figures of another tool's file with the ceilings of a GPU or of this device.

The figures get the shapes that the file leaves out, then the floors of what they cover, and become rows with doubts.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from profiler.counting.attention import AttentionCore
from profiler.counting.cache import counted_model
from profiler.counting.floor import DENSE_BYTES, ceiling_times, collectives_s
from profiler.counting.memory_need import cache_bytes
from profiler.counting.operators import Experts, ModelWork, RecurrentState
from profiler.counting.preset_counts import CountedModel
from profiler.counting.stored_bits import in_bits, split_mean
from profiler.data import datasheets as datasheet
from profiler.data.ceiling_set import CeilingSet, datasheet_ceilings
from profiler.data.links import Link, link_called, link_of
from profiler.errors import ModelError, RequestError
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.ranges import parse_in_order
from profiler.json_document import view
from profiler.loading.source import ModelSource, resolve
from profiler.place.place import Fit, PlaceCeilings, PlacedFigure, PlacedFile, doubts, placed
from profiler.quant.registry import StoredFormat, format_in, quant_of, stored_format
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figure, ForeignFile
from profiler.units import scaled, several, short_count, significant

# Tools differ in whether they count buffers and tied weights. Another model differs by far more.
_SAME_PARAMS = 0.05
_MOST_GPUS = 1024
# The rule for free memory leaves 2 % of a GPU's memory between blocks, which another tool's allocator may use.
_FULLEST = 1.02
# What is left for the weights outside of the experts must be between 2 and 32 bits each, or the experts are not as
# published.
_REST_BYTES = (0.25, 4.0)
_FP8_OF_SERVERS = StoredFormat("fp8", 8, "linears", "float8_e4m3fn")
_NO_LAYER = "no layer on the GPU (backend CPU, n_gpu_layers 0 or devices none)"
# What tells no two GPUs apart, and what Apple's driver and blogs leave out.
_NO_NAME = re.compile(r"\b(?:nvidia|geforce|amd|radeon|apple|intel|tesla|\d+ ?x)\b\s*|\s*\([^()]*\)")
_SIZE = re.compile(r"( \d+-core)?( \d+ ?gb)?$")
_LEAST_BITS = 4.0  # per weight; fewer are rare


@dataclass(frozen=True)
class _Setup:
    """What the figures of a file are compared with."""

    file: ForeignFile
    counted: CountedModel
    quant: str
    calls: Sequence[str]
    """What the file calls the format of its weights."""
    dtype: str
    """Of the cache, in which quantised linears also return their results."""
    under: CeilingSet
    gpu: str
    gpus: int
    """That share each step."""
    stages: int
    """Groups of them that take turns: they add memory, not speed."""
    free_bytes: float
    """Bytes that a model may take of all GPUs; infinite if they are unknown."""
    link: tuple[ModelWork, Link] | None
    """The work of one of the GPUs that share each step, and the link between them; None if either is not known."""
    nearest: Sequence[str]
    """What llama-bench calls the model nearest to this one, if its file has several."""

    def weight_bytes(self, figure: Figure) -> float:
        return self.counted.work.params * figure.weight_bytes if figure.weight_bytes else self.counted.weight_bytes

    def needed_bytes(self, figure: Figure) -> float:
        """Bytes of the stored weights, and of the cache if it is on the GPU."""
        if figure.cache_on_host:
            return self.weight_bytes(figure)
        cores, batch = self.counted.work.of_kind(AttentionCore), figure.shape.batch_size or 1
        width = figure.kv_itemsize / cores[0].itemsize if figure.kv_itemsize and cores else 1.0
        cache = float(cache_bytes(self.counted.work, batch, _tokens(figure), shared=figure.cached_once))
        return self.weight_bytes(figure) + width * cache

    def knows_bits(self, figure: Figure) -> bool:
        """Whether the file, the request or the checkpoint says in how many bits the weights were.

        Files of llama.cpp and MLX pack what a checkpoint leaves dense; those of ollama's library do not.
        """
        published = stored_format(self.counted.published or "")
        packs_more = self.file.packed_dtype and self.file.tool != "ollama"
        leaves_more = published is not None and published.packs == "experts" and packs_more
        is_published = self.counted.published is not None and not leaves_more
        return figure.weight_bytes is not None or self.quant != "none" or is_published

    def fit(self, figure: Figure) -> Fit:
        """Whether they fit; perhaps, if it ran there, in fewer bits, or without a table that no step reads."""
        if figure.weights_on_host:
            return "host"
        if self.nearest and _named(figure) != self.nearest:
            return "other"
        own_bytes, needed_bytes = self.weight_bytes(figure), self.needed_bytes(figure)
        missing_bytes = needed_bytes - _FULLEST * self.free_bytes
        if missing_bytes <= 0:
            return "yes"
        read_bytes = float(self.counted.work.work(Step(1 << 20, 1, 0)).weight_bytes)  # so many tokens use every expert
        unread_bytes = own_bytes * (1 - read_bytes / self.counted.weight_bytes)
        fewer_bytes = 0.0 if self.knows_bits(figure) else own_bytes - _LEAST_BITS / 8 * self.counted.work.params
        fewer_bytes += (needed_bytes - own_bytes) / 2  # a cache in 8 bits
        is_possible = figure.gpu_layers is not None or missing_bytes <= max(unread_bytes, fewer_bytes)
        is_possible |= self.file.in_turn and self.file.stages is None  # more GPUs held it
        return "perhaps" if is_possible else "no"


def place(
    path: Path,
    model: str,
    *,
    gpu: str = "",
    here: bool = False,
    quant: str = "none",
    bits: float = 0.0,
    tp: int = 0,
    link: str = "",
    prompt_lens: str = "",
    batch_sizes: str = "",
    new_tokens: str = "",
) -> PlacedFile:
    """Compare the figures of a file with the datasheet ceilings of one or more GPUs, or with ceilings measured here.

    `quant` or the mean `bits` are the format of weights where the file names no bits.
    `tp` is the number of GPUs that share each step; 0 is the number that the file names, else 1. The last three are the
    shape of the figures of a file that names none, a number each. Raises RequestError for an unreadable file, a missing
    shape, an unknown GPU, link or model.
    """
    file, source, requested = read_foreign(path), resolve(model), quant_of(quant, bits)
    shaped = _shaped(file.figures, batch_sizes, prompt_lens, new_tokens)
    if here:
        from profiler.device.device import resolve_device  # loads torch, as only --here needs
        from profiler.roofs.measure import here_ceilings

        if resolve_device("auto").type == "cpu":  # its memory is the host's
            shaped = [replace(figure, gpu_layers=None, weights_on_host=False) for figure in shaped]
    figures = [figure for figure in shaped if figure.gpu_layers != 0]
    if not figures:
        raise RequestError(
            f"{path}: it ran with {_NO_LAYER}, so its figures are the host's, not a GPU's; on that machine, use --here."
        )
    if not 0 <= tp <= (1 if here else _MOST_GPUS):
        raise RequestError(f"--tp {tp} is not possible; give the number of GPUs that shared each step, without --here.")
    devices = sorted({({**file.settings, **dict(figure.settings)}).get("device", "") for figure in figures} - {""})
    gpus, sheet = 1 if here else tp or file.gpus or 1, None if here else _sheet(gpu, devices)
    stages = file.stages or 1 if tp in (0, file.gpus) else 1
    if file.in_turn:
        gpus, stages = 1, tp or stages
    calls, form = _quantised_as(file, figures)
    counted, quant = _counted(source, requested, form)
    if bits and (published := counted_model(source, rented=True)).published:  # its experts keep their format
        figures = [replace(figure, weight_bytes=figure.weight_bytes or bits / 8) for figure in figures]
        counted = published
    dtype = (counted.work.of_kind(AttentionCore) or counted.work.operators)[0].dtype_name
    under = here_ceilings(counted.work, dtype) if sheet is None else datasheet_ceilings(sheet, gpus)
    if link and gpus == 1:
        which = f"{file.tool} holds layers in turn" if file.in_turn else "give their number with --tp"
        raise RequestError(f"--link {link} is the link between several GPUs that share a step; {which}.")
    between = link_called(link, gpus) if link else link_of(sheet, gpus) if sheet and gpus > 1 else None
    shared, unknown_link = None, []
    if between:
        try:  # messages have the activations' width, so those of packed weights are counted with dense ones
            shared = counted_model(source, "bfloat16", rented=True, ranks=gpus).work, between
        except (RequestError, ModelError) as error:
            unknown_link = [f"the time of the link between {gpus} GPUs is not known: {error}"]
    name, free_bytes = sheet.gpu if sheet else under.device, (under.room_bytes or math.inf) * stages
    sized = [(abs(each.params / counted.work.params - 1), _named(each)) for each in figures if each.params]
    nearest = min(sized, default=(0.0, []))[1]
    setup = _Setup(file, counted, quant, calls, dtype, under, name, gpus, stages, free_bytes, shared, nearest)
    figures = [_completed(setup, figure) for figure in figures]
    # Tools that pack no weights need not say so.
    floors, is_dense = _floors(setup, figures), not (file.packed_dtype or calls)
    rows = [
        placed(figure, floor, setup.fit(figure), is_dense or setup.knows_bits(figure))
        for figure, floor in zip(figures, floors, strict=True)
    ]
    warnings = [*_doubts(setup, devices, figures, rows), *unknown_link, *doubts(rows)]
    if quant != requested:
        warnings.insert(0, f"its weights are counted in {quant}, as the file names {' and '.join(calls)}.")
    if tp and (said := file.stages if file.in_turn else file.gpus) not in (None, tp):
        warnings.append(f"the file says that it ran on {several(said or 1, 'GPU', 'GPUs')}, not on {tp}.")
    if left_out := len(shaped) - len(figures):
        count = several(left_out, "figure is left out, as it", "figures are left out, as they")
        warnings.append(f"{count} ran with {_NO_LAYER}.")
    if here and any(row.regime is None for row in rows):
        warnings.append("this device's ceilings were measured just now; if the device was busy, they are too low.")
    if here and file.packed_dtype and any(map(_is_packed, figures)):
        warnings.append(f"{file.tool} multiplies packed weights in {file.packed_dtype}, whose rate here is not known.")
    return view(
        PlacedFile,
        setup,
        tool=file.tool,
        file=file.name,
        model=source.name,
        stored=_stored(setup, figures),
        ceilings=view(PlaceCeilings, under),
        warnings=warnings,
        link=shared[1].name if shared else "",
        rows=rows,
    )


def _shaped(figures: Sequence[Figure], batch_sizes: str, prompt_lens: str, new_tokens: str) -> list[Figure]:
    """The figures with the shape given where the file names none. Raises RequestError for what is missing."""
    given = {"--batch-sizes": batch_sizes, "--prompt-lens": prompt_lens, "--new-tokens": new_tokens}
    sizes = [parse_in_order(text, option) or (None,) for option, text in given.items()]
    if any(len(values) > 1 for values in sizes):
        raise RequestError(f"{' and '.join(given)}: give one number each; figures of several shapes need a file each.")
    shaped = [figure.with_shape(*(size for [size] in sizes)) for figure in figures]
    is_missing = {
        "--batch-sizes": any(figure.shape.batch_size is None and figure.shape.cap is None for figure in shaped),
        "--prompt-lens": any(figure.shape.depth is None for figure in shaped),
        "--new-tokens": any(figure.covers == "generate" and not figure.shape.new_tokens for figure in shaped),
    }
    if missing := [option for option, is_so in is_missing.items() if is_so]:
        raise RequestError(f"the file does not say its shapes; give {' and '.join(missing)}.")
    return shaped


def _sheet(gpu: str, devices: Sequence[str]) -> datasheet.Datasheet:
    """The datasheet of the GPU that the user names, else of the one that the file names. Raises RequestError."""
    if gpu:
        return datasheet.gpu_called(gpu)
    sheets = datasheet.called(devices[0]) if len(devices) == 1 else []
    if len(sheets) != 1:
        ran_on = f" The file names {' and '.join(devices)}." if devices else ""
        raise RequestError(f"which GPU's ceilings? Give --gpu NAME, or --here for this device's own.{ran_on}")
    return sheets[0]


def _counted(source: ModelSource, quant: str, form: str) -> tuple[CountedModel, str]:
    """(the counts of the model, its format): that of the request, else of the checkpoint, else as the file names it.

    Servers multiply FP8 weights in FP8, and pack experts as well, which torchao leaves dense.
    """
    counted = counted_model(source, quant=quant, rented=True)
    if form and quant == "none" and not counted.published:
        counted, quant = counted_model(source, quant=form, rented=True), form
    return in_bits(counted, _FP8_OF_SERVERS) if quant == "fp8" else counted, quant


def _tokens(figure: Figure) -> int:
    """Tokens of a sequence in the cache in the middle of what the figure covers, as on average on a server."""
    return max(1, (figure.shape.depth or 0) + (figure.covers != "prefill") * ((figure.shape.new_tokens or 0) // 2))


def _completed(setup: _Setup, figure: Figure) -> Figure:
    """The figure with a batch, and with what its machine held in the host's memory.

    Without a batch size it is the largest that fits, which needs least.
    """
    work, notes = setup.counted.work, []
    if figure.shape.batch_size is None:
        most = figure.shape.cap or 1
        if per_sequence := cache_bytes(work, 1, _tokens(figure)):
            most = int(max(1, min(most, (setup.free_bytes - setup.weight_bytes(figure)) // per_sequence)))
        notes = [f"batch unknown: {most} at a time assumed, the most that were in flight and fit, for the least floor"]
        figure = figure.with_shape(most)
    layers = sum(op.count for op in (*work.of_kind(AttentionCore), *work.of_kind(RecurrentState)))
    on_gpu = layers if figure.gpu_layers is None else figure.gpu_layers
    weights = f"{on_gpu} of {layers} layers were on the GPU" if on_gpu < layers else "weights were in the host's memory"
    is_on_host = on_gpu < layers or figure.weights_on_host
    on_host = {weights: is_on_host, "the cache was in the host's memory": figure.cache_on_host}
    notes += [f"{what}: the host's memory has another, lower ceiling" for what, is_so in on_host.items() if is_so]
    return replace(figure, weights_on_host=is_on_host, notes=(*figure.notes, *notes))


def _widths(figure: Figure, counted: CountedModel) -> tuple[float, float]:
    """(bytes per weight of experts, of all other weights) as the file stores them; 0: as they are counted."""
    mean = figure.weight_bytes or 0.0
    return split_mean(counted, mean, _REST_BYTES) or (mean, mean)


def _floors(setup: _Setup, figures: Sequence[Figure]) -> list[tuple[float, float, float | None]]:
    """(compute-bound, memory-bound, messages') least seconds of what each figure covers; None: they are not known.

    A verifying step processes all drafted tokens.
    """
    table = [
        (
            *(shape.batch_size or 1, shape.prompt_len or 0, shape.context_len or 0, shape.new_tokens or 0),
            *(figure.cached_once, figure.tokens_processed, figure.covers != "decode", figure.decode_steps),
            *(figure.kv_itemsize or 0, *_widths(figure, setup.counted)),
        )
        for figure, shape in ((figure, figure.shape) for figure in figures)
    ]
    # Floats, since counts may exceed int64.
    batch, prompt, context, new, once, query, prefills, steps, kv, experts, rest = np.array(table, np.float64).T
    prefill = Step(batch, np.maximum(1, prompt), context)
    decode = Step(batch, query, prompt + context + new // 2, once, requested=query)
    first, each = (
        ceiling_times(setup.counted.work, step, setup.under, setup.dtype, rest, kv, experts, setup.file.packed_dtype)
        for step in (prefill, decode)
    )
    compute_s, memory_s = (prefills * one + steps * other for one, other in zip(first, each, strict=True))
    link_s: Sequence[float | None] = [None] * len(figures)
    if setup.link:
        rank, link = setup.link
        first_s, each_s = (collectives_s(rank, step, ExecutionPath(), link) for step in (prefill, decode))
        link_s = (prefills * first_s + steps * each_s).tolist()
    return list(zip(compute_s.tolist(), memory_s.tolist(), link_s, strict=True))


def _doubts(
    setup: _Setup, devices: Sequence[str], figures: Sequence[Figure], rows: Sequence[PlacedFigure]
) -> Iterator[str]:
    """What is said of a whole file, and whether it names another model, device or format, or needs more memory."""
    file, counted, calls, gpus, free_bytes = setup.file, setup.counted, setup.calls, setup.gpus, setup.free_bytes
    if setup.stages > 1:
        yield (
            f"it ran on {setup.stages * gpus} GPUs that hold layers in turn: the ceilings are those of {gpus}, though a"
            " prompt in chunks may use more at a time."
        )
    yield from file.remarks
    if others := [" ".join(_named(figure)) for figure in figures if setup.fit(figure) == "other"]:
        yield f"{len(others)} of {len(rows)} figures are of another model: {', '.join(sorted(set(others)))}."
    for own in sorted({each.params for each in figures if each.params and setup.fit(each) != "other"}):
        if abs(own / counted.work.params - 1) > _SAME_PARAMS:
            this = short_count(counted.work.params)
            yield f"the file's model has {short_count(own)} parameters, but this model has {this}."
    for device in devices:
        if not any(_is_called(setup.gpu, name) for name in device.split(", ")):
            yield f"the file says that it ran on {device}, not on {setup.gpu}."
    unknown = [row for figure, row in zip(figures, rows, strict=True) if not setup.knows_bits(figure)]
    own_bits = 8 * counted.weight_bytes / counted.work.params
    too_fast = [row for row in unknown if row.regime is None and row.attained > 1 and row.bound == "memory"]
    if unknown and (calls or file.packed_dtype or too_fast):
        quantised = f"says that its weights were quantised ({', '.join(calls)})"
        most = 0.0 if counted.published else min((own_bits / row.attained for row in too_fast), default=0.0)
        allowed = f" (by its times at most {significant(most, 2)} on {setup.under.device})" if most else ""
        elsewhere = f"{counted.dtype} elsewhere, where llama.cpp's files have 8.5 bits"
        dtype = f"{counted.published} in the experts and {elsewhere}" if counted.published else counted.dtype
        yield (
            f"the file {quantised if calls else 'does not say its bits'}{allowed}, but its weights are counted in"
            f" {dtype}: give --bits or --quant, or the quantised model's own folder."
        )
    if outside := [each for each in figures if setup.fit(each) in ("perhaps", "no")]:
        largest = max(outside, key=setup.needed_bytes)
        what, instead = f"the weights need {scaled(setup.weight_bytes(largest), 'B')}", "fewer bits"
        if setup.weight_bytes(largest) <= free_bytes:
            needs = scaled(setup.needed_bytes(largest), "B")
            what = f"the weights and the cache of {largest.shape.batch_size} x {_tokens(largest)} tokens need {needs}"
            instead = "a cache in fewer bits"
        which = "the file" if len(outside) == len(rows) else f"{len(outside)} of {len(rows)} figures"
        more = "more GPUs (--tp N)"
        if file.in_turn:
            least = math.ceil(setup.needed_bytes(largest) / _FULLEST / free_bytes * setup.stages)
            more = f"at least {least} GPUs that hold layers in turn (the ceilings stay those of one)"
        yield (
            f"{what}, but {setup.under.device} has {scaled(free_bytes, 'B')} free: {which} must come from {more},"
            f" another GPU or {instead}, or the host's memory held a part, such as a table. Shares are in doubt, or not"
            " given, and floors assume that all of it fits."
        )


def _named(figure: Figure) -> list[str]:
    """The words for the model in llama-bench's `qwen3 8B Q4_K - Medium`; empty if all figures have one name."""
    return dict(figure.settings).get("precision", "").split()[:2]


def _is_called(gpu: str, device: str) -> bool:
    """Whether a file's name of a device, which may lack the memory, means this GPU: a 4090 Laptop GPU is no 4090."""
    listed = [sheet.gpu for sheet in datasheet.called(device)] or [device]
    own, *names = (_NO_NAME.sub("", name.lower()) for name in (gpu, *listed))
    return own in (*names, *(_SIZE.sub("", name) for name in names)) or _SIZE.sub("", own) in names


def _quantised_as(file: ForeignFile, figures: Sequence[Figure]) -> tuple[list[str], str]:
    """(what a file calls the format of its weights, that format for --quant): empty if unknown or if it has bits."""
    forms = {}
    for each in ({**file.settings, **dict(figure.settings)} for figure in figures):
        for name in ("quantization", "model's name", "precision"):
            text = each.get(name, "-")
            if (form := format_in(text)) is not None or (name == "quantization" and text != "-"):
                forms[text] = form or ""
    forms = forms or ({"ollama, whose default it is": "q4_k_m"} if file.tool == "ollama" else {})
    known = {*forms.values()} - {""}
    has_bits = all(figure.weight_bytes for figure in figures)
    return sorted(forms), known.pop() if len(known) == 1 and not has_bits else ""


def _is_packed(figure: Figure) -> bool:
    return 0 < (figure.weight_bytes or 0.0) < DENSE_BYTES


def _stored(setup: _Setup, figures: Sequence[Figure]) -> str:
    """The precision of the weights, and of the matmuls with those that a file stores in other bits."""
    counted, dtype, packed_dtype, peaks = setup.counted, setup.dtype, setup.file.packed_dtype, setup.under.flops_per_s
    own = sorted({8 * figure.weight_bytes for figure in figures if figure.weight_bytes})
    if not own:
        packed = counted.published if setup.quant == "none" else setup.quant
        return f"in {f'{packed} and ' if packed else ''}{dtype}"
    matmuls = "float16" if dtype == "bfloat16" and dtype not in peaks else dtype
    if any(map(_is_packed, figures)) and peaks.get(packed_dtype, 0.0) > setup.under.peak(matmuls, matmuls):
        matmuls = packed_dtype
    bits, split = " to ".join(dict.fromkeys(significant(width) for width in (own[0], own[-1]))), ""
    if counted.work.of_kind(Experts):
        experts, rest = max(_widths(figure, counted) for figure in figures)
        split = f" ({significant(8 * experts)} in the experts, {significant(8 * rest, 2)} elsewhere)"
        if experts == rest:
            split = " (a mean: the weights that a token uses may be wider)"
    whose = "" if counted.published and setup.quant != "none" else "the file's own "
    return f"at {whose}{bits} bits per weight{split}, matmuls in {matmuls},"
