"""The parameters of a model that no step of text runs, and what they compute for one picture."""

from __future__ import annotations

from typing import Any

from torch import nn

from profiler.counting.module_kinds import first_of, is_attention
from profiler.quant import storage as formats

_PIXELS = 448
"""The side of the picture, for towers that take any size."""
_JOINED = (4, 9)
"""Patches that a projector joins to one: squares of 2 x 2 and 3 x 3."""


def picture_flops(model: Any, towers: list[nn.Module]) -> tuple[int, int]:
    """Return the FLOPs of the towers for one square picture, and its side in pixels; (0, 0) without a patch size.

    Every patch runs through all layers with attention, and attends to all patches. A projector that joins patches,
    which its wider input shows, runs once for each group. Towers with windows compute less.
    """
    config = first_of(model.config, "vision_config", "vision_encoder_config") or model.config
    pixels, patch = (_side(first_of(config, name)) for name in ("image_size", "patch_size"))
    if not patch:
        return 0, 0
    pixels = pixels or _PIXELS
    patches = (pixels // patch) ** 2
    width = _side(first_of(config, "hidden_size", "embed_dim", "width"))
    parts = [part for tower in towers for part in tower.modules()]
    layers = (part for part in parts if any(map(is_attention, part.children())))
    in_layers = {id(part) for layer in layers for part in layer.modules()}  # an MLP may be as wide as joined patches
    flops = 0
    for module in parts:
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            flops += 2 * patches * module.weight.numel()
        elif formats.is_linear(module):
            weight = formats.stored(module)
            joined = next((n for n in _JOINED if weight.in_features == n * width and id(module) not in in_layers), 1)
            flops += 2 * (patches // joined) * weight.in_features * weight.out_features
        elif is_attention(module):
            flops += 4 * patches**2 * width
    return flops, pixels


def _side(size: Any) -> int:
    """Return a size of a square, which some configs give twice."""
    first = size[0] if isinstance(size, list | tuple) else size
    return int(first) if isinstance(first, int) else 0
