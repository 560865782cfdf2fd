"""The engines of a run, made for its grid: those that step the loaded model, and those that load it themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from profiler.engines.base import Engine
from profiler.engines.padded import PaddedEngine
from profiler.engines.registry import ENGINES, OWNING
from profiler.engines.vllm import Wanted
from profiler.grid import Grid
from profiler.grid.ragged import PADDED_ENGINE
from profiler.job.request import Prepared
from profiler.loading.config import pretrained_location
from profiler.loading.request import LoadedModel, dtype_name
from profiler.machine.machine import Machine
from profiler.work.attention import AttentionCore
from profiler.work.formats import model_storage_bytes
from profiler.work.operators import ModelWork

# A sequence takes whole blocks of a paged cache, each of at most so many tokens (in vLLM 128 on a CPU, 16 on CUDA).
_BLOCK = 256
# A few blocks more than the grid needs, and no more of the device than this share of what is free.
_CACHE_MARGIN = 1.1
_CACHE_SHARE = 0.8
# Tokens by which some sequences are ahead where a prefill goes in chunks.
_AHEAD = 16


def make_engines(prepared: Prepared, loaded: LoadedModel, work: ModelWork, machine: Machine) -> dict[str, Engine]:
    """By name, in the order of the grid. Raises RequestError for a model that an engine does not take."""
    names = prepared.grid.engines
    made: dict[str, Engine] = {name: ENGINES[name](loaded.module, machine) for name in names if name in ENGINES}
    if PADDED_ENGINE in made:
        made[PADDED_ENGINE] = PaddedEngine(loaded.module, machine, prepared.grid.requests_of)
    for name in (name for name in names if name in OWNING):
        made[name] = OWNING[name](_wanted(prepared, loaded, work, machine), machine)
    return {name: made[name] for name in names}


def beside(engines: Mapping[str, Engine], own_bytes: int, model_bytes: int) -> dict[str, int]:
    """Bytes held beside what each engine needs: the profiler's own, other engines' models and caches, and the loaded
    model itself where an engine has its own."""
    held = {name: item.owned.weight_bytes + item.owned.cache_bytes for name, item in engines.items() if item.owned}
    return {
        name: own_bytes
        + sum(nbytes for other, nbytes in held.items() if other != name)
        + (model_bytes if engine.owns_model else 0)
        for name, engine in engines.items()
    }


def _wanted(prepared: Prepared, loaded: LoadedModel, work: ModelWork, machine: Machine) -> Wanted:
    request, grid = prepared.request, prepared.grid
    limit = getattr(prepared.config.get_text_config(), "max_position_embeddings", None)
    longest = grid.longest_context + _AHEAD
    return Wanted(
        config=copy.deepcopy(prepared.config),
        architecture=type(loaded.module).__name__,
        checkpoint=str(pretrained_location(request.source)[0]) if request.weights == "checkpoint" else None,
        dtype=dtype_name(request.dtype),
        most_sequences=max(grid.batch_sizes),
        longest_context=longest if limit is None else min(longest, limit),
        weight_bytes=model_storage_bytes(loaded.module),
        cache_bytes=min(_cache_bytes(work, grid), int(_CACHE_SHARE * machine.available_bytes())),
        trust_remote_code=request.trust_remote_code,
    )


def _cache_bytes(work: ModelWork, grid: Grid) -> int:
    """Bytes of a paged cache that holds any cell of the grid, with blocks of up to `_BLOCK` tokens."""
    cores = [operator for operator in work.operators if isinstance(operator, AttentionCore)]
    a_token = sum(core.count * core.cached_elements * core.itemsize for core in cores)
    blocks = max(cell.batch_size * -(-(cell.slots + _AHEAD) // _BLOCK) for cell in grid.cells)
    return int(_CACHE_MARGIN * (blocks + 1) * _BLOCK * a_token)
