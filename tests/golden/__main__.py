"""Write every screen again, and the one that README shows in two parts; review the diff before you commit it."""

import tempfile
from pathlib import Path

from .screens import FOLDER, ROOT, SCREENS, screen_of, working_folder

COMMAND = "$ roofscope run mistral-7b-v0.1\n"
FOLD = "</summary>\n\n```console\n"
CUT = "[...]"
FEWEST = 6
"""Lines of the answer that README shows unfolded, at least; more to the end of a sentence."""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, working_folder(Path(folder)):
        for name, (command, columns, colours) in SCREENS.items():
            shown = screen_of(command, columns, colours=colours)
            (FOLDER / f"{name}.txt").write_text(f"$ roofscope {command}\n\n{shown}", encoding="utf-8")
    screen = (FOLDER / "judge-h200-default.txt").read_text(encoding="utf-8")
    lines = screen.partition("\n\n")[2].partition("\nmeasured for ")[0].rstrip().splitlines()
    first = next(number for number, line in enumerate(lines, 1) if number > FEWEST and line.endswith("."))
    readme = ROOT / "README.md"
    before, after = readme.read_text(encoding="utf-8").split(COMMAND)
    folded, rest = after[after.index(CUT) :].split(FOLD)
    shown, hidden = "\n".join(lines[:first]), "\n".join(lines[first:])
    text = f"{before}{COMMAND}{shown}\n{folded}{FOLD}{hidden}\n{rest[rest.index(CUT) :]}"
    readme.write_text(text, encoding="utf-8")
