"""A model with fewer layers: how its layers repeat, and its configuration."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from profiler.counting.walk import collapse_numbers

_COLD_PERIODS = 2


@dataclass(frozen=True)
class Pattern:
    """How a model's layers repeat: `first` layers of other kinds, then the same `period` again and again."""

    layers: int
    first: int
    period: int

    def long(self, layers: float, periods: int = 2) -> int:
        """Return the number of layers in the whole periods that fit into `layers`, with at least `periods`."""
        whole = max(periods, int((layers - self.first) / self.period))
        return min(self.layers, self.first + whole * self.period)

    def cold(self, layers: int) -> int:
        """Return how many of the first `layers` run colder than the later ones.

        The head's matmul evicts everything else from the caches, including Python's own data. In bfloat16 the first
        two layers of SmolLM2-135M then take 1.25 and 1.20 ms, and every later one 1.04 (two cores of a Xeon).
        """
        periods = (layers - self.first) // self.period
        return self.first + min(_COLD_PERIODS, periods // 2) * self.period


def pattern_of(model: nn.Module, config: Any) -> Pattern | None:
    """Return the pattern of a model's layers, by their types and the shapes of their weights; None if there is none."""
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
    """Return the list of decoder layers: the first with as many modules as the config has layers."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return next((modules for modules in lists if len(modules) == config.num_hidden_layers), None)


def shortened(config: Any, layers: int) -> Any:
    """Return a copy of a config with its first `layers` layers."""
    short = copy.deepcopy(config)
    part = short.get_text_config()
    count = part.num_hidden_layers
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(part, name, value[:layers])
    part.num_hidden_layers = layers
    return short
