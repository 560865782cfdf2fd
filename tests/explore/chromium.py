"""A real Chromium (QtWebEngine) that opens a page, runs scripts in it and reports what it printed and requested."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu --log-level=3")

from PySide6.QtCore import QEventLoop, QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_DEADLINE_MS = 120_000


class _Page(QWebEnginePage):
    def __init__(self, console: list[str]) -> None:
        super().__init__()
        self._console = console

    def javaScriptConsoleMessage(self, _level: Any, message: str, line: int, _source: str) -> None:  # noqa: N802
        self._console.append(f"line {line}: {message}")


class _Requests(QWebEngineUrlRequestInterceptor):
    def __init__(self, requested: list[str]) -> None:
        super().__init__()
        self._requested = requested

    def interceptRequest(self, info: Any) -> None:  # noqa: N802
        self._requested.append(info.requestUrl().toString())


@dataclass
class Chromium:
    """One window."""

    width: int = 1200
    height: int = 1400
    console: list[str] = field(default_factory=list)
    """What pages printed to the console, errors included."""
    requested: list[str] = field(default_factory=list)
    """Every address that was requested, the pages themselves included."""

    def __post_init__(self) -> None:
        self._app = QApplication.instance() or QApplication(sys.argv[:1])
        self._view, self._page = QWebEngineView(), _Page(self.console)
        self._requests = _Requests(self.requested)
        self._page.setUrlRequestInterceptor(self._requests)
        self._view.setPage(self._page)
        self._view.resize(self.width, self.height)
        self._view.show()

    def open(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        self._wait(lambda done: self._page.loadFinished.connect(done), lambda: self._page.load(QUrl(address)))

    def run(self, script: str) -> Any:
        """Return the value of a script; a value that is not text or a number must be JSON text."""
        values: list[Any] = []

        def start(done: Any) -> None:
            self._page.runJavaScript(script, 0, lambda value: (values.append(value), done()))

        self._wait(start)
        return values[0]

    def save(self, file: Path) -> None:
        """Write the window as a picture."""
        self.pause(500)
        self._view.grab().save(str(file))

    def pause(self, milliseconds: int) -> None:
        """Let the page work."""
        loop = QEventLoop()
        QTimer.singleShot(milliseconds, loop.quit)
        loop.exec()

    def close(self) -> None:
        self._view.close()
        self._view.deleteLater()
        self._page.deleteLater()
        self.pause(50)

    def _wait(self, start: Any, then: Any = None) -> None:
        loop = QEventLoop()
        late: list[bool] = []
        timer = QTimer(singleShot=True)
        timer.timeout.connect(lambda: (late.append(True), loop.quit()))
        timer.start(_DEADLINE_MS)
        start(lambda *_: loop.quit())
        if then:
            then()
        loop.exec()
        if late:
            raise TimeoutError("the page did not answer")
