"""Write the page of `explore`: one HTML file that opens offline."""

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from profiler import report
from profiler.errors import RequestError
from profiler.explore.document import ExploreDocument

_FOLDER = Path(__file__).parent
_STYLE = Path(report.__file__).parent / "templates" / "style.css"
MOST_BYTES = 1_000_000


def explore_page(document: ExploreDocument) -> str:
    """Return the page of a model, which allows no connection. Raises RequestError for one of more than MOST_BYTES."""
    script = (_FOLDER / "explore.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    content = json.dumps(asdict(document), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    page = environment.get_template("explore.html.j2").render(
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
    if (nbytes := len(page.encode())) > MOST_BYTES:
        raise RequestError(
            f"this page would have {nbytes / 1e6:.1f} MB, and at most {MOST_BYTES / 1e6:.0f} MB are possible;"
            " name fewer with --gpu or --quant."
        )
    return page
