"""A loaded model on a machine: its execution paths, the work of each cell, its peak memory."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import nn

from profiler.counting.attention import AttentionCore
from profiler.counting.chosen_kernel import SdpaStep, attention_path, outlier_columns
from profiler.counting.memory_need import MemoryNeed, memory_need
from profiler.counting.operators import Experts, Linear, ModelWork, as_value, padded_work
from profiler.counting.walk import linear_modules
from profiler.data.free_memory import room_bytes
from profiler.device.machine import Machine, machine_for
from profiler.engines.base import DecodeState, Engine
from profiler.engines.transformers import EagerEngine
from profiler.facts.operators import OperatorWork
from profiler.facts.run_facts import ModelFacts
from profiler.facts.step import ExecutionPath, Step
from profiler.grid.cells import PHASES, Cell, CellKey, Grid, Phase
from profiler.loading.prompts import Prompts
from profiler.loading.request import LoadedModel, ModelRequest, dtype_name
from profiler.quant.bitsandbytes import four_bit_fuses_on_cpu, four_bit_rows
from profiler.quant.registry import FORMATS
from profiler.quant.storage import model_storage_bytes, stored


@dataclass(frozen=True)
class Subject:
    """A loaded model on a machine, with the engines that step it."""

    machine: Machine
    loaded: LoadedModel
    work: ModelWork
    engines: Mapping[str, Engine]
    paths: Mapping[tuple[str, Phase], ExecutionPath]
    """How each engine executes each phase; `path_of` adds what depends on the cell."""
    grid: Grid
    prompts: Prompts
    held_bytes: int = 0
    """Device memory of the model and its engines before the first measurement."""

    @property
    def request(self) -> ModelRequest:
        return self.loaded.request

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the weights as loaded."""
        return model_storage_bytes(self.loaded.module)

    @property
    def experts(self) -> str | None:
        """transformers' implementation of the experts; None without experts, whatever the config says."""
        if not any(isinstance(operator, Experts) for operator in self.work.operators):
            return None
        return getattr(self.loaded.config.get_text_config(), "_experts_implementation", None)

    def path_of(self, key: CellKey) -> ExecutionPath:
        """Return how a cell's step is executed, with a static cache's slots and a quantised one's newest tokens."""
        path = self.paths[key.cell.engine, key.phase]
        if path.cache_format is not None and key.phase == "decode":
            return replace(path, residual_tokens=path.cache_format.residual(key.context_len - key.cell.depth))
        return replace(path, static_cache_len=key.cell.slots) if path.cache == "static" else path

    def start(self, cell: Cell) -> Callable[[], DecodeState]:
        """Prepare the engine of a cell, and return what fills its cache: a prefill, or `fill` without a prompt."""
        engine = self.engines[cell.engine]
        engine.announce(cell, 0)
        engine.prepare(cell.batch_size, cell.slots)
        if cell.prompt_len:
            return partial(engine.prefill, self.prompts.of(cell).to(self.machine.device), cell.slots)
        return partial(engine.fill, cell.batch_size, cell.context_len, cell.slots)

    def operators_of(self, key: CellKey) -> tuple[OperatorWork, ...]:
        step, path, batch = Step.of(key), self.path_of(key), self.grid.requests_of(key.cell)
        works = []
        for operator, name in self.work.names.items():
            work = padded_work(operator, key, batch, path) if batch else operator.work(step, path)
            works.append(as_value(operator, name, work, step))
        if self.engines[key.cell.engine].owned:  # then only the work that the algorithm needs is known
            works = [replace(work, activation_bytes=0, redundant_flops={}, redundant_bytes={}) for work in works]
        return tuple(works)

    def need(self, cell: Cell) -> MemoryNeed:
        """Return the memory that a cell needs, weights included."""
        prefill = Step(cell.batch_size, cell.prefilled, 0)
        path, new_tokens = self.paths[cell.engine, "prefill"], cell.slots - cell.prefilled
        return memory_need(self.work, self.model_bytes, prefill, new_tokens, path)

    def lack_of_memory(self, cell: Cell, *, safely: bool = False) -> str | None:
        """Return why a cell cannot fit into memory, or None. The weights are already loaded.

        Ranks that share a CPU's memory all need it at once. Whether free memory is in pieces is not known before a GPU
        tries it; a driver that spills must not be tried. With `safely`, the cell fits in whatever pieces memory is.
        """
        need, ranks = self.need(cell), 1 + len(self.engines[cell.engine].helper_pids)
        needed_bytes = ranks * (need.peak_bytes - self.model_bytes)
        loaded_bytes = self.model_bytes - sum(self.loaded.offloaded_bytes.values())
        free_bytes = room_bytes(self.machine.device.type, self.machine.available_bytes() + loaded_bytes) - loaded_bytes
        if safely or self.machine.may_spill:
            free_bytes -= ranks * int(need.fragmentation_bytes)
        if needed_bytes <= free_bytes:
            return None
        return f"needs {needed_bytes / 1e9:.1f} GB besides the weights, and {max(0, free_bytes) / 1e9:.1f} GB is left"

    def fitting(self, batch_sizes: Iterable[int]) -> list[int]:
        """Return the batch sizes at which a cell of the grid fits into memory."""
        fits = {cell.batch_size for cell in self.grid.cells if self.lack_of_memory(cell) is None}
        return [size for size in batch_sizes if size in fits]

    def model_facts(self) -> ModelFacts:
        """Return the model's entry in run.json."""
        loaded, request = self.loaded, self.request
        linears = [op for op in self.work.of_kind(Linear) if op.rows != "last"]
        owned = [(op.count - op.repeats, op.weight) for op in linears]
        cores = self.work.of_kind(AttentionCore)
        return ModelFacts(
            id=request.source.name,
            kind=request.source.kind,
            revision=loaded.revision,
            architecture=type(loaded.module).__name__,
            params=self.work.params,
            dtype=dtype_name(request.dtype),
            quant=request.quant,
            double_quant=request.quant_options.double,
            compute_dtype=dtype_name(request.quant_options.compute_dtype or request.dtype),
            weights=request.weights,
            storage_bytes=self.model_bytes,
            load_s=loaded.load_s if math.isfinite(loaded.load_s) else 0.0,  # JSON has no NaN
            first_call_s=loaded.first_call_s,
            unpacked_from=loaded.unpacked_from,
            attention=self.paths[self.grid.engines[0], "prefill"].attention,
            offloaded_bytes=dict(loaded.offloaded_bytes),
            placement=dict(loaded.placement.device_map) if loaded.placement else None,
            linear_weights=sum(count * weight.in_features * weight.out_features for count, weight in owned),
            linear_bytes=sum(count * weight.weight_bytes for count, weight in owned),
            cache_itemsize=cores[0].itemsize if cores else 2,
            four_bit_dense_from_rows=self._four_bit_dense_from_rows(linears),
            linears=_kinds_of_linears(loaded.module),
            experts=self.experts,
        )

    def _four_bit_dense_from_rows(self, linears: Sequence[Linear]) -> int | None:
        """Rows from which all of bitsandbytes' 4-bit kernels would write a dense copy; None if never, or not known."""
        request = self.request
        if not self.machine.is_cuda and four_bit_fuses_on_cpu():
            return None
        half_dtype = getattr(torch, self.machine.info.sixteen_bit_dtype)
        compute_dtype = request.dtype if request.dtype.itemsize == 2 else half_dtype
        shapes = {
            (weight.in_features, weight.out_features)
            for weight in (op.weight for op in linears)
            if FORMATS.get(weight.format, FORMATS["none"]).has_options or weight.bits_per_weight >= 16
        }
        found = [four_bit_rows(request.device, compute_dtype, *shape) for shape in shapes]
        return max((rows.always_from for rows in found if rows is not None), default=None)


