"""Resolve a request and check what depends on its model, before anything slow; the command that repeats it."""

from __future__ import annotations

import copy
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from profiler import effort
from profiler.counting.tensor_parallel import check_cut, check_ranks, replicated_kv_heads
from profiler.device.device import environment, resolve_device
from profiler.engines.registry import OWNING, check_engine, engines_of_caches, with_own_loop
from profiler.engines.vllm import check_vllm
from profiler.errors import RequestError, RunError
from profiler.grid.cells import DEFAULT_ENGINE, Grid, Phase
from profiler.grid.ragged import PADDED_ENGINE, RAGGED, too_few
from profiler.grid.ranges import TEST_PROMPTS, check_positions, default_grids, doubling_grids, make_grid, parse_values
from profiler.loading.config import load_config
from profiler.loading.meta_model import build_on_meta, plan, quiet_libraries
from profiler.loading.prompts import Prompts, load_tokenizer, read_prompts
from profiler.loading.request import DTYPES, ModelRequest, dtype_name, most_positions, resolve_dtype
from profiler.loading.source import ModelSource, check_weights, resolve, resolve_weights
from profiler.measure.answers import Draft, draft_of, text_ids
from profiler.options import flag_of, listed
from profiler.quant.registry import FORMATS, QuantOptions, check_quant, known_quant
from profiler.run.options import DEFAULT_MODEL, DEFAULT_NEW_TOKENS, Options
from profiler.store.document import LargerGrid, RunDocument
from profiler.store.folder import read_document, read_results

DEFAULT_BUDGET_S = 60.0
# Where only prompts or only batch sizes are named, these are the others.
_PROMPT_LENS, _BATCH_SIZES = "128,512", "1,2,4"


@dataclass(frozen=True)
class PreparedRun:
    """A checked request: what to load, what to time, where to write."""

    request: ModelRequest
    config: Any
    grid: Grid
    """The grid; until the model is loaded, the largest of the ladder."""
    prompts: Prompts
    options: Options
    """The options as given; those about the model or the grid are superseded by the fields above."""
    quality_ids: Sequence[int]
    """Tokens on which a quantised model is compared with the unquantised one; empty without that comparison."""
    draft: Draft | None
    """The drafts to try; None without any."""
    out: Path
    resumed: bool
    """Whether `out` holds an interrupted run that is to be finished."""
    command: str
    warnings: tuple[str, ...] = ()
    """Warnings about the request itself."""
    budget_s: float = DEFAULT_BUDGET_S
    """Seconds from the loaded model to the answer; at least this for a whole grid."""
    whole: bool = False
    """Whether every cell is measured, however long it takes: a grid that was named without a budget."""
    ladder: tuple[Grid, ...] = ()
    """Default grids from which one is chosen when the model is loaded; empty if the grid was named."""
    doubled: Phase | None = None
    """The phase whose batch a batch test doubles, from the smallest on."""
    larger: LargerGrid | None = None
    """The next larger grid of the ladder than the chosen one."""

    @property
    def smallest(self) -> Grid:
        """The grid, or the smallest that may be chosen."""
        return (self.ladder or (self.grid,))[-1]

    def on(self, grid: Grid) -> PreparedRun:
        """Return the run of this grid."""
        command = repeating(self.request, grid, self.options)
        prompts = replace(self.prompts, ragged=grid.ragged)
        return replace(self, grid=grid, prompts=prompts, command=command)


