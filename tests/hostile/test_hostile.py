"""Strangers' models and results: each input of a table is refused in one line, quickly, and none of their code runs."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import sys
import time
import timeit
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_models import (
    INDEX,
    MARK,
    WEIGHTS,
    Marking,
    Spoil,
    config,
    content,
    gguf,
    header,
    layers,
    named,
    one_tensor,
    pickled,
    quantised_by,
    remote_code,
    tensor,
    text,
)

from profiler.errors import ModelError
from profiler.loading.config import config_from
from profiler.report.columns import EXPORTERS, tokens_table
from profiler.report.html import html_report
from profiler.report.sections import run_sections
from profiler.report.terminal import print_sections, screen
from profiler.store.folder import read_run
from profiler.units import each_text, visible

OLD = Path(__file__).parents[1] / "data" / "tiny_run"
MOST_YARDSTICKS = 165
"""A limit of CPU time in multiples of a fixed piece of Python's work, so that it holds on any machine."""
MOST_KIB = 500_000
"""In addition to the half gigabyte that the libraries take: under 1 GB in total."""
RUN = ("--prompt-lens", "8", "--batch-sizes", "1", "--new-tokens", "4", "--budget", "0.1")

LLAMA = named(b"llama")

# The command, what it reads, and words of the line that refuses it. Weights are read by `run` only.
REFUSED: dict[str, tuple[str, Spoil | bytes, str]] = {
    "10^9 layers": ("count", config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "width of 10^30": ("count", config(hidden_size=10**30), "cannot build this model"),
    "width of NaN": ("count", config(hidden_size=float("nan")), "hidden_size"),
    "type that is a path": ("count", config(model_type="../../../etc/passwd"), "model type `../"),
    "not a language model": ("count", config(model_type="vit"), "generates text for 'vit'"),
    "attention kernel from the hub": ("count", config(attn_implementation="stranger/kernel"), "from the hub"),
    "activation that is none": ("count", config(hidden_act="__import__('os').system('id')"), "cannot build"),
    "10^7 characters of brackets": ("count", content("config.json", b"[" * 10**7), "nested too deeply"),
    "not UTF-8": ("count", content("config.json", b"\xff\xfe\x00"), "cannot be read as JSON"),
    "adapter": ("count", content("adapter_config.json", b"{}"), "contains an adapter"),
    "own code for an unknown type": ("count", remote_code(model_type="own"), "--trust-remote-code"),
    "own quantiser": ("count", remote_code(**quantised_by("quantizer_own")), "'quantizer_own', which cannot be"),
    "other weights by name": ("run", config(transformers_weights="../outside.safetensors"), "'../outside.safetensors'"),
    "header of 2^63 bytes": ("run", content(WEIGHTS, struct.pack("<Q", 2**63) + b"{"), "header too large"),
    "offsets that overlap": ("run", header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}), "for tensor `b`"),
    "pickle called safetensors": ("run", pickled(WEIGHTS), "cannot be read as a safetensors file"),
    "pickle": ("run", pickled("pytorch_model.bin"), "is a pickle"),
    "index to a pickle": ("run", pickled("pytorch_model.bin", INDEX), "is a pickle"),
    "GGUF of 2^60 tensors": ("count", gguf(2**60, 0), "cannot be read"),
    "GGUF with a string of 2^40 bytes": ("count", gguf(0, 1, text(b"a", 2**40)), "cannot be read"),
    "GGUF with a tensor past the end": ("count", gguf(1, 1, LLAMA + one_tensor(4, offset=2**60)), "cannot be read"),
    "GGUF of an unknown type": ("count", gguf(0, 2, named(b"none") + layers(b"none", 2)), "none is not supported"),
    "GGUF of 10^9 layers": ("count", gguf(0, 2, LLAMA + layers(b"llama", 10**9)), "num_hidden_layers = 1000000000"),
    "GGUF that is a pickle": ("count", pickle.dumps(Marking("/tmp/" + MARK)), "is not a GGUF file"),
}


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def yardstick_s() -> float:
    """CPU seconds of writing and reading 20,000 rows of JSON, the least of three."""
    rows = [{"batch_size": row, "latency_s": row / 3, "regime": "memory-bound"} for row in range(20_000)]
    return min(timeit.repeat(lambda: json.loads(json.dumps(rows)), timer=time.process_time, number=1, repeat=3))


