"""A missing package disables only the features that need it; each names the command that installs it in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hidden import hide
from simulated.native import why_not
from simulated.scenario import Scenario, said
from simulated.truth import H100

from profiler import packages
from profiler.errors import RequestError
from profiler.loading.config import load_config
from profiler.loading.meta_model import build_on_meta
from profiler.loading.source import resolve
from profiler.quant.checkpoints import published_format
from profiler.quant.formats import can_quantise, need_library

HIDDEN = Path(__file__).parents[1] / "hidden.py"
OPTIONAL = ("bitsandbytes", "torchao", "compressed-tensors", "gguf")
GRID = ("--prompt-lens", "8", "--batch-sizes", "1", "--new-tokens", "4", "--budget", "0.1")


def without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process that cannot find `package`."""
    command = [sys.executable, str(HIDDEN), package, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def packed_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder whose config says that its weights are 8-bit integers of compressed-tensors."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    options = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return tmp_path


@pytest.fixture
def gguf_header(tmp_path: Path) -> Path:
    """A GGUF file with the header of a model of one layer, written by ggml's library."""
    from gguf import GGUFWriter

    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(1)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return file


def refused(package: str, request: pytest.FixtureRequest) -> tuple[tuple[str, ...], str]:
    """Return a command that needs `package`, and its error line without it."""
    if package == "compressed-tensors":
        folder = request.getfixturevalue("packed_folder")
        assert published_format(load_config(resolve(str(folder)))) == package
        command, feature = ("count", str(folder)), "a checkpoint stored as compressed-tensors"
    elif package == "gguf":
        command, feature = ("count", str(request.getfixturevalue("gguf_header"))), "a GGUF file"
    else:
        quant = {"bitsandbytes": "nf4", "torchao": "int8wo"}[package]
        command, feature = ("count", "gpt2", "--quant", quant), f"--quant {quant}"
    return command, f"roofscope: {feature} needs {package}: pip install {package}."


@pytest.mark.parametrize("package", OPTIONAL)
def test_a_feature_without_its_package_says_how_to_install_it(
    package: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]
) -> None:
    arguments, line = refused(package, request)
    hide(monkeypatch, package)
    done = roofscope(*arguments)
    assert (done.code, done.err.strip()) == (2, line)


@pytest.mark.parametrize(
    ("quant", "package"), [("int8", "bitsandbytes"), ("nf4", "bitsandbytes"), ("int4wo", "torchao"), ("fp8", "torchao")]
)
def test_a_run_in_a_format_without_its_library_is_refused_before_it_loads(
    tiny_folder: Path, quant: str, package: str, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]
) -> None:
    hide(monkeypatch, package)
    done = roofscope("run", str(tiny_folder), "--quant", quant, *GRID)
    assert (done.code, done.err.strip()) == (2, f"roofscope: --quant {quant} needs {package}: pip install {package}.")


def test_a_package_that_is_too_old_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao 0.15 to 0.17 have no `PrototypeInt4WeightOnlyConfig`, which int4wo uses on a CPU (torchao 0.18)."""
    monkeypatch.setattr(packages, "requirement_texts", lambda: ["torch>=2.7", "torchao>=0.18; extra == 'formats'"])
    monkeypatch.setattr(metadata, "version", {"torchao": "0.17.0", "torch": "2.13.0"}.__getitem__)
    with pytest.raises(RequestError, match=r"torchao 0\.17\.0 is too old for it: pip install 'torchao>=0\.18'\.$"):
        need_library("int4wo")
    assert not can_quantise("int4wo"), "no lever tries it"


def test_a_torchao_that_does_not_import_with_this_torch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao 0.18 imports a name that came with torch 2.10; with torch 2.7 to 2.9 that raises ImportError."""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(RequestError, match=r"torchao .* cannot be imported with torch .*newer torch"):
        build_on_meta(load_config(resolve("smollm2-135m")), torch.bfloat16, "int8wo")


