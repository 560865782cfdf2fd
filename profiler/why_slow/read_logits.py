"""Which positions of a forward's logits a script reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# More reads of one forward's logits are not noted.
_MOST_READS = 4096
# A copy of more values is taken as a read of all that they were copied from.
_MOST_COPIED = 1 << 22
_OF_VALUES = {
    "softmax", "log_softmax", "float", "half", "bfloat16", "double", "to", "type", "cpu", "cuda", "clone", "detach",
    "contiguous", "div", "__truediv__", "mul", "__mul__", "sigmoid", "exp", "argmax",
}  # fmt: skip
"""Operations whose result at a position depends on that position only, if `dim` is not that of positions."""
_OVER_A_DIM = {"softmax", "log_softmax", "argmax"}
_OF_PLACES = {
    "__getitem__", "select", "narrow", "squeeze", "unsqueeze", "index_select", "unbind", "chunk", "split",
}  # fmt: skip
"""Operations that take some of the positions."""
_OF_NOTHING = {"__get__", "size", "dim", "numel", "__len__", "is_floating_point", "stride", "element_size", "__hash__"}
"""Operations that read no value."""
_OF_THE_CLASS = {"__repr__", "__format__", "__deepcopy__", "__reduce_ex__"}
"""Operations that look at a tensor's class. Others get it as it is, since a gradient is that of one tensor."""


@dataclass
class LogitsRead:
    """The positions that were read of one forward's logits, with all of their columns or some."""

    tokens: int
    places: list[torch.Tensor] = field(default_factory=list)
    """For each read, the numbers of the positions: row x tokens + position."""

    def add(self, places: torch.Tensor) -> None:
        """Add a read of values that belong to these positions, without a copy of them for each column."""
        for dim in range(places.dim() - 1, -1, -1):
            if places.stride(dim) == 0 and places.shape[dim] > 1:
                places = places.select(dim, 0)
        self.places.append(places)

    @property
    def at_most_one_per_row(self) -> bool:
        rows = self._distinct // self.tokens
        return len(rows.unique()) == len(rows)

    @property
    def last(self) -> int:
        """The number of last positions that include all that were read; 0 if none was, or not all are known."""
        return self.tokens - int((self._distinct % self.tokens).min()) if self.places else 0

    @property
    def _distinct(self) -> torch.Tensor:
        return torch.cat([each.flatten() for each in self.places]).unique()


class WatchedLogits(torch.Tensor):  # type: ignore[misc]
    """Logits [batch, tokens, vocabulary] that note which positions are read, and else behave as a plain tensor.

    What is computed from them is a plain tensor, except for some of them, or a value for each of them.
    """

    read: LogitsRead
    places: torch.Tensor | None
    """The number of the position that each value belongs to, with the shape of the logits; None if all were noted."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watched = [each for each in tree_leaves((args, kwargs)) if isinstance(each, WatchedLogits)]
        with torch._C.DisableTorchFunctionSubclass():
            kwargs, name = kwargs or {}, getattr(function, "__name__", "")
            if name in _OF_THE_CLASS:
                args = (args[0].as_subclass(torch.Tensor), *args[1:])
            found = function(*args, **kwargs)
            # An attribute such as `data` or `mT` is a tensor, whose reads nobody watches.
            if name in _OF_NOTHING and not isinstance(found, torch.Tensor):
                return found
            first = watched[0] if len(watched) == 1 and args and args[0] is watched[0] else None
            if first is not None and (places := _places(name, function, first.places, found, args, kwargs)) is not None:
                if isinstance(found, torch.Tensor):
                    return found if found is first else _with_places(found, places, first.read)
                pairs = zip(found, places, strict=True)
                return type(found)(_with_places(each, its, first.read) for each, its in pairs)
            for each in watched:
                if each.places is not None and len(each.read.places) < _MOST_READS:
                    each.read.add(each.places)
                if found is each or each.places is None or each.shape != each.places.shape:
                    each.places = None  # it was written to, maybe with another shape
            return found


def watch_logits(found: Any, tokens: int) -> LogitsRead | None:
    """Replace the logits [batch, tokens, vocabulary] of a forward's output by ones that note which positions are read.

    None if it has no such logits, or something traces or transforms the forward.
    """
    logits: Any = getattr(found, "logits", None)
    if type(logits) is not torch.Tensor or logits.dim() != 3 or logits.shape[1] != tokens or tokens < 2:
        return None
    if torch._C._get_tracing_state() is not None or torch._C._functorch.maybe_current_level() is not None:
        return None
    found.logits = watched = watched_logits(logits)
    return watched.read


def watched_logits(logits: torch.Tensor) -> WatchedLogits:
    """The logits of a forward, [batch, tokens, vocabulary], as a tensor that notes which positions are read."""
    batch, tokens, _ = logits.shape
    numbers = torch.arange(batch * tokens, dtype=torch.int32, device=logits.device)
    return _with_places(logits, numbers.view(batch, tokens, 1).expand(logits.shape), LogitsRead(tokens))


def _with_places(tensor: torch.Tensor, places: torch.Tensor, read: LogitsRead) -> WatchedLogits:
    watched: WatchedLogits = tensor.as_subclass(WatchedLogits)
    watched.places, watched.read = places, read
    return watched


def _places(name: str, function: Callable[..., Any], places: Any, found: Any, args: Any, kwargs: Any) -> Any:
    """The positions of the values of a result; None if it is a read."""
    if places is None:
        return None
    if name in _OF_VALUES and isinstance(found, torch.Tensor):
        if name not in _OVER_A_DIM:
            return places if found.shape == places.shape else None
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        # Strides say it without a look at values, for which the host would wait.
        if not isinstance(dim, int) or (places.stride(dim) and places.shape[dim] > 1):
            return None
        return places.select(dim, 0) if found.dim() < places.dim() else places
    if name not in _OF_PLACES:
        return None
    large = isinstance(found, torch.Tensor) and found.numel() > _MOST_COPIED
    if large and found.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
        return None
    if name == "__getitem__" and places.stride(-1) == 0 and _leaves_columns(args[1], places.dim()):
        return function(places[..., :1], *args[1:]).expand(found.shape)
    return function(places, *args[1:], **kwargs)


def _leaves_columns(index: Any, dims: int) -> bool:
    """Whether an index takes all columns, so that the positions of one column are those of each."""
    each = index if isinstance(index, tuple) else (index,)
    more = sum(part.dim() - 1 for part in each if isinstance(part, torch.Tensor) and part.dtype == torch.bool)
    return len(each) + more < dims and all(isinstance(part, int | slice | torch.Tensor) for part in each)
