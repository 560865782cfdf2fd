"""Lines of a script that read values of a device on the host, which waits until the device has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from profiler.diagnosis.seen import Read
from profiler.machine.clock import now_s
from profiler.watching.noted import Again, Thread, users_line

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of a tensor that hand its values to the host."""


@dataclass
class Reads:
    """Notes what reads a tensor's values, once it is told to watch."""

    here: Thread
    undo: list[Callable[[], None]]
    """Gives back the tensor's methods."""
    touched: int = 0
    """How often a wrapper was entered."""
    watched: bool = False
    _found: dict[tuple[str, str], Again] = field(default_factory=dict)
    """By the line that read and the line of the call before it."""

    def watch(self) -> None:
        """From now on, note what reads a tensor's values on the host: from the first model on that lies elsewhere."""
        import torch

        self.watched = True
        for name in _READS:
            original, own = getattr(torch.Tensor, name), name in vars(torch.Tensor)

            def read(tensor: Any, *args: Any, _original: Any = original, **named: Any) -> Any:
                # Compiled code is not to have this in it.
                if torch.compiler.is_compiling():
                    return _original(tensor, *args, **named)
                return self._read(functools.partial(_original, tensor), tensor, args, named)

            setattr(torch.Tensor, name, functools.wraps(original)(read))
            self.undo.append(
                functools.partial(setattr, torch.Tensor, name, original)
                if own
                else functools.partial(delattr, torch.Tensor, name)
            )

    def _read(self, run: Callable[..., Any], tensor: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run what reads a tensor; outside of a model's calls, where its values lie elsewhere, add it to its line."""
        self.touched += 1
        here = self.here
        if here.depth or here.reading or tensor.device.type == "cpu":
            return run(*args, **named)
        here.reading = True
        start_s = now_s()
        try:
            return run(*args, **named)
        finally:
            here.reading = False
            self._found.setdefault((users_line(), here.last), Again()).add(now_s() - start_s)

    def by_line(self, behind: str | None = None) -> tuple[Read, ...]:
        """The lines that read values of a device; of those alone that did so behind a call of the line `behind`."""
        found: dict[str, Again] = {}
        for (where, last), item in self._found.items():
            if behind in (None, last):
                whole = found.setdefault(where, Again())
                whole.count += item.count
                whole.seconds += item.seconds
        ordered = sorted(found.items(), key=lambda pair: -pair[1].seconds)
        return tuple(Read(where, item.count, item.seconds) for where, item in ordered)