def peak_kib() -> int:
    """Return the peak memory since the last reset (proc(5): VmHWM)."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


@pytest.fixture(autouse=True)
def recursion_limit_of_a_fresh_process() -> Iterator[None]:
    """Libraries raise the limit: after a test that compiles, deeply nested files would be accepted."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_in_one_line(roofscope, folder: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    command, spoil, says = REFUSED[name]
    if isinstance(spoil, bytes):
        model = folder / "model.gguf"
        model.write_bytes(spoil)
    else:
        model = folder
        spoil(folder)
    out = folder.parent / "run"
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: that of another test would hide this one's
    used_kib, start_s = peak_kib(), time.process_time()
    result = roofscope(command, str(model), *((*RUN, "--out", str(out)) if command == "run" else ()))
    assert time.process_time() - start_s < MOST_YARDSTICKS * yardstick_s()
    assert peak_kib() - used_kib < MOST_KIB
    assert (result.code, result.out) == (2, ""), result
    [line] = result.err.splitlines()
    assert line.startswith("roofscope: ")
    assert says in line
    assert not out.exists()
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("spoil", [remote_code(), remote_code(architectures=["OwnModel"])])
def test_custom_code_of_a_known_type_is_ignored(roofscope, folder: Path, spoil: Spoil) -> None:  # type: ignore[no-untyped-def]
    """transformers supports the type itself, so the counts are those of the model without the code."""
    command = ("count", str(folder), "--prompt", "64", "--format", "json")
    plain = json.loads(roofscope(*command).out)
    spoil(folder)
    assert json.loads(roofscope(*command).out) == plain
    assert not (folder / MARK).exists()
    assert "modeling_own" not in sys.modules


