"""Texts that strangers wrote, as every output may hold them."""

from __future__ import annotations

from typing import Any


def visible(text: str) -> str:
    """A text on one line, in which nothing acts on what shows it: control characters (a terminal's escapes, NUL), signs
    that turn the direction of writing and lone surrogates stand as their escapes, line ends and tabs as spaces.
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else " " if sign.isspace() else _escape(sign) for sign in text)


def visible_in(content: Any) -> Any:
    """Parsed JSON with every text and key in it `visible`. Raises RecursionError for what is nested too deeply."""
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, dict):
        return {visible_in(key): visible_in(value) for key, value in content.items()}
    if isinstance(content, list):
        return [visible_in(value) for value in content]
    return content


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode()
