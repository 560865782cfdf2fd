"""The teaching notebooks: each runs from top to bottom on a CPU, and uses only the package's formulas."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from lessons import NOTEBOOKS, computed, pictures
from nbclient import NotebookClient

import profiler

# What a reader must find in the outputs: datasheets and arithmetic, not this package's word.
FIGURES = {
    # Phi-3-mini's 7.65 GB and nf4's 2.44 over 320 GB/s; Qwen2.5-3B as bitsandbytes published it.
    "00_your_gpu_in_five_minutes": ["41.8", "23.9", "131.3", "39.0", "60.8", "42.2", "29.5", "80.9"],
    "01_arithmetic_intensity": ["295.3", "682.67", "346", "62.7", "4,294,967,296", "125.3"],
    # The H100's eager step in bfloat16, and in nf4 as a graph.
    "02_profile_mistral_7b": [
        "7.22", "14.29", "13.3", "203.1", "4.5", "131072.0", "204.0", "75.2", "24.33", "7.03", "14.9 GB",
    ],
    # 154 is the first batch above an A100's ridge of 153; the slopes are of doubled batches on an H100.
    "03_memory_bound_inference": ["327680.0", "0.34", "10.74", "1.70", "75.7", "154.0", "0.66", "0.94", "0.37"],
    "04_rooflines_by_dtype": ["306.0", "24.0", "60.82", "1214.68", "3.17", "1.64"],
    "05_attention_vs_ffn": ["1080.00", "206.12", "128256", "1246.6", "24.7", "89.9", "96.4"],
    "06_what_should_i_rent": ["83.88608", "7.0 ms", "14.5 GB", "142 GB", "70.6 B", "No GPU is the cheapest", "undated"],
    "07_why_is_my_script_slow": ["generate 2 x 128 + 6", "69 % of the tokens", "cache-off", "2 calls of generate"],
    # 2048 tokens of 4096 elements in 16 bits, 3,350 GB/s over the link, and 24.5 / (1 - 0.33).
    "08_more_than_one_gpu": ["16777.2", "12.7", "36.6", "29.3", "66.0"],
    # Eager and as a graph on an H100, an order on an H200, and 20 frames a second over 33.
    "09_the_third_regime": ["26.15", "8.70", "14.8 µs", "0.44", "0.61"],
}  # fmt: skip

ROOT = Path(__file__).parents[1]
PUBLIC = {"profiler", "profiler.theory", "profiler.rent"}
"""Public modules: notebooks import no others from this package."""


def shown(notebook: nbformat.NotebookNode, path: Path) -> str:
    """Return all that a notebook shows but pictures. Fails unless its figures are there, as whole numbers."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text", "") for output in outputs]
    texts += [data for output in outputs for kind, data in output.get("data", {}).items() if kind != "image/png"]
    text = "\n".join(map(str, texts))
    whole = r"(?<![\w.,]){}(?!\w|[.,]\d)"
    assert [figure for figure in FIGURES[path.stem] if not re.search(whole.format(re.escape(figure)), text)] == []
    return text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_what_was_computed(path: Path) -> None:
    """Committed outputs contain their figures, pictures of today's code, and neither errors nor paths of a machine."""
    notebook = nbformat.read(path, 4)
    assert not re.search(r"/(root|home|work|tmp)/", shown(notebook, path))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 1_500_000
    assert f"](../notebooks/{path.name})" in (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for digest, picture in pictures(notebook):
        assert picture.metadata.get("drawn_by") == digest, f"run `python -m tests.lessons {path.stem[:2]}`, and look"
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    imported = set(re.findall(r"^\s*(?:from|import) (profiler[\w.]*)", code, re.MULTILINE))
    assert imported <= PUBLIC


def test_the_quickstarts_seconds_and_steps_are_those_of_its_runs() -> None:
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\d+) s \| ([\d.]+) ms[\w ]* \| `([\w-]+)` \|", page)
    assert len(rows) == 4
    for seconds, step_ms, name in rows:
        run = profiler.read_run(ROOT / "runs/reference" / name)
        assert round(sum(run.document.stage_s.values())) == int(seconds)
        of_one = [item for item in run.measured if item.key.phase == "decode" and item.key.cell.batch_size == 1]
        assert step_ms in [f"{1e3 * item.latency_s:.3g}" for item in of_one]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One kernel with shortened runs for all notebooks, emptied between them: torch and transformers load only once.

    Trials of `why` have enough time on any machine.
    """
    manager, client = start_new_kernel(cwd=str(tmp_path_factory.mktemp("kernel")))
    hurried = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport pytest, hurry\n"
    reply = client.execute_interactive(hurried + "hurry.hurry(pytest.MonkeyPatch(), script_least_s=120.0)", timeout=120)
    assert reply["content"]["status"] == "ok"
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, kernel: KernelManager) -> None:
    notebook = nbformat.read(path, 4)
    kept = computed(notebook)
    of_pandas = "import pandas\npandas.reset_option('^display')\n"  # notebooks set some, and the kernel keeps them
    emptied = nbformat.v4.new_code_cell(f"{of_pandas}%reset -f\n%cd -q {tmp_path}")
    notebook.cells.insert(0, emptied)
    NotebookClient(notebook, timeout=300, km=kernel).execute(reset_kc=True)
    shown(notebook, path)
    assert computed(notebook) == kept, f"run `python -m tests.lessons {path.stem[:2]}`, and look at what changed"
    assert list(tmp_path.iterdir()) == [], "a notebook leaves no files"