@pytest.mark.slow
@pytest.mark.parametrize("package", OPTIONAL)
def test_other_runs_work_without_the_package(
    tiny_folder: Path, tmp_path: Path, package: str, request: pytest.FixtureRequest
) -> None:
    """The runs are in a new process, which never imported the package."""
    out = tmp_path / "run"
    done = without(package, "run", str(tiny_folder), *GRID, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "run.json").read_text())["finished"]
    arguments, line = refused(package, request)
    done = without(package, *arguments)
    assert (done.returncode, done.stderr.strip()) == (2, line)


@pytest.mark.slow
def test_without_accelerate_no_model_loads_but_one_is_counted(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers needs accelerate for any `device_map`."""
    assert without("accelerate", "count", "gpt2").returncode == 0
    done = without("accelerate", "run", str(tiny_folder), *GRID, "--out", str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == "roofscope: loading a model needs accelerate: pip install accelerate."


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_run_on_a_gpu_does_not_need_bitsandbytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A 16-bit run does not query the library for 4 bits."""
    from simulated import four_bit

    from profiler.quant.storage import four_bit_rows

    hide(monkeypatch, "bitsandbytes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # a simulated roof must not be cached
    for cached in (four_bit.table, four_bit_rows):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    run, _ = said(Scenario("smollm2-135m", 1, prompt_lens=[64], batch_sizes=[1]), [H100], tmp_path)
    assert run.document.finished
    assert run.document.model.four_bit_dense_from_rows is None


def test_a_bitsandbytes_that_does_not_import_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens if its CUDA runtime is missing."""

    def broken() -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("profiler.quant.formats.import_bitsandbytes", broken)
    with pytest.raises(RequestError, match=r"nf4: bitsandbytes cannot be imported \(libcudart\.so\.13: cannot"):
        build_on_meta(load_config(resolve("smollm2-135m")), torch.bfloat16, "nf4")


def test_why_the_table_of_4_bit_kernels_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A run on a GPU lists the table among its missing parts; a CPU has no table."""
    from profiler.quant.storage import _four_bit_table, four_bit_rule_error

    _four_bit_table.cache_clear()
    request.addfinalizer(_four_bit_table.cache_clear)
    monkeypatch.setitem(sys.modules, "bitsandbytes.backends.cuda", None)
    assert "bitsandbytes.backends.cuda" in four_bit_rule_error(torch.device("cuda"))
    assert four_bit_rule_error(torch.device("cpu")) == ""


def test_a_gpu_that_does_not_respond_once_is_counted_by_one_rule_and_named(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The table fuses up to 8 rows; without it, 4 are assumed for each linear, not only for the first."""
    from profiler.quant.storage import _four_bit_table, four_bit_rows, four_bit_rule_error

    asked = iter([RuntimeError("CUDA unknown error")])

    def fuses(_index: int, _dtype: torch.dtype, rows: int, *_: int) -> bool:
        if rows <= 4:
            return True  # bitsandbytes answers this without a look at the GPU
        for error in asked:
            raise error
        return rows <= 8

    ops = SimpleNamespace(_gemm_4bit_use_custom_fn=fuses, _gemm_4bit_custom_max_m=32)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(__version__="0.50.2"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.backends.cuda", SimpleNamespace(ops=ops))
    monkeypatch.setattr("profiler.quant.storage.import_bitsandbytes", lambda: None)
    gpu = torch.device("cuda", 0)

    def forget() -> None:
        for cached in (_four_bit_table, four_bit_rows):
            cached.cache_clear()

    request.addfinalizer(forget)
    for error, dense_from in (("CUDA unknown error", 5), ("", 9)):
        forget()
        found = [four_bit_rows(gpu, torch.float16, ins, 64) for ins in (64, 128)]
        assert [rows and rows.dense_from for rows in found] == [dense_from, dense_from]
        assert error in four_bit_rule_error(gpu)
        assert bool(four_bit_rule_error(gpu)) == bool(error)
