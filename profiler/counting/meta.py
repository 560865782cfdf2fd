"""Count a model without its weights, on the meta device."""

from __future__ import annotations

from torch import nn

from profiler.counting.preset_counts import CountedModel
from profiler.counting.walk import walk
from profiler.facts.step import Attention
from profiler.loading.config import load_config
from profiler.loading.device_map import planned_weight_bytes
from profiler.loading.meta_model import build_on_meta
from profiler.loading.request import dtype_name, in_16_bits, model_dtype, most_positions
from profiler.loading.source import ModelSource
from profiler.quant.checkpoints import published_format, requested_form
from profiler.quant.registry import known_quant


def counted_on_meta(
    source: ModelSource, dtype: str, quant: str, *, rented: bool = False, trust_remote_code: bool = False
) -> CountedModel:
    """A model in a dtype (`auto`: its own) and a format, from its config alone. Raises RequestError or ModelError.

    `rented`: in 16 bits where no dtype is asked for and its own is wider.
    """
    kind = known_quant(quant)
    config = requested_form(load_config(source, trust_remote_code), dtype != "auto")
    chosen = model_dtype(dtype, config)
    chosen = in_16_bits(chosen) if rented and dtype == "auto" else chosen
    module = build_on_meta(config, chosen, kind)
    return CountedModel(
        walk(module),
        planned_weight_bytes(module),
        dtype_name(chosen),
        published_format(config) if kind == "none" else None,
        own_attention(module),
        most_positions(config),
    )


def own_attention(module: nn.Module) -> Attention:
    """The attention that transformers runs a model with unless told: `sdpa`, or `eager` where it refuses that.

    It refuses `sdpa` where a kernel lacks what the scores need: caps (Gemma-2), sinks (gpt-oss).
    """
    return "sdpa" if getattr(module, "_supports_sdpa", True) else "eager"