def _kinds_of_linears(model: nn.Module) -> dict[str, int]:
    """Number of linears of each class and format, with what their kernel does first."""
    counts = Counter[str]()
    for module in (module for modules in linear_modules(model).values() for module in modules):
        weight = stored(module)
        words = [type(module).__name__, weight.format]
        if weight.dense_from_rows == 1 and not weight.fused_rows:
            words.append(f"a dense {dtype_name(weight.compute_dtype)} copy is written first (a fallback)")
        elif weight.dense_from_rows is not None:
            fused = "".join(f", but not for {first} to {last}" for first, last in weight.fused_rows)
            words.append(f"a dense copy is written first from {weight.dense_from_rows} rows on{fused}")
        counts[", ".join(words)] += 1
    return dict(counts)


def execution_paths(
    loaded: LoadedModel, work: ModelWork, engines: Mapping[str, Engine], grid: Grid, prompts: Prompts
) -> dict[tuple[str, Phase], ExecutionPath]:
    """Return how this model runs on this device: its attention interface, the kernels that torch picks, outliers."""
    request = loaded.request
    attention = getattr(loaded.config.get_text_config(), "_attn_implementation", None) or "sdpa"
    experts = getattr(loaded.config.get_text_config(), "_experts_implementation", None)
    cores = work.of_kind(AttentionCore)
    longest = max((*grid.prompt_lens, *grid.context_lens))
    shapes: dict[Phase, tuple[int, int]] = {"prefill": (longest, longest), "decode": (1, longest + 1)}

    @cache
    def path_of_phase(phase: Phase, compiled: bool) -> ExecutionPath:
        return attention_path(attention, cores, SdpaStep(request.device, request.dtype, *shapes[phase], compiled))

    outliers: dict[Phase, dict[str, float]] = {}
    if request.quant == "int8":
        # The columns that LLM.int8() finds in the shortest prompt and in the step after it, whatever the engine.
        cell = Cell(1, min((*grid.prompt_lens, *grid.context_lens)), grid.new_tokens)
        eager = EagerEngine(loaded.module, machine_for(request.device))
        with torch.inference_mode():
            state = eager.prefill(prompts.of(cell).to(request.device), cell.slots)
            outliers["prefill"] = outlier_columns(loaded.module)
            eager.decode(state)
            outliers["decode"] = outlier_columns(loaded.module)
    return {
        (name, phase): replace(
            path_of_phase(phase, phase not in engine.eager_phases),
            cache=engine.cache,
            cache_format=engine.cache_format,
            masks=engine.pads,
            all_logits=not engine.keeps_last_logits,
            gathers_experts=engine.calls_generate and experts == "grouped_mm" and request.device.type != "cpu",
            outlier_columns=outliers.get(phase, {}),
        )
        for name, engine in engines.items()
        for phase in PHASES
    }
