"""A real Chromium, if this machine has one: it opens a page, runs a probe in it, and prints what became of it."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


def opened(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page, and print its document as it is then."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)


def dumped(html: str, probe: str, page: Path, *options: str) -> str:
    """Return the text that a probe wrote into a page under the page's own policy. A console message is an error."""
    own = probe.strip().removeprefix("<script>").removesuffix("</script>")
    allowed = f"script-src 'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}' "
    text = html.replace("script-src ", allowed, 1).replace("</body>", probe + "</body>")
    page.write_text(text, encoding="utf-8")
    done = opened(page, "--enable-logging=stderr", *options)
    assert "CONSOLE" not in done.stderr
    return done.stdout.split('<pre id="probe">')[1].split("</pre>")[0]
