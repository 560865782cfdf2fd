"""Detect the kind of another tool's file by its content, and read it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from profiler.errors import RequestError
from profiler.readers.figures import ForeignFile
from profiler.readers.json_tools import JSON_TOOLS
from profiler.readers.sources import Source, sources_of, text_of
from profiler.readers.tables import CSV_TABLE, TABLES
from profiler.readers.values import escaped
from profiler.units import each_text, visible

CSV_COLUMNS = "batch_size, prompt_len, new_tokens, tokens_per_s"
FORMATS = (*TABLES, *JSON_TOOLS, CSV_TABLE)
"""Every kind of file. The first that knows a file reads it, so more specific ones come first."""

# Texts that people paste, which lack a shape or a number of requests: what they are, and what writes a file instead.
_REFUSED = (
    (r"Avg generation throughput:", "the log of a vLLM server", "`vllm bench serve --save-result`"),
    (r"gen throughput \(token/s\):", "the log of an SGLang server", "`sglang.bench_serving --output-file FILE`"),
    (r"(?:Prefill|Decode)\. .*latency:", "the screen of SGLang's bench_one_batch", "its option `--result-filename`"),
    (r"NVIDIA AIPerf \| LLM Metrics", "the screen of AIPerf", "its file profile_export_aiperf.json"),
    (r"NVIDIA GenAI-Perf \| LLM Metrics", "the screen of genai-perf", "its file profile_export_genai_perf.json"),
    (r"INSERT INTO \w+ \(build_commit", "llama-bench's SQL", "`llama-bench -o json`"),
)

# Settings of commands in the first MB of a text; `python -m` and `mlx_lm.generate -m 512` are of something else.
_IN_COMMANDS = {
    "model's name": r"(?:(?:(?<!python)(?<!python3)\s(?:--model(?:-path)?|-m|-hf|--hf-repo)|vllm serve"
    r"|ollama run(?: +--(?:(?:keepalive|format) +\S+|[\w=-]+))*|lms (?:chat|load))[ =]+"
    r"|(?<![\w-])model=|(?:\A|\n)NAME +ID +SIZE[^\n]*\n)['\"]?(?!-)(\S*[a-zA-Z][^\s'\"]*)",
    "quantization": r"\s--quantization[ =]+(\w\S*)",
    "split_mode": r"\s(?:-sm|--split-mode)[ =]+(row|tensor|graph)",
    "gpus": r"\s(?:--tensor-parallel-size|--tp(?:-size)?|-tp)[ =]+(\d+)",
}


def read_foreign(path: Path) -> ForeignFile:
    """Read another tool's result file. Raises RequestError if it is broken, too large, or of no known tool."""
    text, first = text_of(path), ""
    for group in sources_of(path, text):
        sources = [replace(each, records=each_text(list(each.records), visible)) for each in group if each.records]
        heads = [[str(name) for name in source.records[0] if str(name) in text] for source in sources]
        first = first or next((", ".join(names) for names in heads if names), "")
        if file := _read(path, sources):
            if not file.figures:
                raise RequestError(f"{path}: {file.tool} wrote no time of a prefill or a decode into it.")
            found = {name: {*re.findall(pattern, text[: 1 << 20])} for name, pattern in _IN_COMMANDS.items()}
            named = {name: values.pop() for name, values in found.items() if len(values) == 1}
            gpus = int(named.pop("gpus", 0)) or None
            if "precision" not in file.settings:
                file = replace(file, settings={**named, **file.settings})
                if "split_mode" in named:  # the GPUs above a console's lines share each step
                    file = replace(file, gpus=file.stages, stages=1)
            return replace(file, name=str(path), gpus=file.gpus or gpus)
    for pattern, what, option in _REFUSED:
        if re.search(pattern, text, re.MULTILINE):
            raise RequestError(f"{path} is {what}, which is not read; use {option}, or a CSV with {CSV_COLUMNS}.")
    has = f" (it has {escaped(first)[:120]})" if first else ""
    known = ", ".join(dict.fromkeys(each.tool for each in FORMATS if each is not CSV_TABLE))
    raise RequestError(f"{path} is not a known result file{has}; use one of {known} or a CSV with {CSV_COLUMNS}.")


def _read(path: Path, sources: Sequence[Source]) -> ForeignFile | None:
    """What the sources of one tool hold; None if none is known."""
    try:
        kinds = [next((each for each in FORMATS if each.knows(source)), None) for source in sources]
        known = [each for each in FORMATS if each in kinds]
        if len(known) > 1:
            raise RequestError(f"it has results of {' and '.join(each.tool for each in known)}; give each a file.")
        own = [source for source, kind in zip(sources, kinds, strict=True) if kind is not None]
        return known[0].read(own) if known else None
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as error:
        raise RequestError(f"{path} is damaged: {type(error).__name__}: {escaped(error)}.") from None
