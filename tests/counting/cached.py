"""Compare what the walk says that a sequence keeps with the tensors in the cache of a small model that has run.

`python tests/counting/cached.py` measures all causal and image-text types and writes the committed tables again. It
also builds every image-text type on meta, as `count` does.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import scoreboard
import torch
import transformers
from shrink import configs
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from profiler.counting.walk import walk
from profiler.loading.cache_argument import cache_of
from profiler.loading.meta_model import build_on_meta

TABLE = Path(__file__).with_name("cached.csv")
PICTURES = Path(__file__).with_name("pictures_cached.csv")
"""Of the image-text types, for prompts without pictures."""
BUILT = Path(__file__).with_name("pictures.csv")
BATCHES = (1, 3)
LENGTHS = (4, 20)
"""Tokens of a prompt: within the windows of the small configs, and beyond them."""


def picture_types() -> list[str]:
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def built(model_type: str) -> tuple[str, str]:
    """Return (`built`, the parts that a step of text does not run) or (`not built`, the reason)."""

    def not_run() -> tuple[str, ...]:
        return walk(build_on_meta(AutoConfig.for_model(model_type), torch.bfloat16)).not_run

    return scoreboard.tried(lambda: ("built", "; ".join(not_run())), "not built")


def score(model_type: str) -> tuple[str, str]:
    """Return (`equal` | `differs` | `not run`, the bytes that differ or the reason) of every config of a type."""

    def differing() -> list[str]:
        return [text for config in configs(model_type) for text in scoreboard.on_cpu_or_meta(config, differences_of)]

    return scoreboard.tried(lambda: scoreboard.compared(differing()[:2]), "not run")


def differences_of(model: Any) -> list[str]:
    """Return what differs between the counted and the real cache, by the bytes of an element."""
    differences = []
    work = walk(model)
    most = min(100, model.get_input_embeddings().weight.shape[0] - 1)
    for batch in BATCHES:
        for length in LENGTHS:
            tokens = torch.randint(3, most, (batch, length), device=next(model.parameters()).device)
            with torch.no_grad():
                output = model(input_ids=tokens, use_cache=True)
            real = Counter[int]()
            for tensor in cached_tensors(cache_of(output)):
                real[tensor.element_size()] += tensor.nbytes
            counted = Counter[int]()
            for operator in work.operators:
                itemsize = getattr(operator, "itemsize", operator.dtype.itemsize)
                counted[itemsize] += batch * operator.count * int(operator.kept_bytes(length))
            if +real != +counted:
                differences.append(f"{batch} x {length}: {dict(+counted)}, not {dict(+real)}")
    return differences


def cached_tensors(cache: object) -> list[torch.Tensor]:
    """Return all tensors in a cache, apart from scalars such as a window's length."""
    found: dict[int, torch.Tensor] = {}
    stack = [cache]
    seen = set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if hasattr(item, "__tensor_flatten__"):  # a tensor made of others
            stack += [getattr(item, name) for name in item.__tensor_flatten__()[0]]
        elif isinstance(item, torch.Tensor):
            if item.numel() > 1:
                found[id(item)] = item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module | transformers.PreTrainedConfig | type):
            stack += vars(item).values()
    return list(found.values())


if __name__ == "__main__":
    scoreboard.write_table(TABLE, scoreboard.types(), score)
    scoreboard.write_table(PICTURES, picture_types(), score)
    scoreboard.write_table(BUILT, picture_types(), built)
