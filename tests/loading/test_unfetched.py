"""Packages that are missing or broken disable only their features; a run of a hub's model connects to that hub only."""

import json
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hostile_models import config, gguf, layers, named
from loaded import on_meta

from profiler import packages
from profiler.errors import RequestError
from profiler.quant.bitsandbytes import four_bit_fuses_on_cpu, import_bitsandbytes
from profiler.quant.registry import can_quantise, need_library


def hide(patch: pytest.MonkeyPatch, package: str) -> None:
    """Hide `package`, named as `pip install` names it, from `import` and from `importlib.metadata`."""
    original = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name.replace("_", "-").lower() == package:
            raise metadata.PackageNotFoundError(name)
        return original(name)

    module = package.replace("-", "_")
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, module, None)
    patch.setattr(metadata.Distribution, "from_name", from_name)


FEATURES = {
    "bitsandbytes": "--quant nf4", "torchao": "--quant int8wo", "gguf": "a GGUF file",
    "compressed-tensors": "a checkpoint stored as compressed-tensors",
}  # fmt: skip


@pytest.mark.parametrize("package", FEATURES)
def test_a_feature_without_its_package_says_how_to_install_it(
    package: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roofscope: Callable[..., Any]
) -> None:
    """The GGUF file has the header of a model of one layer; the checkpoint's weights are 8-bit integers."""
    model = tmp_path / ("tiny.gguf" if package == "gguf" else "tiny")
    if package == "gguf":
        model.write_bytes(gguf(0, 2, named(b"llama") + layers(b"llama", 1)))
    elif package == "compressed-tensors":
        shutil.copytree(tiny_folder, model)
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        options = {"quant_method": package, "format": "pack-quantized", "config_groups": groups}
        config(quantization_config=options)(model)
    hide(monkeypatch, package)
    feature = FEATURES[package]
    done = roofscope("count", *(("gpt2", *feature.split()) if "--" in feature else (str(model),)))
    assert (done.code, done.err.strip()) == (2, f"roofscope: {feature} needs {package}: pip install {package}.")


def test_a_package_that_is_too_old_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao 0.15 to 0.17 have no `PrototypeInt4WeightOnlyConfig`, which int4wo uses on a CPU (torchao 0.18)."""
    monkeypatch.setattr(packages, "requirement_texts", lambda: ["torch>=2.7", "torchao>=0.18; extra == 'formats'"])
    monkeypatch.setattr(metadata, "version", {"torchao": "0.17.0", "torch": "2.13.0"}.__getitem__)
    with pytest.raises(RequestError, match=r"torchao 0\.17\.0 is too old for it: pip install 'torchao>=0\.18'\.$"):
        need_library("int4wo")
    assert not can_quantise("int4wo"), "no change tries it"


@pytest.mark.parametrize(
    ("quant", "words"),
    [
        ("int8wo", r"torchao .* cannot be imported with torch .*newer torch"),
        ("nf4", r"nf4: bitsandbytes cannot be imported \(libcudart\.so\.13: cannot"),
    ],
)
def test_a_library_that_does_not_import_is_one_line(monkeypatch: pytest.MonkeyPatch, quant: str, words: str) -> None:
    """torchao 0.18 imports a name that came with torch 2.10; bitsandbytes may lack its CUDA runtime."""
    broken = Mock(side_effect=ImportError("libcudart.so.13: cannot open shared object file: No such file or directory"))
    monkeypatch.setattr("profiler.quant.bitsandbytes.import_bitsandbytes", broken)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(RequestError, match=words):
        on_meta("smollm2-135m", quant=quant)


TESTS = Path(__file__).parents[1]
# Reports the target of each connection, and each name that is looked up.
WATCHED = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        where = arguments[1] if event == "socket.connect" else arguments[:2]
        os.write(2, f"TO {where[0]}:{where[1]}\\n".encode())

sys.addaudithook(watch)
import pytest
from hurry import hurry
from profiler.cli.app import main
hurry(pytest.MonkeyPatch())
main()
"""
GRID = ("--prompt-lens", "8", "--batch-sizes", "1", "--new-tokens", "4", "--budget", "0.1")


@pytest.mark.parametrize("loaded", [None, types.ModuleType("kernels")])
def test_kernels_are_hidden_while_bitsandbytes_is_imported(
    monkeypatch: pytest.MonkeyPatch, loaded: types.ModuleType | None
) -> None:
    """transformers may have imported the package before; it is restored afterwards."""
    seen: list[object] = []
    finder = types.SimpleNamespace(find_spec=lambda *_: seen.append(sys.modules.get("kernels", "absent")))
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "kernels", loaded)
    monkeypatch.setattr(sys, "meta_path", [finder])
    with pytest.raises(ImportError):
        import_bitsandbytes()
    assert seen == [None]
    assert sys.modules.get("kernels") is loaded


def test_the_library_and_the_package_agree_on_this_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the package loads another library")
    assert four_bit_fuses_on_cpu() == bool(import_bitsandbytes().has_avx512bf16())


@pytest.fixture
def hub(tiny_folder: Path) -> Iterator[str]:
    """A hub with one model, `owner/tiny`. It serves files only, by https://huggingface.co/docs/hub/api."""

    class Hub(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(tiny_folder / (Path(path).name if path.startswith("/owner/tiny/resolve/main/") else "missing"))

        def send_error(self, *_: object) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()

        def end_headers(self) -> None:
            self.send_header("ETag", f'"{Path(self.path).name}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            super().end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_model_of_a_hub_connects_to_that_hub_only(hub: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://{hub}", "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", WATCHED, "run", "owner/tiny", *GRID, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    reached = {line.removeprefix("TO ") for line in done.stderr.splitlines() if line.startswith("TO ")}
    assert reached == {hub}
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (document["model"]["id"], document["model"]["weights"]) == ("owner/tiny", "checkpoint")
