"""Detect the kind of another tool's file by its content, and read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiler.errors import RequestError
from profiler.readers.csv_table import CSV_COLUMNS, read_csv_table
from profiler.readers.figures import ForeignFile, refuse_impossible, shared_gpus
from profiler.readers.llama_batched_bench import read_llama_batched_bench
from profiler.readers.llama_bench import read_llama_bench
from profiler.readers.llama_benchy import read_llama_benchy
from profiler.readers.load_generators import read_aiperf, read_guidellm, read_inference_perf
from profiler.readers.optimum_benchmark import read_optimum_benchmark
from profiler.readers.serving import read_serving
from profiler.readers.sglang import read_sglang
from profiler.readers.sources import Source, sources_of, text_of
from profiler.readers.transformers_benchmark import read_transformers_benchmark
from profiler.readers.trtllm_bench import read_trtllm_bench
from profiler.readers.values import Record, apart, escaped
from profiler.readers.vllm import read_vllm


@dataclass(frozen=True)
class Reader:
    """A kind of result file: its name for messages, and its reader, which returns None for another kind.

    A reader gets at least one record.
    """

    tool: str
    read: Callable[[Source], ForeignFile | None]


READERS = [
    Reader("llama-benchy", read_llama_benchy),
    Reader("llama-bench", read_llama_bench),
    Reader("llama-batched-bench, sweep-bench", read_llama_batched_bench),
    Reader("optimum-benchmark", read_optimum_benchmark),
    Reader("GuideLLM", read_guidellm),
    Reader("AIPerf, genai-perf", read_aiperf),
    Reader("inference-perf", read_inference_perf),
    Reader("trtllm-bench", read_trtllm_bench),
    Reader("SGLang bench", read_sglang),
    Reader("transformers' benchmark", read_transformers_benchmark),
    Reader("vllm bench", read_vllm),
    Reader("vllm bench serve and sweep, SGLang bench_serving", read_serving),
    Reader(f"a CSV with {CSV_COLUMNS}", read_csv_table),
]
"""Every kind of file. The first reader that accepts a file reads it, so more specific ones come first."""

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
    *names, last = (reader.tool for reader in READERS)
    return f"{', '.join(names)} or {last}"


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
    for reader in READERS:
        try:
            result = reader.read(source)
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
