"""Options of commands: fields of frozen dataclasses, each with its help; the command line is made from them."""

import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, field
from typing import Any

from profiler.errors import RequestError, near_misses

DTYPE_NAMES = ("float32", "bfloat16", "float16")


def option(
    default: Any,
    text: str,
    *,
    flag: str = "",
    short: str = "",
    shown: str = "",
    metavar: str = "",
    is_model: bool = False,
) -> Any:
    """A field that is an option: its default and its help; its flag and displayed default if they differ.

    A shell completes the name of a preset for a model.
    """
    facts = {"help": text, "flag": flag, "short": short, "shown": shown, "metavar": metavar, "is_model": is_model}
    return field(default=default, metadata={**facts, "is_argument": False})


def argument(text: str, metavar: str = "", *, default: Any = MISSING, shown: str = "", is_model: bool = False) -> Any:
    """A field that is an argument of a command line: its help, and its name in the usage if that differs."""
    facts = {"help": text, "shown": shown, "metavar": metavar, "is_model": is_model, "is_argument": True}
    return field(default=default, metadata=facts)


def model_argument(default: Any = MISSING, shown: str = "") -> Any:
    """A field that names a model."""
    return argument("Hub id, folder, .gguf file, or a preset's name.", default=default, shown=shown, is_model=True)


def flag_of(item: Field[Any]) -> str:
    """Return the command line's name of an option."""
    name: str = item.metadata.get("flag") or item.name
    return name if name.startswith("-") else "--" + name.replace("_", "-")


def listed(text: str) -> list[str]:
    """Return the names in a list with commas, such as `none,nf4`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def one_of(value: str, option: str, known: Iterable[str]) -> None:
    """Raise RequestError with similar values if `value` is not in `known`."""
    if value not in known:
        raise RequestError(f"{option} {value!r} is unknown; use {', '.join(known)}.{near_misses(value, known)}")


def check_device_name(name: str) -> None:
    """Raise RequestError for a device that is none of `auto`, `cpu`, `cuda` and `cuda:N`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise RequestError(f"--device {name!r} is unknown; use auto, cpu, cuda or cuda:N.")
