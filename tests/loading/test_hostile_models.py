"""Strangers' models: each ends in one line and exit code 2, soon and in little memory, and nothing of theirs is run."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_models import CHECKPOINTS, CONFIGS, GGUFS, MARK, SAYS, WEIGHTS, Spoil, config, pickled, remote_code
from yardstick import yardstick_s

from profiler.errors import ModelError
from profiler.loading.checkpoint import resolve_weights, weight_files
from profiler.loading.config import config_from
from profiler.loading.gguf_header import check_gguf
from profiler.loading.source import resolve

_MOST_YARDSTICKS = 165
# Beside the half gigabyte that the libraries take: under 1 GB in all.
_MOST_KIB = 500_000
_RUN = ("--prompt-lens", "8", "--batch-sizes", "1", "--new-tokens", "4", "--budget", "0.1")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_folder / WEIGHTS, tmp_path / "outside.safetensors")
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def _refused(roofscope, says: str, *arguments: str) -> None:  # type: ignore[no-untyped-def]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: that of another test would hide this one's
    used_kib = _peak_kib()
    start_s = time.process_time()
    found = roofscope(*arguments)
    assert time.process_time() - start_s < _MOST_YARDSTICKS * yardstick_s()
    assert _peak_kib() - used_kib < _MOST_KIB
    assert found.code == 2, found
    assert found.out == ""
    [line] = found.err.splitlines()
    assert line.startswith("roofscope: ")
    assert says in line


def _peak_kib() -> int:
    """The most memory since the peak was taken back (proc(5): VmHWM)."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


@pytest.fixture(autouse=True)
def _depth_of_a_fresh_process() -> Iterator[None]:
    """Libraries raise the limit for themselves: behind a test that compiled, what is nested too deeply is not."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("name", CONFIGS)
def test_config(roofscope, folder: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    CONFIGS[name](folder)
    _refused(roofscope, SAYS[name], "count", str(folder))
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(roofscope, folder: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    CHECKPOINTS[name](folder)
    out = folder.parent / "run"
    _refused(roofscope, SAYS[name], "run", str(folder), *_RUN, "--out", str(out))
    assert not out.exists()
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("name", GGUFS)
def test_gguf(roofscope, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "model.gguf"
    file.write_bytes(GGUFS[name])
    _refused(roofscope, SAYS[name], "count", str(file))


def test_a_whole_gguf_file_is_let_through(gguf_file: Path) -> None:
    start_s = time.process_time()
    check_gguf(gguf_file)
    assert time.process_time() - start_s < _MOST_YARDSTICKS * yardstick_s()


@pytest.mark.parametrize("spoil", [remote_code(), remote_code(architectures=["OwnModel"])])
def test_own_code_of_a_known_type_is_left_out(roofscope, folder: Path, spoil: Spoil) -> None:  # type: ignore[no-untyped-def]
    """transformers knows the type itself, so that the model counts as it would without the code beside it."""
    plain = json.loads(roofscope("count", str(folder), "--prompt", "64", "--format", "json").out)
    spoil(folder)
    assert json.loads(roofscope("count", str(folder), "--prompt", "64", "--format", "json").out) == plain
    assert not (folder / MARK).exists()
    assert "modeling_own" not in sys.modules


def test_own_code_runs_where_it_is_trusted(roofscope, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The mark is no accident: with --trust-remote-code the very same folder leaves it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
    remote_code(model_type="own")(folder)
    roofscope("count", str(folder), "--trust-remote-code")
    assert (folder / MARK).exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"attn_implementation": "stranger/kernel"}, "stranger/kernel"),
    ],
)
def test_the_config_that_a_run_folder_kept(tiny_folder: Path, changes: dict[str, object], says: str) -> None:
    """A stranger's run folder holds one, from which other cells are counted."""
    content = json.loads((tiny_folder / "config.json").read_text())
    with pytest.raises(ModelError, match=says):
        config_from({**content, **changes}, "run/config.json")
    named = {"AutoModelForCausalLM": "stranger/repository--modeling_own.OwnModel"}
    assert not hasattr(config_from({**content, "auto_map": named}, "run/config.json"), "auto_map")


@pytest.mark.parametrize(("method", "linear"), [("bitnet", "BitLinear"), ("metal", "MetalLinear")])
def test_a_format_without_a_rule_is_named(roofscope, folder: Path, method: str, linear: str) -> None:  # type: ignore[no-untyped-def]
    """transformers plans it, and nobody here knows its bytes: the linears are left out, and each is said to be."""
    config(quantization_config={"quant_method": method})(folder)
    found = roofscope("count", str(folder), "--prompt", "64", "--format", "json")
    counted = json.loads(found.out)
    assert found.code == 0
    assert sum(linear in unknown for unknown in counted["unknown"]) == 7, "four of attention, three of the MLP"


def test_a_pickle_that_is_not_called_one_is_no_checkpoint(folder: Path) -> None:
    pickled("model.pt")(folder)
    assert weight_files(folder) == []
    assert resolve_weights(resolve(str(folder)), "auto") == "random"


def test_the_hubs_own_cache_is_made_of_links(folder: Path) -> None:
    """A snapshot's files are links to its neighbour's blobs; those of another model's are not."""
    cached = folder.parent / "models--a--b"
    (cached / "blobs").mkdir(parents=True)
    snapshot = cached / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, cached / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert [file.name for file in weight_files(resolve(str(snapshot)).path or Path())] == [WEIGHTS]
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../../outside.safetensors")
    with pytest.raises(ModelError, match="leads out of"):
        resolve(str(snapshot))
