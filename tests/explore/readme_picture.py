"""Draw docs/images/report.png, the first page of an H200's report: `python -m tests.explore.readme_picture`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from PIL import Image

from profiler.report.write import html_report
from profiler.run.judge_folder import judge_folder
from tests.explore.chromium import Chromium

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/report.png"
WIDTH = 1080

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(ROOT / "runs/reference/mistral-7b-h200-default", Path(folder) / "run"))
        page = run / "report.html"
        page.write_text(html_report(judge_folder(run)), encoding="utf-8")
        window = Chromium(WIDTH, 2400)
        window.open(page.as_uri())
        window.run("document.documentElement.style.overflow = 'hidden'")
        window.pause(500)
        below = int(window.run("document.querySelector('svg').getBoundingClientRect().bottom"))
        window.save(PICTURE)
    Image.open(PICTURE).crop((0, 0, WIDTH, below + 4)).save(PICTURE, optimize=True)
