"""The arguments of calls that are kept for trials, and how much memory they may take."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from profiler.device.memory import available_bytes, total_bytes
from profiler.units import scaled

# At most so many calls are kept, of so many bytes, and of this share of the memory that was free at the first one.
_MOST_CALLS = 256
_MOST_BYTES = 64 << 20
_MOST_SHARE = 0.02
# The caches of a repeated call take at most this share of it.
_STATE_SHARE = 0.1
# With less than this share of the host's memory free, recording stops. Each 64th call looks.
_SHORT_SHARE = 0.02
_LOOK_EVERY = 64
# An object's tensors are looked for so deep, and among so many items of each list.
_DEEPEST, _MOST_ITEMS = 3, 64

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class KeptArguments:
    """The arguments that were kept so far, sized by their distinct storages."""

    calls: int = 0
    storages: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage."""
    _free: dict[str, float] = field(default_factory=dict)
    """Bytes that were free at the first call, by device."""
    _looks: int = 0
    _short: str = ""
    """What a look found if little memory was free: from then on no call is recorded."""

    def keep(self, args: tuple[Any, ...], named: Mapping[str, Any], device: Any) -> Arguments | None:
        """The arguments without their graph, to be kept; None if memory is short, or one is a cache that calls share.

        A view of a larger storage is copied, so that the rest of it can be freed. Token ids and masks are, too, since
        the script may fill their buffer with those of its next call.
        """
        import torch
        from torch.utils._pytree import tree_leaves, tree_map

        if self.calls >= _MOST_CALLS or any(name.endswith("cache") and vars_of(each) for name, each in named.items()):
            return None
        if (free_bytes := self._free.get(str(device))) is None:
            free_bytes = self._free[str(device)] = available_bytes(device)
        shapes = [value for value in tree_leaves((args, named)) if getattr(value, "is_meta", False)]
        if sum(value.nbytes for value in shapes) > _STATE_SHARE * free_bytes:
            return None
        left_bytes, storages = min(_MOST_BYTES, _MOST_SHARE * free_bytes), dict(self.storages)

        def add(nbytes: int, storage: int = 0) -> None:
            if sum(storages.values()) - storages.get(storage, 0) + nbytes > left_bytes:
                raise MemoryError
            if storage:
                storages[storage] = nbytes

        def kept(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.is_meta:
                return value
            if is_tensor and (not value.is_floating_point() or value.nbytes < value.untyped_storage().nbytes()):
                add(value.nbytes)
                value = value.clone()
            for tensor in _own_tensors(value):
                add(tensor.untyped_storage().nbytes(), tensor.untyped_storage()._cdata)
            return value.detach() if is_tensor else value

        try:
            found: Arguments = tree_map(kept, (args, dict(named)))
        except MemoryError:
            return None
        self.storages, self.calls = storages, self.calls + 1
        return found

    def look_at_memory(self) -> None:
        """Raises MemoryError if little of the host's memory is free, or was at an earlier look."""
        import torch

        self._looks += 1
        if not self._short and self._looks % _LOOK_EVERY == 1:
            host = torch.device("cpu")
            free, total = available_bytes(host), total_bytes(host)
            if free < _SHORT_SHARE * total:
                self._short = f"recording stopped when {scaled(free, 'B')} of {scaled(total, 'B')} of memory were left"
        if self._short:
            raise MemoryError(self._short)


def _own_tensors(value: Any, deepest: int = _DEEPEST) -> Iterator[Any]:
    """The tensors of an object that is no module: those of its attributes, also in lists and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif deepest:
        items = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else vars_of(value)
        )
        for item in itertools.islice(items, _MOST_ITEMS):
            yield from _own_tensors(item, deepest - 1)


def vars_of(value: Any) -> list[Any]:
    """The attributes of an object that is no module, class or function, all of which can be called."""
    return [] if callable(value) else list(getattr(value, "__dict__", {}).values())
