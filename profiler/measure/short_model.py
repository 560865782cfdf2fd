"""A model with fewer layers: how its layers repeat, and how few hold each kind."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from profiler.counting.walk import collapse_numbers

_COLD_PERIODS = 2


@dataclass(frozen=True)
class Pattern:
    """How a model's layers repeat: `first` of their own kind, then the same `period` again and again."""

    layers: int
    first: int
    period: int

    @property
    def short(self) -> int:
        """The least number of layers that holds each kind."""
        return min(self.layers, self.first + self.period)

    def long(self, layers: float, periods: int = 2) -> int:
        """The nearest whole number of periods below so many layers, `periods` at least."""
        whole = max(periods, int((layers - self.first) / self.period))
        return min(self.layers, self.first + whole * self.period)

    def cold(self, layers: int) -> int:
        """Of so many layers, those whose steps are not like the later ones'.

        The product of the head pushes everything else out of the caches, Python's own data included. In bfloat16 the
        first two layers of SmolLM2-135M take 1.25 and 1.20 ms then, and every later one 1.04 (two cores of a Xeon).
        """
        periods = (layers - self.first) // self.period
        return self.first + min(_COLD_PERIODS, periods // 2) * self.period


def pattern_of(model: nn.Module, config: Any) -> Pattern | None:
    """The pattern of a model's layers by the shapes of their weights and their type; None where none is found."""
    layers = stack_of(model, config)
    if layers is None:
        return None
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (kind, *((collapse_numbers(name), tuple(part.shape)) for name, part in layer.named_parameters()))
        for layer, kind in zip(layers, types, strict=True)
    ]
    count = len(kinds)
    for total in range(1, count):
        for period in range(1, total + 1):
            first = total - period
            if all(kinds[i] == kinds[i + period] for i in range(first, count - period)):
                return Pattern(count, first, period)
    return None


def stack_of(model: nn.Module, config: Any) -> nn.ModuleList | None:
    """The list of decoder layers: the first of as many modules as the config has layers."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((several for several in lists if len(several) == config.num_hidden_layers), None)


def shortened(config: Any, layers: int) -> Any:
    """A copy of a config with its first `layers` layers."""
    short = copy.deepcopy(config)
    part = short.get_text_config()
    count = part.num_hidden_layers
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(part, name, value[:layers])
    part.num_hidden_layers = layers
    return short
