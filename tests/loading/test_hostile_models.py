"""Malicious models: each ends in one line and exit code 2, quickly, in little memory, and none of their code runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_models import CHECKPOINTS, CONFIGS, GGUFS, MARK, WEIGHTS, Spoil, config, pickled, remote_code

from profiler.errors import ModelError
from profiler.loading.config import config_from
from profiler.loading.source import resolve, resolve_weights, weight_files

# A limit of CPU time in multiples of a fixed piece of Python's work, so that it holds on any machine.
_MOST_YARDSTICKS = 165
# In addition to the half gigabyte that the libraries take: under 1 GB in total.
_MOST_KIB = 500_000
_RUN = ("--prompt-lens", "8", "--batch-sizes", "1", "--new-tokens", "4", "--budget", "0.1")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_folder / WEIGHTS, tmp_path / "outside.safetensors")
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def _refused(roofscope, says: str, *arguments: str) -> None:  # type: ignore[no-untyped-def]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: that of another test would hide this one's
    used_kib = _peak_kib()
    start_s = time.process_time()
    result = roofscope(*arguments)
    assert time.process_time() - start_s < _MOST_YARDSTICKS * _yardstick_s()
    assert _peak_kib() - used_kib < _MOST_KIB
    assert result.code == 2, result
    assert result.out == ""
    [line] = result.err.splitlines()
    assert line.startswith("roofscope: ")
    assert says in line


def _yardstick_s() -> float:
    """CPU seconds of writing and reading 20,000 rows of JSON, the least of three."""
    rows = [{"batch_size": row, "latency_s": row / 3, "regime": "memory-bound"} for row in range(20_000)]
    return min(timeit.repeat(lambda: json.loads(json.dumps(rows)), timer=time.process_time, number=1, repeat=3))


def _peak_kib() -> int:
    """Return the peak memory since the last reset (proc(5): VmHWM)."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


@pytest.fixture(autouse=True)
def _recursion_limit_of_a_fresh_process() -> Iterator[None]:
    """Libraries raise the limit: after a test that compiles, deeply nested files would be accepted."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("name", CONFIGS)
def test_config(roofscope, folder: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    spoil, says = CONFIGS[name]
    spoil(folder)
    _refused(roofscope, says, "count", str(folder))
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(roofscope, folder: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    spoil, says = CHECKPOINTS[name]
    spoil(folder)
    out = folder.parent / "run"
    _refused(roofscope, says, "run", str(folder), *_RUN, "--out", str(out))
    assert not out.exists()
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("name", GGUFS)
def test_gguf(roofscope, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "model.gguf"
    content, says = GGUFS[name]
    file.write_bytes(content)
    _refused(roofscope, says, "count", str(file))


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
    content = json.loads((tiny_folder / "config.json").read_text())
    named = {"model_type": "nonsense", "attn_implementation": "stranger/kernel"}
    for name, value in {"num_hidden_layers": 10**9, "vocab_size": -1, **named}.items():
        with pytest.raises(ModelError, match=str(value) if isinstance(value, str) else name):
            config_from({**content, name: value}, "run/config.json")
    auto_map = {"AutoModelForCausalLM": "stranger/repository--modeling_own.OwnModel"}
    assert not hasattr(config_from({**content, "auto_map": auto_map}, "run/config.json"), "auto_map")


@pytest.mark.parametrize(("method", "linear"), [("bitnet", "BitLinear"), ("metal", "MetalLinear")])
def test_a_format_without_a_rule_is_named(roofscope, folder: Path, method: str, linear: str) -> None:  # type: ignore[no-untyped-def]
    """transformers plans the format, but roofscope has no rule for its bytes: `unknown` names each linear."""
    config(quantization_config={"quant_method": method})(folder)
    result = roofscope("count", str(folder), "--prompt", "64", "--format", "json")
    assert result.code == 0
    counted = json.loads(result.out)
    assert sum(linear in name for name in counted["unknown"]) == 7, "four of attention, three of the MLP"
    # The norms, the table and the head are understood: 5 x 64 and 2 x 128 x 64 parameters. The packed weights of two
    # layers count unpacked, be they parameters or buffers.
    assert counted["params"] == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 5 * 64 + 2 * 128 * 64
    assert counted["coverage"] * counted["params"] == pytest.approx(5 * 64 + 2 * 128 * 64)


def test_a_pickle_with_another_name_is_not_a_checkpoint(folder: Path) -> None:
    pickled("model.pt")(folder)
    assert weight_files(folder) == []
    assert resolve_weights(resolve(str(folder)), "auto") == "random"


def test_links_within_the_hubs_cache_are_allowed(folder: Path) -> None:
    """The files of a snapshot are links to the neighbouring folder `blobs`; other links are refused."""
    cache = folder.parent / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert [file.name for file in weight_files(resolve(str(snapshot)).path or Path())] == [WEIGHTS]
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../../outside.safetensors")
    with pytest.raises(ModelError, match="leads out of"):
        resolve(str(snapshot))
