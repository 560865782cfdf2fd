"""Validate what a user asks for before anything slow, and write the command that repeats it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

from profiler import effort
from profiler.counting.count import check_cut
from profiler.counting.tensor_parallel import check_ranks, replicated_kv_heads
from profiler.device.device import resolve_device
from profiler.device.process_group import cards
from profiler.effort import Effort
from profiler.engines.registry import OWNING, check_engine, with_own_loop
from profiler.engines.vllm import check_vllm
from profiler.errors import RequestError, RunError
from profiler.facts.step import Attention
from profiler.grid.cells import DEFAULT_ENGINE, Grid
from profiler.grid.ragged import PADDED_ENGINE, RAGGED
from profiler.grid.ranges import check_positions, make_grid
from profiler.loading.checkpoint import check_weights, resolve_weights
from profiler.loading.config import architecture_of, load_config
from profiler.loading.meta_model import build_on_meta, plan, quiet_libraries
from profiler.loading.request import DTYPES, ModelRequest, dtype_name, most_positions, resolve_dtype
from profiler.loading.source import ModelSource, resolve
from profiler.measure.quality import text_ids
from profiler.quant.formats import QuantOptions, check_quant
from profiler.quant.registry import FORMATS, Quant, known_quant
from profiler.run.options import DEFAULT_MODEL, Options, flag_of
from profiler.store.document import RunDocument
from profiler.store.folder import read_document, read_results

DEFAULT_BUDGET_S = 60.0


@dataclass(frozen=True)
class Prepared:
    """A request that has been checked, before anything slow: what to load, what to visit, where to write."""

    request: ModelRequest
    config: Any
    grid: Grid
    options: Options
    """What was asked for, for all that decides nothing about the model or the grid."""
    quality_ids: Sequence[int]
    """Tokens over which a quantised model is held against the unquantised one; empty: it is not."""
    out: Path
    resumed: bool
    """Whether `out` holds an interrupted run that is to be finished."""
    command: str
    warnings: tuple[str, ...] = ()
    """What is to be told of the request itself."""
    effort: Effort = field(default_factory=lambda: effort.STANDARD)
    """How long and how often each part is measured."""
    budget_s: float = DEFAULT_BUDGET_S
    """Seconds from the start of the run to its answer, without loading; a whole grid's run takes at least so many."""
    whole: bool = False
    """Whether every cell is measured, however long it takes: a grid that was named without a budget."""


_PROMPT_LENS, _BATCH_SIZES = "64,128,256,512", "1,2,4,8"
# A difference is claimed of cells that both sides visited twice: a few of them, then, instead of all of them once.
_COMPARED_PROMPT_LENS, _COMPARED_BATCH_SIZES = "64,512", "1,8"