def prepare(options: Options, ladder: Sequence[Grid] = ()) -> PreparedRun:
    """Check a request before anything is loaded; `ladder` replaces the default grids. Raises RequestError."""
    options = with_defaults(options)
    request, config = resolve_request(options)
    prompts, grids = resolve_grids(options, request, config, ladder)
    grid = grids[0]
    check_fit(options, request, config, grid)
    checks_quality = options.check_quality and request.quant != "none" and request.weights == "checkpoint"
    return PreparedRun(
        request=request,
        config=config,
        grid=grid,
        prompts=replace(prompts, ragged=grid.ragged),
        options=options,
        quality_ids=text_ids(request, "--check-quality") if checks_quality else (),
        draft=draft_of(options.draft, request, config, grid.new_tokens) if options.draft else None,
        out=_default_folder(request) if options.out is None else Path(options.out),
        resumed=False,
        command=repeating(request, grid, options),
        budget_s=DEFAULT_BUDGET_S if options.budget_s is None else options.budget_s,
        whole=effort.STANDARD.whole_grid or options.budget_s is None,
        ladder=() if options.names_grid else tuple(grids),
    )


def prepare_batch_test(
    options: Options, phase: Phase, prompt_len: int | None = None, context_len: int | None = None
) -> PreparedRun:
    """Return a checked run that doubles the batch until memory, throughput or the budget ends it.

    Without a length of prompt or cache, the prompt is as long as three doublings leave time for. Raises RequestError.
    """
    prompt_lens = [] if context_len else [prompt_len] if prompt_len else TEST_PROMPTS
    grids = doubling_grids(prompt_lens, [context_len] if context_len else [], options.new_tokens)
    return replace(prepare(options, grids), doubled=phase)


def with_defaults(options: Options) -> Options:
    """Return the options with the defaults that depend on other options. A grid that is named has no budget."""
    if options.budget_s is None and not options.names_grid:
        options = replace(options, budget_s=DEFAULT_BUDGET_S)  # the command that repeats this run names its grid
    engines = with_own_loop(listed(options.engine)) or [DEFAULT_ENGINE]
    return replace(options, model=DEFAULT_MODEL if options.model is None else options.model, engine=",".join(engines))