def test_custom_code_runs_if_it_is_trusted(roofscope, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """With --trust-remote-code the code in the same folder leaves the mark, so the mark works."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
    remote_code(model_type="own")(folder)
    roofscope("count", str(folder), "--trust-remote-code")
    assert (folder / MARK).exists()


def test_the_config_in_a_run_folder(tiny_folder: Path) -> None:
    """A run folder contains a config, from which other cells are counted; it may come from somebody else."""
    known = json.loads((tiny_folder / "config.json").read_text())
    named = {"model_type": "nonsense", "attn_implementation": "stranger/kernel"}
    for name, value in {"num_hidden_layers": 10**9, "vocab_size": -1, **named}.items():
        with pytest.raises(ModelError, match=str(value) if isinstance(value, str) else name):
            config_from({**known, name: value}, "run/config.json")
    auto_map = {"AutoModelForCausalLM": "stranger/repository--modeling_own.OwnModel"}
    assert not hasattr(config_from({**known, "auto_map": auto_map}, "run/config.json"), "auto_map")


@pytest.mark.parametrize(("method", "linear"), [("bitnet", "BitLinear"), ("metal", "MetalLinear")])
def test_a_format_without_a_rule_is_named(roofscope, folder: Path, method: str, linear: str) -> None:  # type: ignore[no-untyped-def]
    """transformers plans the format, but roofscope has no rule for its bytes: `unknown` names each linear."""
    config(**quantised_by(method))(folder)
    result = roofscope("count", str(folder), "--prompt", "64", "--format", "json")
    assert result.code == 0
    counted = json.loads(result.out)
    assert sum(linear in name for name in counted["unknown"]) == 7, "four of attention, three of the MLP"
    # The norms, the table and the head are understood: 5 x 64 and 2 x 128 x 64 parameters. The packed weights of two
    # layers count unpacked, be they parameters or buffers.
    assert counted["params"] == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 5 * 64 + 2 * 128 * 64
    assert counted["coverage"] * counted["params"] == pytest.approx(5 * 64 + 2 * 128 * 64)


TEXTS = (
    "<script>document.title='RAN'</script>",
    "\"><svg onload=document.title='RAN'>",
    "\x1b]0;RAN\x07\x1b[2J\x9b31mred",
    "[red]styled[/red][/]",
    r"\input{/etc/passwd}\write18{id}$\frac{",
    "gpl\u202ecod.exe",
    "a\x00b\ud800",
    "![x](https://evil.example/x.png)",
    "a | b\n| c |`",
)
"""Each attacks one medium: a page, a terminal, LaTeX, a picture, a reader's eyes, a C program or an encoder."""
ALL = " ".join(TEXTS)
FREE = {"id", "name", "command", "answer", "warnings", "revision", "architecture", "method", "license", "created"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reference run with every free text of run.json replaced."""
    folder = Path(shutil.copytree(OLD, tmp_path_factory.mktemp("hostile") / "run"))
    known = json.loads((folder / "run.json").read_text())

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: spoil(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [spoil(item, key) for item in value]
        return ALL if isinstance(value, str) and key in FREE else value

    (folder / "run.json").write_text(json.dumps({**spoil(known), "engine": known["engine"], "warnings": [ALL]}))
    return folder


def acting(text: str) -> list[str]:
    """Return control characters, except line ends and tabs, which belong to the output."""
    return [sign for sign in text if not sign.isprintable() and sign not in "\n\t"]


def test_a_visible_text_acts_on_nothing() -> None:
    for each in TEXTS:
        assert visible(each).isprintable()
        visible(each).encode()
        assert visible(visible(each)) == visible(each)
    assert each_text({ALL: [ALL, 1, None]}, visible) == {visible(ALL): [visible(ALL), 1, None]}
    assert visible("Modell 通义千问, μs ± 3 %") == "Modell 通义千问, μs ± 3 %"


def test_a_page_holds_text(results: Path) -> None:
    """The page's own script sorts; there is no other."""
    page = html_report(read_run(results)).replace("\u00a0", " ")  # between a number and its unit
    assert not acting(page)
    assert page.count("<script") == 1
    assert "<svg onload" not in page
    assert "&lt;script&gt;document.title=" in page


def test_a_terminal_gets_text(roofscope, results: Path, capfd: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    outcome = roofscope("report", "nowhere\x1b[31m")
    assert not acting(outcome.out + outcome.err)
    assert "internal error" not in outcome.err
    print_sections(run_sections(read_run(results)), screen())
    printed = " ".join(capfd.readouterr().out.split())
    assert "[red]styled[/red][/]" in printed
    assert not acting(printed)


def test_tables_for_other_programs() -> None:
    run = read_run(OLD)
    frame = tokens_table(replace(run, results=tuple(replace(run.results[0], engine=visible(text)) for text in TEXTS)))
    markdown = EXPORTERS["md"](frame).decode()
    assert len(markdown.splitlines()) == len(TEXTS) + 2
    assert "<" not in markdown.replace("&lt;", "")
    assert not re.search(r"(?<!\\)[\[`]", markdown)
    latex = EXPORTERS["latex"](frame).decode()
    assert not any(command in latex for command in (r"\input{", r"\write18", r"$\frac"))


@pytest.mark.slow
def test_pictures_are_drawn(roofscope, results: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A text that matplotlib would read as mathematics, or that a font lacks, is drawn as it is."""
    copied = Path(shutil.copytree(results, tmp_path / "run"))
    for arguments in (["report", str(copied)], ["plot", str(copied), "roofline"]):
        outcome = roofscope(*arguments)
        assert outcome.code == 0, outcome.err
    assert (copied / "roofline.png").read_bytes().startswith(b"\x89PNG")
