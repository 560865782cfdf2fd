"""The command in a run's report repeats the run: the command line parses it to the same options."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from profiler.errors import RequestError
from profiler.grid.ranges import make_grid
from profiler.loading.request import ModelRequest
from profiler.loading.source import resolve
from profiler.quant.registry import QuantOptions
from profiler.run.options import Options
from profiler.run.validate import repeating

OTHER_THAN_DEFAULT = {
    "model": "smollm2-135m", "prompt_lens": "32,64", "prompts": Path("my prompts.txt"),
    "context_lens": "128", "batch_sizes": "3", "new_tokens": 9,
    "dtype": "bfloat16", "quant": "nf4", "double_quant": True, "compute_dtype": "float16", "weights": "random",
    "engine": "static", "cache": "fp8", "attn": "eager", "tp": 2, "device": "cuda:1", "out": "runs/mine",
    "budget_s": 7.5, "prefix": 16, "draft": "ngram",
    "fresh": True, "no_levers": True, "breakdown": True, "trace": True, "cold": True, "check_quality": True,
    "trust_remote_code": True, "allow_pickle": True,
}  # fmt: skip
"""Every option, with a value that is not its default."""


def test_every_option_is_in_the_command(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The exceptions are the folder, which differs the next time, and the cache, which the engine names."""
    defaults = {item.name: item.default for item in fields(Options)}
    assert OTHER_THAN_DEFAULT.keys() == defaults.keys(), "a new option must be repeated too"
    assert [name for name, value in OTHER_THAN_DEFAULT.items() if value == defaults[name]] == []
    options = Options(**OTHER_THAN_DEFAULT)  # type: ignore[arg-type]
    request = ModelRequest(
        source=resolve("smollm2-135m"),
        device=torch.device("cuda:1"),
        dtype=torch.bfloat16,
        quant="nf4",
        quant_options=QuantOptions(True, torch.float16),
        weights="random",
        attn="eager",
    )
    read: list[Options] = []

    def prepare(asked: Options) -> None:
        read.append(asked)
        raise RequestError("only read.")

    monkeypatch.setattr("profiler.run.validate.prepare", prepare)
    _, *arguments = shlex.split(repeating(request, make_grid("32,64", "3", 9, "128", ["static"]), options))
    assert "only read" in roofscope(*arguments).err
    assert read == [replace(options, out=None, cache="")]


def test_a_draft_model_is_named_without_its_folder(tiny_folder: Path) -> None:
    request = ModelRequest(source=resolve("smollm2-135m"), device=torch.device("cpu"), dtype=torch.float32)
    options = Options(draft=str(tiny_folder))
    command = repeating(request, make_grid("32", "1", 8), options)
    assert command.endswith(f"--draft {tiny_folder.name}")
    assert str(tiny_folder) not in command
