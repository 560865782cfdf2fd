"""Write every screen again; review the diff before you commit it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .screens import FOLDER, SCREENS, screen_of, working_folder

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, working_folder(Path(folder)):
        for name, (command, columns, colours) in SCREENS.items():
            shown = screen_of(command, columns, colours=colours)
            (FOLDER / f"{name}.txt").write_text(f"$ roofscope {command}\n\n{shown}", encoding="utf-8")
