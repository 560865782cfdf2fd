"""The tokenizer of a model."""

from __future__ import annotations

from typing import Any

from profiler.errors import RequestError, first_line
from profiler.loading.config import pretrained_location
from profiler.loading.meta_model import quiet_libraries
from profiler.loading.source import ModelSource


def load_tokenizer(source: ModelSource, flag: str, *, trust_remote_code: bool) -> Any:
    """Return the model's own tokenizer; that of a preset is its hub id's. Raises RequestError, which names `flag`."""
    from transformers import AutoTokenizer

    where, extra = pretrained_location(source)
    advice = "give a folder with tokenizer.json, a .gguf file, or a hub id that is in the local cache"
    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **extra)
    except Exception as error:
        reason = first_line(error)
        # The lines after this one list the files that it looked for.
        why = "" if reason.startswith("Couldn't instantiate") else f" ({reason})"
        raise RequestError(f"{flag} needs a tokenizer, and none of {source.name} loads{why}; {advice}.") from error
    # For a folder without its files, transformers 5 makes a tokenizer that knows special tokens only.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise RequestError(f"{flag} needs a tokenizer, and {source.name} has none; {advice}.")
    return tokenizer
