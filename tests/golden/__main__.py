"""Write every screen again, and the one that README shows; review the diff before you commit it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .screens import FOLDER, ROOT, SCREENS, screen_of, working_folder

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, working_folder(Path(folder)):
        for name, (command, columns, colours) in SCREENS.items():
            shown = screen_of(command, columns, colours=colours)
            (FOLDER / f"{name}.txt").write_text(f"$ roofscope {command}\n\n{shown}", encoding="utf-8")
    screen = (FOLDER / "judge-h200-default.txt").read_text(encoding="utf-8")
    sample = screen.partition("\n\n")[2].partition("\nrun: ")[0].rstrip()
    readme = ROOT / "README.md"
    before, command, after = readme.read_text(encoding="utf-8").partition("$ roofscope run mistral-7b-v0.1\n")
    readme.write_text(f"{before}{command}{sample}\n{after[after.index('[...]') :]}", encoding="utf-8")
