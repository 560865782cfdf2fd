"""Build every image-text type of the installed transformers on meta, as `count` does.

`python tests/counting/pictures.py` builds all types and writes the committed table again.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import scoreboard
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from profiler.counting.walk import walk
from profiler.loading.meta_model import build_on_meta, quiet_libraries

TABLE = Path(__file__).with_name("pictures.csv")


def types() -> list[str]:
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def score(model_type: str) -> tuple[str, str]:
    """Return (`built`, the parts that a step of text does not run) or (`not built`, the reason)."""
    try:
        with quiet_libraries(), warnings.catch_warnings(), scoreboard.time_limit():
            warnings.simplefilter("ignore")
            work = walk(build_on_meta(AutoConfig.for_model(model_type), torch.bfloat16))
    except Exception as error:
        return "not built", scoreboard.reason(error)
    return "built", "; ".join(work.not_run)


if __name__ == "__main__":
    scoreboard.write_table(TABLE, types(), score)
