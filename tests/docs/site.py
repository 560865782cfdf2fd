"""A hook of mkdocs: links to files outside docs/ work in the built site, too.

In the repository they are relative paths. The site has a copy of each linked picture, and shows other files' paths.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return a page's text: pictures outside docs/ are copied into the site, other links there become plain text."""
    folder = (DOCS / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[3].partition("#")[0]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        name = target.relative_to(ROOT).as_posix()
        if not found[1]:
            return found[2] if name in found[2] else f"{found[2]} (`{name}`)"
        copy = Path(config["site_dir"]) / "outside" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, copy)
        here = (Path(config["site_dir"]) / page.file.dest_uri).parent
        return f'<img alt="{found[2]}" src="{os.path.relpath(copy, here)}">'

    return _LINK.sub(replaced, markdown)
