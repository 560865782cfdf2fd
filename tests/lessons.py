"""Run notebooks whole, and keep what they show.

`python -m tests.lessons 03 08` runs those two, each in a fresh folder, and writes their outputs into the files.
A picture keeps a digest of the notebook's code up to it, which `tests/test_notebooks.py` reads, and a notebook how long
it ran. No cell draws one of roofscope's own pictures, so a change of those needs no new run.
"""

import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MEASURED = "measured"
"""The tag of a cell whose output is another one each time: it has times of the machine that it runs on."""


def pictures(notebook: NotebookNode) -> Iterator[tuple[str, NotebookNode]]:
    """Yield each picture with the digest of the code that draws it: the notebook's up to there."""
    code = ""
    for cell in notebook.cells:
        code += cell.source if cell.cell_type == "code" else ""
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield hashlib.sha256(code.encode()).hexdigest()[:16], output


def computed(notebook: NotebookNode) -> list[str]:
    """The text of each cell that measures nothing: the same on every machine without a GPU, but in pieces by chance."""
    texts = (
        "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code" and MEASURED not in cell.metadata.get("tags", [])
    )
    return list(filter(None, texts))


def run(path: Path) -> None:
    """Run a notebook in an empty folder, and write its outputs, digests and seconds into the file."""
    notebook = nbformat.read(path, 4)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}, record_timing=False)
        client.execute()
    notebook.metadata["seconds"] = round(time.perf_counter() - began)
    for cell in notebook.cells:
        if "outputs" in cell:  # torch's profiler marks its start and its end on stderr
            cell.outputs = [output for output in cell.outputs if not output.get("text", "").startswith("USDT:")]
    for digest, output in pictures(notebook):
        output.metadata["drawn_by"] = digest
    nbformat.write(notebook, path)
    print(f"{path.stem}: {notebook.metadata['seconds']} s")


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if path.stem[:2] in sys.argv[1:]:
            run(path)
