"""Made-up figures for the screens of commands that measure; the words come from the commands."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from profiler.checks import device, installation
from profiler.checks.doctor import Examination, PresetFit, first_command, fit_words
from profiler.checks.installation import CheckResult, run_check
from profiler.data.datasheets import gpu_called
from profiler.device.device import Device
from profiler.packages import MISSING
from profiler.why_slow.findings import CallFloor, Finding, TriedChange, Why, judge_calls
from profiler.why_slow.observations import Call, CallSettings, GraphBreak, LineTime, Load, Observations, OwnLine


@contextlib.contextmanager
def made_answers() -> Iterator[None]:
    """A context in which `why` runs no script and `doctor` checks no installation."""
    with (
        mock.patch("profiler.why_slow.command.why_script", _why_script),
        mock.patch("profiler.checks.doctor.examine", side_effect=examination),
    ):
        yield


def _why_script(
    _script: Path | None, _module: str, _arguments: Sequence[str], _out: Path | None, _streams: object,
    report: Callable[[Why, Path, tuple[str, ...]], object], _budget_s: float | None,
) -> int:  # fmt: skip
    report(why_answer(), Path("runs/why-chat"), ())
    return 0


_SETTINGS = CallSettings("float16", "cuda:0", attention="sdpa", cache=False, beams=4, threads=8)


def why_answer() -> Why:
    """A script with a finding of each basis, two doubtful trials, a slow first call and one that failed."""
    generate = partial(Call, kind="generate", model="LlamaForCausalLM", batch_size=4, prompt_len=512, context_len=0,
                       where="chat.py:21", settings=_SETTINGS)  # fmt: skip
    calls = (
        generate(0, new_tokens=64, forwards=64, seconds=20.0, began_s=20.0, warm_s=8.0),
        *(generate(n, new_tokens=64, forwards=64, seconds=8.0, began_s=34.0 + 9 * n, padding=0.25) for n in (1, 2)),
        generate(3, new_tokens=0, forwards=1, seconds=1.0, began_s=62.0, failed="OutOfMemoryError: out of memory"),
        Call(4, "forward", "BertModel", 1, 128, 0, 0, 1, 1.0, "chat.py:30",
             replace(_SETTINGS, cache=True, gradients=True, training=True, beams=1), began_s=64.0),
    )  # fmt: skip
    seen = Observations(
        "chat.py", 80.0, calls, (Load("llama", 6.0, "chat.py:8", 2.0), Load("llama", 5.0, "chat.py:12", 9.0)),
        2.0, "chat.py:20", 0.1, own_lines=(OwnLine("chat.py:33", "picked", "difflib.get_close_matches", 1.0),),
        texts_again=(LineTime("chat.py:20", 8, 1.0),),
        graph_breaks=(GraphBreak(3, "Tensor.item"),),
        waited_s=1.0, warnings=("other processes kept 2 cores busy; times may be too long",),
    )  # fmt: skip
    pairs = ((8.0, 4.0),) * 4
    trial = partial(TriedChange, calls=(0, 1, 2), where="chat.py:21", shape="generate 4 x 512 + 64")
    trials = [
        trial("cache-off", rounds=pairs, evidence="use_cache=False computes every prompt again", change="remove it"),
        trial("padding", rounds=((8.0, 5.0), (8.0, 9.0), (8.0, 5.0)), evidence="a quarter of the tokens is padding",
              change="pad to the longest text"),
        trial("wide-dtype", rounds=((8.0, 7.0), (8.0, 9.0), (8.0, 7.5)), evidence="a dtype", change="another one"),
    ]  # fmt: skip
    more = [
        Finding("offload", 9.0, "chat.py:8", "1.00 GB of 2.00 GB of weights cross a link",
                "use a GPU with more room", "at most", "the bytes that cross the link, at its measured bandwidth"),
        Finding("slow-load", 3.0, "chat.py:8", "weights are quantised at each start",
                "save them once", "measured", "the load without it", once=True),
    ]  # fmt: skip
    return judge_calls(
        seen, trials, CallFloor(6.0, 2.0, needless_s=3.0), ["beams (chat.py:21): no time was left"], more
    )


def examination(_device: str = "auto") -> Examination:
    """A T4 without a compiler and without gguf."""
    info = Device("cuda", "Tesla T4", 15 * 10**9, 4 << 20, 40, "7.5", gpu_called("T4"))
    machine: Any = SimpleNamespace(is_cuda=True, info=info, device=torch.device("cpu"), links=("host", "cuda:1"),
                                   available_bytes=lambda: 3 * 10**9)  # fmt: skip
    fits = [PresetFit("mistral-7b-v0.1", precision, needs, needs < 13e9, needs < 10e9)
            for precision, needs in (("float16", 15 * 10**9), ("int8", 8 * 10**9), ("nf4", 5 * 10**9))]  # fmt: skip
    fits += [PresetFit("mixtral-8x7b", "nf4", 27 * 10**9, False, False)]
    with (
        mock.patch.object(installation, "driver_versions", return_value=("580.00", "13.0")),
        mock.patch.object(installation, "version_of", return_value=MISSING),
        mock.patch.object(installation.shutil, "which", return_value=None),
    ):
        findings = (
            run_check("driver", installation.driver),
            run_check("device", lambda: device.card(machine)),
            run_check("memory", lambda: device.free_memory(machine)),
            run_check("compile", lambda: device.compiling(machine)),
            run_check("gguf", lambda: installation.optional("gguf")),
            CheckResult("fits", True, fit_words(fits)),
        )
    return Examination(findings, tuple(fits), first_command(fits, on_card=True))
