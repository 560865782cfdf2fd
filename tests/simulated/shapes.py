"""What comes out of an operator, shapes and no values: torch's fake tensors, remembered by what went in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache

Spec = tuple[Any, ...]
"""Of an output: shape, stride, offset, dtype, device, and whether it looks at its first argument's storage."""

_MAKE_SUBCLASS: Any = torch.Tensor._make_subclass
"""torch's own, whatever stands in its place while cards are simulated."""

_RESHAPING = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapdims_"}
"""These change the shape of what they are given."""


class Shapes:
    """Asks torch's fake mode for each new kind of call, and answers the next one itself, in a fifth of the time."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._known: dict[Any, Spec | None] = {}
        self._states: dict[torch.device, dict[str, Any]] = {}

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func` gives: fake tensors on the right device, their memory not yet taken."""
        if func._schema.is_mutable:
            name = func._schema.name.removeprefix("aten::")
            if name.endswith("_") and name not in _RESHAPING and args and isinstance(args[0], FakeTensor):
                return args[0]
            return self.asked(func, args, kwargs)
        try:
            key = (func, _key(args), _key(kwargs.values()), *kwargs)
            spec = self._known.get(key)
        except TypeError:
            return self.asked(func, args, kwargs)
        if spec is not None:
            return self._made(spec, args)
        result = self.asked(func, args, kwargs)
        if key not in self._known:
            self._known[key] = _spec(result, args)
        return result

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

    def _made(self, spec: Spec, args: Sequence[Any]) -> FakeTensor:
        now = torch.is_inference_mode_enabled()
        # A view of a weight is no inference tensor either.
        if spec[-1] and args[0].is_inference() != now:
            with torch.inference_mode(not now):
                return self._laid(spec, args)
        return self._laid(spec, args)

    def _laid(self, spec: Spec, args: Sequence[Any]) -> FakeTensor:
        shape, stride, offset, dtype, device, view = spec
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
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


def _key(values: Any) -> tuple[Any, ...]:
    """Raises TypeError for what cannot be told apart."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, type(value)))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            hash(value)
            parts.append((type(value), value))
    return tuple(parts)


def _spec(result: Any, args: Sequence[Any]) -> Spec | None:
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
    return (tuple(result.shape), result.stride(), result.storage_offset(), result.dtype, result.device, view)
