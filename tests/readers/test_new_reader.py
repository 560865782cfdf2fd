"""A new reader is one entry of `READERS`: its files are then read, and messages name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.errors import RequestError
from profiler.readers.detect import READERS, Reader, read_foreign, tools
from profiler.readers.figures import Figure, ForeignFile
from profiler.readers.sources import Source


def read_toy(source: Source) -> ForeignFile | None:
    if "toybench" not in source.records[0]:
        return None
    figure = Figure("decode", 0.01, batch_size=1, prompt_len=64, new_tokens=8)
    return ForeignFile("toybench", [figure])


def test_its_files_are_read_and_messages_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.readers.detect.READERS", [Reader("toybench", read_toy), *READERS])
    file = tmp_path / "toy.json"
    file.write_text('{"toybench": 1}')
    result = read_foreign(file)
    assert (result.tool, len(result.figures)) == ("toybench", 1)
    file.write_text('{"something": "else"}')
    assert tools().startswith("toybench, ")
    with pytest.raises(RequestError, match="toybench"):
        read_foreign(file)