def resolve_request(options: Options) -> tuple[ModelRequest, Any]:
    """Return the request for the model, and its config. Raises RequestError for a model or device that is not there."""
    source, device, quant = resolve(options.model or ""), resolve_device(options.device), known_quant(options.quant)
    config = load_config(source, options.trust_remote_code)
    request = ModelRequest(
        source=source,
        device=device,
        dtype=resolve_dtype(options.dtype, quant, device, config),
        quant=quant,
        quant_options=QuantOptions(options.double_quant, DTYPES.get(options.compute_dtype)),
        weights=resolve_weights(source, options.weights),
        attn=options.attn,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    return request, config


def resolve_grids(
    options: Options, request: ModelRequest, config: Any, ladder: Sequence[Grid]
) -> tuple[Prompts, list[Grid]]:
    """Return the prompts, and the named grid or those of the ladder that can run. Raises RequestError if none can."""
    engines = engines_of_caches(listed(options.engine), listed(options.cache), config)
    prompts = _prompts(options, request.source, config)
    if options.names_grid:
        grids = [_named_grid(options, prompts, engines)]
    else:
        ladder = ladder or default_grids(options.new_tokens)
        grids = [replace(grid, engines=tuple(dict.fromkeys(engines))) for grid in ladder]
    possible, refused, limit = list[Grid](), list[RequestError](), most_positions(config)
    for grid in grids:
        try:
            check_positions(limit, grid.longest_context, "a shorter --prompt-lens or fewer --new-tokens")
            for name in grid.engines:
                check_engine(name, grid, config, on_cuda=request.device.type == "cuda")
            possible.append(grid)
        except RequestError as error:
            refused.append(error)
    if not possible:
        raise refused[-1]
    return prompts, possible


def check_fit(options: Options, request: ModelRequest, config: Any, grid: Grid) -> None:
    """Check that the model's files, format, engines and ranks fit each other. Raises RequestError."""
    quant = request.quant
    check_quant(quant, request.dtype, request.device)
    if OWNING.keys() & set(grid.engines):
        check_vllm(request.device, quant, request.source.kind)
    if request.source.kind == "gguf" and quant != "none":
        raise RequestError(
            f"--quant {quant}: transformers dequantises a GGUF file and does not quantise it again;"
            " give the model as a hub id or a folder of safetensors."
        )
    if options.tp != 1:
        _check_ranks(options, request, config, grid)
    check_weights(request)
    if quant != "none":
        plan(request, copy.deepcopy(config))  # refuses a format that a layer of this model does not fit


def _named_grid(options: Options, prompts: Prompts, engines: Sequence[str]) -> Grid:
    new_tokens, lens, batches = options.new_tokens or DEFAULT_NEW_TOKENS, options.prompt_lens, options.batch_sizes
    if lens is None:
        lens = prompts.shape(new_tokens) if prompts.real else () if options.context_lens else _PROMPT_LENS
    if not batches:
        most = len(prompts.real) if prompts.real else math.inf
        batches = [size for size in parse_values(_BATCH_SIZES, "--batch-sizes") if size <= most]
    grid = make_grid(lens, batches, new_tokens, options.context_lens, engines)
    if prompts.real and grid.batch_sizes[-1] > len(prompts.real):
        raise RequestError(too_few(prompts.name, len(prompts.real), grid.batch_sizes[-1]))
    return grid


def _prompts(options: Options, source: ModelSource, config: Any) -> Prompts:
    """The prompts of the given file, or random ones. Raises RequestError for a file or tokenizer that gives none."""
    vocab_size, limit = int(config.get_text_config().vocab_size), most_positions(config)
    if not options.prompts:
        return Prompts(vocab_size)
    tokenizer = load_tokenizer(source, "--prompts", trust_remote_code=options.trust_remote_code)
    new_tokens = options.new_tokens or DEFAULT_NEW_TOKENS
    most_tokens = math.inf if limit is None or options.prompt_lens else limit - new_tokens
    return read_prompts(Path(options.prompts), tokenizer, vocab_size, most_tokens)


def _check_ranks(options: Options, request: ModelRequest, config: object, grid: Grid) -> None:
    tp = options.tp
    check_cut(tp, request.source, request.quant)
    with quiet_libraries():
        meta_model = build_on_meta(copy.deepcopy(config), DTYPES["bfloat16"])
    check_ranks(meta_model, tp)
    if kv := replicated_kv_heads(meta_model, tp):
        raise RequestError(
            f"--tp {tp}: transformers cuts the {kv} KV heads of this model into pieces over {tp} ranks, and fails; use"
            f" {kv} or fewer (`roofscope count --tp {tp}` counts them as copied)."
        )
    if grid.engines != (DEFAULT_ENGINE,):
        raise RequestError(f"--tp {tp} works only with --engine {DEFAULT_ENGINE}, not {','.join(grid.engines)}.")
    if options.breakdown or options.trace or options.draft:
        raise RequestError(f"--tp {tp}: --breakdown, --trace and --draft work on one device only; leave them out.")


def prepare_resume(folder: Path, options: Options) -> PreparedRun:
    """Return the request that finishes a run: one that was interrupted, or in which a cell or a part failed.

    From `options` it takes only what a run folder does not hold: a local model path, the device, the budget, and what
    is trusted. Raises RunError if the run is finished or cannot be read, and RequestError as `prepare` does.
    """
    document = read_document(folder)
    is_whole = not document.missing and not document.grid.unreached
    if document.finished and is_whole and all(row.status == "ok" for row in read_results(folder)):
        raise RunError(f"{folder} is finished: nothing is left to resume; `roofscope report` writes its pages again.")
    prepared = prepare(recorded_options(folder, document, replace(options, out=folder)))
    if prepared.prompts.digest != document.grid.prompts_digest:
        raise RunError(f"{folder} ran other prompts than {prepared.prompts.name} has now; start a new run with them.")
    return replace(prepared, resumed=True)


def recorded_options(folder: Path, document: RunDocument, options: Options) -> Options:
    """Return `options` with all that run.json records. Raises RunError for what neither of the two holds."""
    facts, grid, model = document.model, document.grid, options.model
    if model is None:
        if facts.kind in ("folder", "gguf"):
            raise RunError(f"{folder} profiled a local {facts.kind}; give its path again.")
        model = facts.id
    elif (name := resolve(model).name) != facts.id:
        raise RunError(f"this run cannot be resumed with {name}: it profiled {facts.id}.")
    if grid.prefix:
        raise RunError(f"{folder} ran prompts with a cached prefix, which `run` no longer measures; start a new run.")
    if grid.prompts and not options.prompts:
        raise RunError(f"{folder} ran the prompts of {grid.prompts} and does not hold them; give --prompts again.")
    return replace(
        options,
        model=model,
        prompts=options.prompts if grid.prompts else None,
        prompt_lens=grid.ragged or grid.prompt_lens,
        batch_sizes=grid.batch_sizes,
        context_lens=grid.context_lens,
        new_tokens=grid.new_tokens,
        dtype=facts.dtype,
        quant=facts.quant,
        double_quant=facts.double_quant,
        compute_dtype=facts.compute_dtype if FORMATS[known_quant(facts.quant)].has_options else "auto",
        weights=facts.weights,
        engine=",".join(name for name in document.engine.names if name != PADDED_ENGINE),
        attn=facts.attention,
        tp=document.ranks,
        fresh=False,
    )


def repeating(request: ModelRequest, grid: Grid, options: Options) -> str:
    """Return the command that repeats this run; a local model is given by its name without the folder.

    Resolved values replace options such as `auto`; the other options are written as given.
    """
    source = request.source
    name = source.path.name if source.path is not None else source.name
    file = Path(options.prompts).name if options.prompts else ""
    lens = f"{RAGGED}{grid.ragged.name}" if grid.ragged else ",".join(map(str, grid.prompt_lens))
    compute_dtype = request.quant_options.compute_dtype
    resolved = {
        "--context-lens": ",".join(map(str, grid.context_lens)),
        "--prompts": shlex.quote(file) if file else "",
        "--prompt-lens": "" if grid.ragged and grid.ragged.name == file else lens,
        "--batch-sizes": ",".join(map(str, grid.batch_sizes)),
        "--new-tokens": grid.new_tokens,
        "--dtype": dtype_name(request.dtype),
        "--quant": request.quant,
        "--weights": request.weights,
        "--engine": ",".join(name for name in grid.engines if name != PADDED_ENGINE),
        "--device": options.device if ":" in options.device else request.device.type,
        "--double-quant": request.quant_options.double,
        "--compute-dtype": "" if compute_dtype is None else dtype_name(compute_dtype),
        "--attn": request.attn,
    }
    settings = [f"{setting}={value}" for setting, value in environment().items()]
    parts = [*(["env", *settings] if settings else []), f"roofscope run {shlex.quote(name)}"]
    parts += [flag if value is True else f"{flag} {value}" for flag, value in resolved.items() if value]
    for item in fields(Options):
        given = getattr(options, item.name)
        # The engine names the cache, and the folder differs the next time.
        is_resolved = flag_of(item) in resolved or item.name in ("model", "cache", "out")
        if not is_resolved and given != item.default:
            value = f"{given:g}" if isinstance(given, float) else given
            if item.name == "draft" and Path(value).exists():
                value = shlex.quote(Path(value).name)  # without the folder, like the model
            parts.append(flag_of(item) if given is True else f"{flag_of(item)} {value}")
    return " ".join(parts)


def _default_folder(request: ModelRequest) -> Path:
    name = request.source.name.replace("/", "--")
    quant = "" if request.quant == "none" else f"-{request.quant}"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{dtype_name(request.dtype)}{quant}"
    folder = Path("runs") / stem
    return folder if not folder.exists() else folder.with_name(f"{stem}-{math.floor(time.time() * 1000) % 1000:03d}")
