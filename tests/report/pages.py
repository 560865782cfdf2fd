"""A parsed HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Collects the elements in order, the elements that are still open, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def count(self, tag: str, css_class: str = "") -> int:
        classes = [(attrs.get("class") or "").split() for name, attrs in self.tags if name == tag]
        return sum(not css_class or css_class in names for names in classes)
