"""Draw docs/images/report.png, the first page of an H200's report: `python -m tests.readme_picture`, with Chromium."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from PIL import Image

from profiler.report.write import html_report
from profiler.run.judge_folder import judge_folder
from tests.browser import dumped, photographed

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/report.png"
WIDTH = 1080
SIZE = f"--window-size={WIDTH},2400"
PROBE = """
<script>
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = Math.round(document.querySelector("svg").getBoundingClientRect().bottom);
document.body.append(probe);
</script>
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(ROOT / "runs/reference/mistral-7b-h200-default", Path(folder) / "run"))
        page, html = run / "report.html", html_report(judge_folder(run))
        below = int(dumped(html, PROBE, page, SIZE))
        page.write_text(html, encoding="utf-8")
        photographed(page, PICTURE, SIZE)
    Image.open(PICTURE).crop((0, 0, WIDTH, below + 4)).save(PICTURE, optimize=True)
