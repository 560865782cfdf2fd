"""What comes out of an operator, shapes and no values: torch's fake tensors, remembered by what went in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache


class Layout(NamedTuple):
    """How an output lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view: bool
    """Whether it looks at its first argument's storage; else it has one of its own, as large as it is."""


_MAKE_SUBCLASS: Any = torch.Tensor._make_subclass
"""torch's own, whatever stands in its place while cards are simulated."""

_META = torch.device("meta")

_RESHAPING = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapdims_"}
"""These change the shape of what they are given."""


class Shapes:
    """Asks torch's fake mode for what is new, and makes what is known itself, in a fifth of the time."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._states: dict[torch.device, dict[str, Any]] = {}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func` gives: fake tensors on the right device, their memory not yet taken."""
        return args[0] if in_place(func, args) else self.asked(func, args, kwargs)

    def asked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What torch's fake mode gives, which knows no subclasses."""
        disguised = [(each, type(each)) for each in (*args, *kwargs.values()) if _is_disguised(each)]
        try:
            for each, _ in disguised:
                each.__class__ = FakeTensor
            # torch remembers a call by what it was given, and a storage among that would never be freed (`set_`).
            held = any(isinstance(each, torch.UntypedStorage) for each in args)
            with self._fake, disable_fake_tensor_cache(self._fake) if held else contextlib.nullcontext():
                return func(*args, **kwargs)
        finally:
            for each, kind in disguised:
                each.__class__ = kind

    def made(self, layout: Layout, args: Sequence[Any]) -> FakeTensor:
        """One more tensor that lies so."""
        if layout.view:
            now = torch.is_inference_mode_enabled()
            # A view of a weight is no inference tensor either.
            if args[0].is_inference() != now:
                with torch.inference_mode(not now):
                    return self._laid(layout, args)
        return self._laid(layout, args)

    def _laid(self, layout: Layout, args: Sequence[Any]) -> FakeTensor:
        shape, stride, offset, dtype, device, view = layout
        made = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        if view:
            made.set_(args[0].untyped_storage(), offset, shape, stride)
        return self._fakes(made, device)

    def _fakes(self, made: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake tensor of a device; after the first one without what torch's constructor asks each time anew."""
        state = self._states.get(device)
        if state is None:
            first = FakeTensor(self._fake, made, device)
            self._states[device] = dict(vars(first))
            return first
        other: FakeTensor = _MAKE_SUBCLASS(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(other).update(state)
        return other


@functools.cache
def _disguise(kind: type) -> type:
    return type(kind.__name__, (kind, FakeTensor), {})


def _is_disguised(value: Any) -> bool:
    return isinstance(value, FakeTensor) and type(value) is not FakeTensor


def make_subclass(whole: Any) -> Any:
    """torch.Tensor._make_subclass for fake tensors too: bitsandbytes' weights are a class of their own."""

    def make(kind: type, data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(data, FakeTensor):
            made: torch.Tensor = whole(kind, data, *args, **kwargs)
            return made
        made = data.detach()
        made.__class__ = _disguise(kind)
        return made

    return make


def copied(whole: Any) -> Any:
    """FakeTensor.__new__ for one that is given another: accelerate makes a moved weight of the old one's own class."""

    def new(kind: type, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, FakeTensor):
            return whole(kind, first, *args, **kwargs)
        made = first.detach()
        made._is_param = True
        return made

    return new


def in_place(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call gives back its first argument, which keeps its shape."""
    if not func._schema.is_mutable:
        return False
    name = func._schema.name.removeprefix("aten::")
    return name.endswith("_") and name not in _RESHAPING and bool(args) and isinstance(args[0], FakeTensor)


def described(values: Iterable[Any], tensors: list[torch.Tensor], parts: list[Any]) -> None:
    """Adds the tensors among `values`, and all that tells these from others that an operator treats otherwise."""
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            parts += (
                type(value),
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.dtype,
                value.device,
            )
        elif isinstance(value, (list, tuple)):
            parts.append(len(value))
            described(value, tensors, parts)
        else:
            parts += (type(value), value)


def layout_of(result: Any, args: Sequence[Any]) -> Layout | None:
    """None for what is no single, plain tensor."""
    if type(result) is not FakeTensor:
        return None
    given = args[0] if args and isinstance(args[0], FakeTensor) else None
    storage = result.untyped_storage()._cdata
    view = given is not None and given.untyped_storage()._cdata == storage
    if not view and any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata == storage for t in args):
        return None
    if not view and result.untyped_storage().nbytes() != result.numel() * result.element_size():
        return None
    shape, stride = tuple(result.shape), result.stride()
    return Layout(shape, stride, result.storage_offset(), result.dtype, result.device, view)