def prepare(options: Options, compared: bool = False) -> Prepared:
    """Check a request; raises RequestError with one line before anything is loaded or written.

    A grid that was not named is the default one, or where runs are to be `compared`, or engines, its corners.
    """
    quant = options.quant
    engines = with_own_loop([name.strip() for name in options.engine.split(",") if name.strip()]) or [DEFAULT_ENGINE]
    compared = compared or len(engines) > 1
    prompts, batches = options.prompt_lens, options.batch_sizes
    if prompts is None and not options.context_lens:
        prompts = _COMPARED_PROMPT_LENS if compared else _PROMPT_LENS
    if batches is None:
        batches = _COMPARED_BATCH_SIZES if compared else _BATCH_SIZES
    grid_named = bool(options.prompt_lens or options.batch_sizes or options.context_lens)
    if options.budget_s is None and not grid_named:
        options = replace(options, budget_s=DEFAULT_BUDGET_S)  # the command that repeats this run names its grid
    grid = make_grid(prompts or (), batches, options.new_tokens, options.context_lens, engines)
    model = DEFAULT_MODEL if options.model is None else options.model
    known_quant(quant)
    if options.attn is not None and options.attn not in get_args(Attention):
        raise RequestError(f"--attn {options.attn!r} is unknown; use {', '.join(get_args(Attention))}.")
    if options.budget_s is not None and not 0 < options.budget_s < math.inf:
        raise RequestError(f"--budget {options.budget_s:g} is not possible; give seconds above 0.")
    if options.compute_dtype != "auto" and options.compute_dtype not in DTYPES:
        raise RequestError(f"--compute-dtype {options.compute_dtype!r} is unknown; use auto, {', '.join(DTYPES)}.")
    source = resolve(model)
    where = resolve_device(options.device)
    config = load_config(source, options.trust_remote_code)
    dtype = resolve_dtype(options.dtype, quant, where, config)
    quant_options = QuantOptions(options.double_quant, DTYPES.get(options.compute_dtype))
    check_quant(quant, quant_options, dtype, where)
    if OWNING.keys() & set(engines):
        check_vllm(
            device=where,
            quant=quant,
            kind=source.kind,
            deepened=bool(grid.context_lens),
            architecture=architecture_of(config),
            cold=options.cold,
        )
    if source.kind == "gguf" and quant != "none":
        raise RequestError(
            f"--quant {quant}: transformers dequantises a GGUF file and does not quantise it again;"
            " give the model as a hub id or a folder of safetensors."
        )
    if options.tp != 1:
        _check_ranks(options, source, config, quant, where, grid)
    check_positions(most_positions(config), grid.longest_context, "a shorter --prompt-lens or fewer --new-tokens")
    for name in grid.engines:
        check_engine(
            name,
            on_cuda=where.type == "cuda",
            config=config,
            longest_context=grid.longest_context,
            deepened=bool(grid.context_lens),
            ragged=grid.ragged is not None,
        )
    request = ModelRequest(
        source=source,
        device=where,
        dtype=dtype,
        quant=quant,
        quant_options=quant_options,
        weights=resolve_weights(source, options.weights),
        attn=options.attn,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    check_weights(request)
    if quant != "none":
        plan(request, copy.deepcopy(config))  # refuses a format that a layer of this model does not fit
    checked = options.check_quality and quant != "none" and request.weights == "checkpoint"
    return Prepared(
        request=request,
        config=config,
        grid=grid,
        options=options,
        quality_ids=text_ids(request) if checked else (),
        out=Path(options.out) if options.out is not None else _default_folder(request),
        resumed=False,
        command=repeating(request, grid, options),
        budget_s=DEFAULT_BUDGET_S if options.budget_s is None else options.budget_s,
        whole=effort.STANDARD.whole_grid or (options.budget_s is None and grid_named),
    )


def _check_ranks(
    options: Options, source: ModelSource, config: object, quant: Quant, where: torch.device, grid: Grid
) -> None:
    """Refuse what several ranks cannot do, before anything is loaded. Raises RequestError."""
    tp = options.tp
    check_cut(tp, source, quant)
    with quiet_libraries():
        skeleton = build_on_meta(copy.deepcopy(config), DTYPES["bfloat16"])
    check_ranks(skeleton, tp)
    if kv := replicated_kv_heads(skeleton, tp):
        raise RequestError(
            f"--tp {tp}: transformers cuts the {kv} KV heads of this model into pieces over {tp} ranks, and fails; use"
            f" {kv} or fewer (`roofscope count --tp {tp}` counts them as copied)."
        )
    if where.type == "cuda" and tp > cards():
        raise RequestError(f"--tp {tp}: this machine has {cards()} cards; use as many or fewer, or --device cpu.")
    if grid.engines != (DEFAULT_ENGINE,):
        raise RequestError(f"--tp {tp} steps with --engine {DEFAULT_ENGINE} alone, not {','.join(grid.engines)}.")
    if options.breakdown or options.trace or options.cold:
        raise RequestError(f"--tp {tp}: --breakdown, --trace and --cold look at one device; leave them out.")


_DONE = ("ok", "skipped")


def prepare_resume(folder: Path, options: Options) -> Prepared:
    """The request of a run that was interrupted, or in which a cell or a part failed, to finish it.

    Its model is needed again where it was a local path.

    Of `options` only what a run folder does not hold is taken: a local path, the device, the budget, what is trusted.
    Raises RunError when the run is finished or cannot be read, and whatever `prepare` raises.
    """
    document = read_document(folder)
    if document.finished and not document.missing and all(row.status in _DONE for row in read_results(folder)):
        raise RunError(f"{folder} is finished: nothing is left to resume; `roofscope judge` writes its reports again.")
    return replace(prepare(replace(_asked_again(folder, document, options), out=folder)), resumed=True)


def prepare_rerun(folder: Path, options: Options) -> Prepared:
    """The request of a run, to measure the same grid anew into a folder of its own; `options` as in `prepare_resume`.

    Raises RunError for a folder that cannot be read, and whatever `prepare` raises.
    """
    return prepare(_asked_again(folder, read_document(folder), options))


def _asked_again(folder: Path, document: RunDocument, options: Options) -> Options:
    """What a run was asked for, its model from the options where that is a local path."""
    known, grid, model = document.model, document.grid, options.model
    if model is None:
        if known.kind in ("folder", "gguf"):
            raise RunError(f"{folder} profiled a local {known.kind}; give its path again.")
        model = known.id
    elif (name := resolve(model).name) != known.id:
        raise RunError(f"this run cannot be resumed with {name}: it is one of {known.id}.")
    return replace(
        options,
        model=model,
        prompt_lens=grid.ragged or grid.prompt_lens,
        batch_sizes=grid.batch_sizes,
        context_lens=grid.context_lens,
        new_tokens=grid.new_tokens,
        dtype=known.dtype,
        quant=known.quant,
        double_quant=known.double_quant,
        compute_dtype=known.compute_dtype if FORMATS[known.quant].has_options else "auto",
        weights=known.weights,
        engine=",".join(name for name in document.engine.names if name != PADDED_ENGINE),
        attn=known.attention,
        tp=document.ranks,
        fresh=False,
    )


_TOLD_OTHERWISE = (
    "model", "prompt_lens", "context_lens", "batch_sizes", "new_tokens", "dtype", "quant", "double_quant",
    "compute_dtype", "weights", "engine", "attn", "device", "out",
)  # fmt: skip
"""Options that the command tells as what came of them; `out` is another folder the next time."""


def repeating(request: ModelRequest, grid: Grid, options: Options) -> str:
    """The command that repeats this run; a local path is given by its own name alone.

    What came of an option is told where it is known, the others as they were asked for.
    """
    source = request.source
    name = source.path.name if source.path is not None else source.name
    parts = [
        f"roofscope run {name}",
        f"--batch-sizes {','.join(map(str, grid.batch_sizes))}",
        f"--new-tokens {grid.new_tokens}",
        f"--dtype {dtype_name(request.dtype)}",
        f"--quant {request.quant}",
        f"--weights {request.weights}",
        f"--engine {','.join(name for name in grid.engines if name != PADDED_ENGINE)}",
        f"--device {options.device if ':' in options.device else request.device.type}",
    ]
    prompts = f"{RAGGED}{grid.ragged.name}" if grid.ragged else ",".join(map(str, grid.prompt_lens))
    for option, lens in (("--prompt-lens", prompts), ("--context-lens", ",".join(map(str, grid.context_lens)))):
        if lens:
            parts.insert(1, f"{option} {lens}")
    if request.quant_options.double:
        parts.append("--double-quant")
    if request.quant_options.compute_dtype is not None:
        parts.append(f"--compute-dtype {dtype_name(request.quant_options.compute_dtype)}")
    if request.attn:
        parts.append(f"--attn {request.attn}")
    for item in fields(Options):
        asked = getattr(options, item.name)
        if item.name not in _TOLD_OTHERWISE and asked != item.default:
            value = f"{asked:g}" if isinstance(asked, float) else asked
            parts.append(flag_of(item) if asked is True else f"{flag_of(item)} {value}")
    return " ".join(parts)


def _default_folder(request: ModelRequest) -> Path:
    name = request.source.name.replace("/", "--")
    quant = "" if request.quant == "none" else f"-{request.quant}"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{dtype_name(request.dtype)}{quant}"
    folder = Path("runs") / stem
    return folder if not folder.exists() else folder.with_name(f"{stem}-{math.floor(time.time() * 1000) % 1000:03d}")
