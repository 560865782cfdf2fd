"""Detect the kind of another tool's file by its content, and read it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from profiler.errors import RequestError
from profiler.readers.csv_table import CSV_COLUMNS, CSV_TABLE
from profiler.readers.figures import ForeignFile, refuse_impossible, shared_gpus
from profiler.readers.formats import Format
from profiler.readers.json_tools import JSON_TOOLS
from profiler.readers.llama_batched_bench import LLAMA_BATCHED_BENCH
from profiler.readers.llama_bench import LLAMA_BENCH
from profiler.readers.llama_benchy import LLAMA_BENCHY
from profiler.readers.sources import Source, sources_of, text_of
from profiler.readers.values import Record, apart, escaped

FORMATS: Sequence[Format] = (*LLAMA_BENCHY, *LLAMA_BENCH, *LLAMA_BATCHED_BENCH, *JSON_TOOLS, CSV_TABLE)
"""Every kind of file. The first that knows a file reads it, so more specific ones come first."""

# Texts that people paste, which lack a shape or a number of requests: what they are, and what writes a file instead.
_REFUSED = (
    (r"Avg generation throughput:", "the log of a vLLM server", "`vllm bench serve --save-result`"),
    (r"gen throughput \(token/s\):", "the log of an SGLang server", "`sglang.bench_serving --output-file FILE`"),
    (r"Throughput: [\d.]+ requests/s", "the screen of `vllm bench throughput`", "its option `--output-json FILE`"),
    (r"(?:Prefill|Decode)\. .*latency:", "the screen of SGLang's bench_one_batch", "its option `--result-filename`"),
    (r"eval time =.*tokens per second", "a log of llama.cpp", "`llama-bench -o json`"),
    (r"INSERT INTO \w+ \(build_commit", "llama-bench's SQL", "`llama-bench -o json`"),
    (r"^eval rate:", "what `ollama run --verbose` prints", "`llama-bench -o json`"),
)


def tools() -> str:
    """The names of all kinds of result files as one text, for messages."""
    names = dict.fromkeys(each.tool for each in FORMATS if each is not CSV_TABLE)
    return f"{', '.join(names)} or a CSV with {CSV_COLUMNS}"


def read_foreign(path: Path) -> ForeignFile:
    """Read another tool's result file. Raises RequestError if it is broken, too large, or of no known tool."""
    text = text_of(path)
    found: list[ForeignFile] = []
    first: Record = {}
    for sources in _groups(path, text):
        first = first or next((source.records[0] for source in sources), {})
        if found := [file for source in sources if (file := _read(path, source)) is not None]:
            break
    if not found:
        has = f" (it has {escaped(', '.join(map(str, first)))[:120]})" if first else ""
        raise RequestError(_refusal(path, text) or f"{path} is not a known result file{has}; use one of {tools()}.")
    if len(names := sorted({file.tool for file in found})) > 1:
        raise RequestError(f"{path} has results of {' and '.join(names)}; give each a file.")
    try:
        shared_gpus((file.gpus, file.stages) for file in found)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    file = replace(_joined(found), name=str(path))
    if not file.figures:
        raise RequestError(f"{path}: {file.tool} wrote no time of a prefill or a decode into it.")
    return file


def _groups(path: Path, text: str) -> Iterator[list[Source]]:
    """`sources_of` a text; one without a source, such as a log with a quote, is refused by its name if it has one."""
    try:
        yield from sources_of(path, text)
    except RequestError as error:
        raise RequestError(_refusal(path, text) or str(error)) from None


def _read(path: Path, source: Source) -> ForeignFile | None:
    for each in FORMATS:
        try:
            result = each.read(source)
            if result is not None:
                if source.fault:
                    raise RequestError(source.fault)
                refuse_impossible(result.figures)
                return replace(result, remarks=(*result.remarks, *source.remarks))
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
            raise RequestError(f"{path} is damaged: {type(error).__name__}: {escaped(error)}.") from None
    return None


def _joined(files: Sequence[ForeignFile]) -> ForeignFile:
    """The tables of one file as one; settings that differ between them, or their numbers, tell their rows apart."""
    if len(files) == 1:
        return files[0]
    rows = [(str(number), file, figure) for number, file in enumerate(files, 1) for figure in file.figures]
    shared, differing = apart([{**file.settings, **dict(figure.settings)} for _, file, figure in rows])
    figures = [replace(figure, settings=own) for (_, _, figure), own in zip(rows, differing, strict=True)]
    cells = {(f.covers, f.batch_size, f.prompt_len, f.context_len, f.new_tokens, f.settings) for f in figures}
    if len(cells) < len(figures):
        figures = [
            replace(figure, settings=(("table", number), *figure.settings))
            for (number, _, _), figure in zip(rows, figures, strict=True)
        ]
    remarks = tuple(dict.fromkeys(remark for file in files for remark in file.remarks))
    return replace(files[0], figures=figures, settings=shared, remarks=remarks)


def _refusal(path: Path, text: str) -> str | None:
    """What to do with a text that is known, but has no shapes; None for any other."""
    for pattern, what, option in _REFUSED:
        if re.search(pattern, text, re.MULTILINE):
            return (
                f"{path} is {what}, which does not name the shapes of its figures; write a file with {option}, or a CSV"
                f" with {CSV_COLUMNS}."
            )
    return None
