"""The page of `explore`: one HTML file that opens offline."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from profiler import report
from profiler.explore.document import ExploreDocument

_FOLDER = Path(__file__).parent
_STYLE = Path(report.__file__).parent / "templates" / "style.css"


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, undefined=StrictUndefined)


def explore_page(document: ExploreDocument) -> str:
    """Return the page of a model. Its policy allows its own style and script, and no connection."""
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("theory.js", "explore.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = json.dumps(asdict(document), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        _environment()
        .get_template("explore.html.j2")
        .render(
            document=document,
            # Ours, not a user's: the script and the style of this package, and JSON without a `<`.
            script=Markup(script),
            style=Markup(_STYLE.read_text(encoding="utf-8")),
            document_json=Markup(content),
            policy=(
                f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none';"
                " form-action 'none'"
            ),
        )
    )
