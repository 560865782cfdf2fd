"""Other tools' files are detected by their content, read exactly, and refused in one line if they are broken."""

import csv
import json
import re
from pathlib import Path

import pytest
from foreign_files import FILES, changed, holds, record

from profiler.errors import RequestError
from profiler.readers.detect import read_foreign
from profiler.readers.figures import Figure, Shape
from profiler.readers.values import Measured

PUBLISHED = list(csv.DictReader(Path(__file__).with_name("figures.csv").read_text().splitlines()))


@pytest.mark.parametrize("name", dict.fromkeys(row["file"] for row in PUBLISHED))
def test_each_tool_is_detected_by_its_content(name: str, tmp_path: Path) -> None:
    """figures.csv has what the tools published: empty is unknown to the file, `*` and a time that is empty are open."""
    other_name = tmp_path / "anything.txt"
    other_name.write_bytes((FILES / name).read_bytes())
    file, expected = read_foreign(other_name), [row for row in PUBLISHED if row["file"] == name]
    assert {file.tool} == {row["tool"] for row in expected}
    for figure, row in zip(file.figures, expected, strict=True):
        for size in ("covers", "batch_size", "prompt_len", "context_len", "new_tokens"):
            value = getattr(figure if size == "covers" else figure.shape, size)
            assert row[size] in ("*", "" if value is None else str(value)), size
        assert not row["seconds"] or figure.time.value == pytest.approx(float(row["seconds"]), rel=5e-4)


def test_a_time_with_the_first_token_is_no_decode_step(tmp_path: Path) -> None:
    """GuideLLM has no latency between tokens for one token, or without streaming; counts of 0 are unknown shapes."""
    path = tmp_path / "g.json"
    content = record("guidellm.json")
    metrics = content["benchmarks"][0]["metrics"]
    metrics["inter_token_latency_ms"]["successful"] |= {"median": 0.0, "mean": 0.0}
    path.write_text(json.dumps(content))
    assert [figure.covers for figure in read_foreign(path).figures] == ["prefill"]
    metrics["prompt_token_count"]["successful"]["median"] = 0.0
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match="prompt_len is missing"):
        read_foreign(path)


def test_genai_perf_without_streaming_is_refused(tmp_path: Path) -> None:
    """The time to first token is then that of the whole answer (the second file of the same public issue)."""
    whole = record("genai-perf.json")["request_latency"]
    path = changed(tmp_path / "f", "genai-perf.json", {"time_to_first_token": whole, "inter_token_latency": None})
    with pytest.raises(RequestError, match="measure with --streaming"):
        read_foreign(path)


# 300 requests of 200 tokens in a minute, of which half take 8 ms a token and wait 0.2 s.
SKEWED = {"max_concurrency": None, "completed": 300, "duration": 60.0, "total_output_tokens": 60_000}
SKEWED |= {"mean_tpot_ms": 24.0, "median_tpot_ms": 8.0, "mean_ttft_ms": 2000.0, "median_ttft_ms": 200.0}
ONE_PER_S = {"request_rate": 1.0, "max_concurrency": 256, "completed": 300, "duration": 300.0, "median_tpot_ms": 10.0}
ONE_PER_S |= {"total_input_tokens": 153600, "total_output_tokens": 38400}
# 20,267 tokens/s at 12 ms per token are 243 sequences of the 256 allowed.
FULL = {"max_concurrency": 256, "mean_tpot_ms": 12.0, "total_output_tokens": 959_400, "accept_length": None}
UNSAID = {"accept_length": None}
DRAFTS = {"spec_decode_token_weighted_acceptance_length": 3.25, "spec_decode_acceptance_length": 3.0}
DRAFTS |= {"total_draft_tokens": 32.0, "total_spec_decode_steps": 8.0}
SPECULATED = {name: {"avg": value} for name, value in DRAFTS.items()}
LM_STUDIO_DRAFTS = {"prompt_tokens": 66, "completion_tokens": 300}
LM_STUDIO_DRAFTS |= {"total_draft_tokens_count": 492, "accepted_draft_tokens_count": 176}
LOADGEN = {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 2}}
PHASES = {"phases": [{"concurrency": 8}, {"concurrency": 1, "exclude_from_results": True}]}
PERF_ANALYZER = {"model_names": ["m"], "perf_analyzer": {"stimulus": {"concurrency": 32}}}


@pytest.mark.parametrize(
    ("name", "changes", "covers", "expected", "note"),
    [
        # By Little's law 1.28 requests of 128 tokens of 10 ms each decode at a time: a cap is not the batch.
        ("vllm-serve.json", ONE_PER_S, "decode", {"batch_size": 1, "cap": 256}, "below the 256 that were allowed"),
        # 304.4 tokens/s at 10.65 ms per token: 3.2 at a time, of the four that were requested.
        ("vllm-serve.json", {"max_concurrency": None}, "decode", {"batch_size": 3, "cap": None}, "estimated"),
        # Keys that its user adds do not hide what was measured.
        ("vllm-serve.json", {"input_len": 1, "output_len": 1, "prompt_len": 1, "run": 7}, "decode",
         {"prompt_len": 128, "new_tokens": 32}, ""),
        # AIPerf counts them itself: 3.18 of 4, where its 328 tokens/s at 10.0 ms give 3.28.
        ("aiperf.json", {}, "decode", {"batch_size": 3, "cap": 4}, "counted by the tool"),
        ("aiperf.json", {"effective_decode_concurrency": {"avg": 1.2}}, "decode", {"batch_size": 1}, "counted"),
        # The law needs the mean: 1,000 tokens/s of 24 ms are 24 in flight. Without a mean, the median is used.
        ("vllm-serve.json", SKEWED, "decode", {"batch_size": 24, "seconds": 8e-3}, ""),
        ("vllm-serve.json", SKEWED | {"mean_tpot_ms": None}, "decode", {"batch_size": 8}, ""),
        # 5 requests/s that wait 2 s on average are 10.
        ("vllm-serve.json", SKEWED, "prefill", {"seconds": 0.2}, "queueing: 10 requests wait"),
        # Replicas and stages have a batch each: one of eight decodes 30.
        ("sglang-mtp.jsonl", FULL | {"server_info": {"dp_size": 8}}, "decode", {"batch_size": 30, "cap": 256}, "by 8"),
        ("sglang-mtp.jsonl", FULL | {"server_info": {"dp_size": 2, "pp_size": 4}}, "decode",
         {"batch_size": 30, "stages": 4}, ""),
        ("sglang-mtp.jsonl", FULL | {"server_info": {"dp_size": 8, "enable_dp_attention": True}}, "decode",
         {"batch_size": 243}, ""),
        # A time between arrivals of 3.5 times the time per token: several tokens arrive at once.
        ("sglang-mtp.jsonl", UNSAID, "decode", {"tokens_given": None, "seconds": 5.124e-3}, "3.5 at a time"),
        ("sglang-mtp.jsonl", UNSAID | {"server_info": {"speculative_algorithm": None}}, "decode",
         {"tokens_given": 1.0}, ""),
        # The file names six drafted tokens.
        ("sglang-mtp.jsonl", {}, "decode", {"tokens_processed": 6.0}, "processes 6"),
        # 10 ms per token of 2.5 per step.
        ("vllm-serve.json", {"median_tpot_ms": 10.0, "spec_decode_acceptance_length": 2.5}, "decode",
         {"seconds": 25e-3}, "gives 2.5 tokens"),
        # Other versions have it elsewhere: docs.nvidia.com/aiperf, export schema 1.3; genai-perf's own tests.
        ("aiperf.json", {"input_config": LOADGEN}, "decode", {"cap": 2, "model's name": "m"}, ""),
        ("aiperf.json", {"input_config": PHASES}, "decode", {"cap": 8}, ""),
        ("genai-perf.json", {"input_config": PERF_ANALYZER}, "decode", {"cap": 32, "model's name": "m"}, ""),
        ("guidellm.json", {}, "decode", {"model's name": "small-llama"}, ""),
        # 10 ms per token of 3.25 per step, and 32 drafts in 8 steps (docs/metrics-reference.md of AIPerf).
        ("aiperf.json", SPECULATED, "decode", {"tokens_given": 3.25, "tokens_processed": 5.0, "seconds": 32.53e-3}, ""),
        ("aiperf.json", {}, "decode", {"tokens_given": None}, ""),
        # 299 tokens after the first, of which 176 were drafted, are 123 steps with four drafts each.
        ("lm-studio.json", {"usage": LM_STUDIO_DRAFTS}, "decode",
         {"tokens_given": 299 / 123, "tokens_processed": 5.0}, ""),
        ("lm-studio.json", {}, "decode", {"tokens_given": None}, ""),
        ("sglang-serving.jsonl", {"server_info": {"kv_cache_dtype": "fp8_e5m2"}}, "decode", {"kv_itemsize": 1.0}, ""),
        # One prompt for all four sequences.
        ("llama-batched-bench.jsonl", {"pl": 4, "is_pp_shared": 1}, "prefill", {"batch_size": 1}, "once"),
        ("llama-batched-bench.jsonl", {"pl": 4, "is_pp_shared": 1}, "decode", {"batch_size": 4}, "once"),
    ],
)  # fmt: skip
def test_what_a_figure_is_follows_from_several_keys(
    name: str, changes: dict[str, object], covers: str, expected: dict[str, object], note: str, tmp_path: Path
) -> None:
    file = read_foreign(changed(tmp_path / "f", name, changes))
    assert file.tool == read_foreign(FILES / name).tool
    holds(file, covers, expected, note)


BROKEN = {
    "empty": "",
    "cut off": '[{"model_type": "x", "n_prompt": 1, "n_gen"',
    "huge": '[{"model_type": "x", "n_prompt": 1e300, "n_gen": 0, "avg_ns": 1}]',
    "a decimal comma": "batch_size;prompt_len;new_tokens;tokens_per_s\n1;512;128;104,9\n",
    "thousands or a fraction": "batch_size;prompt_len;new_tokens;tokens_per_s\n1;512;128;104,912\n",
    "markup in a phase": "batch_size,prompt_len,phase,latency_s\n1,8,<script>alert(1)</script>,1\n",
    "a test of another kind": "| model | test | t/s |\n| --- | --- | --- |\n| x | zz9 | fast |\n",
    "a prompt of 5,000 digits": f"| model | test | t/s |\n| --- | --- | --- |\n| x | pp{'9' * 5000} | 1 |\n",
    "a time of 10^291 s": '[{"model_type": "x", "n_prompt": 64, "n_gen": 0, "avg_ns": 1e300}]',
    "a time that no number holds": "batch_size,prompt_len,new_tokens,tokens_per_s\n1,8,8,1e-320\n",
    "half a request": '{"elapsed_time": 1, "num_requests": 0.5, "requests_per_second": 1, "tokens_per_second": 1}',
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_what_is_broken_gets_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(BROKEN[name])
    with pytest.raises(RequestError) as refused:
        read_foreign(path)
    text = str(refused.value)
    assert text.isprintable()  # so it is one line
    assert len(text) < 700


def test_what_has_no_end_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.readers.sources.MOST_FILE_BYTES", 1 << 20)
    with pytest.raises(RequestError, match="more than the 1048576 bytes"):
        read_foreign(Path("/dev/zero"))


@pytest.mark.parametrize("name", ["llama-bench.md", "sglang.jsonl", "table.csv", "vllm-serve.json"])
def test_a_file_that_was_cut_off_anywhere_gets_one_line_or_fewer_figures(name: str, tmp_path: Path) -> None:
    content = (FILES / name).read_bytes()
    for share in range(1, 20):
        path = tmp_path / "file"
        path.write_bytes(content[: share * len(content) // 20])
        try:
            number, lines = len(read_foreign(path).figures), []
        except RequestError as refused:
            number, lines = 0, str(refused).splitlines()
        assert number or len(lines) == 1


def test_our_own_cells_keep_what_was_cached(tmp_path: Path) -> None:
    """64 tokens after a prefix of 8,128 and a cache of 512, with the middle of 32 steps, as in cells.csv."""
    path = tmp_path / "cells.csv"
    rows = ["prefill,8,64,8128", "decode,8,64,8208", "decode,1,0,528", "decode,1,512,528"]
    names = "phase,batch_size,prompt_len,context_len,new_tokens,latency_s"
    path.write_text("\n".join([names, *(f"{row},32,0.01" for row in rows)]))
    found = [(figure.shape.prompt_len, figure.shape.context_len) for figure in read_foreign(path).figures]
    assert found == [(64, 8128), (64, 8128), (None, 512), (512, 0)]


def test_a_table_may_have_times_rates_and_empty_cells(tmp_path: Path) -> None:
    """Two sequences at 100 tokens/s take 20 ms per step. Failed rows are left out, but count in row numbers."""
    path = tmp_path / "t.csv"
    names = "status,phase,batch_size,prompt_len,context_len,new_tokens,latency_s,tokens_per_s,repeats\n"
    rows = ["ok,decode,2, 64,,32,,100,5", "failed,decode,x,,,,,,", ",prefill,1,128,9,,0.5,,", "ok,,4,,256,16.0,0.25,1,"]
    path.write_text(names + "\n".join(rows))
    note = "no phase named: read as decode steps only"
    assert list(read_foreign(path).figures) == [
        # 100 tokens/s are 99.5 to 100.5; 0.5 s are 0.45 to 0.55, and 0.25 s 0.245 to 0.255.
        Figure("decode", Shape(2, 64, None, 32), Measured(0.02, rounding=0.0001, repeats=5), None),
        Figure("prefill", Shape(1, 128, 9), Measured(0.5, rounding=0.05)),
        Figure("decode", Shape(4, None, 248, 16), Measured(0.25, rounding=0.005), None, notes=(note,)),
    ]
    names = names.strip() + ",samples_s,bits_per_weight\n"
    rows = [*rows[:1], "ok,decode,1,64,,32,0.02,,,0.019; 0.02;0.022,4.5"]
    path.write_text(names + "\n".join(rows))
    assert list(read_foreign(path).figures)[1] == Figure(
        "decode", Shape(1, 64, None, 32), Measured(0.02, 0.0, 0.005, (0.019, 0.02, 0.022), 3),
        None, weight_bytes=4.5 / 8, settings=(("bits per weight", "4.5"),),
    )  # fmt: skip
    for broken, message in (
        ("ok,decode,2,64,,32,0.02,,,0.01;-1", "row 1: samples_s is not a number from 1e-18 to 1e+15: -1"),
        ("ok,decode,2,64,,32,nan,,", "row 1: latency_s is not a number from 0 to 1e+15: nan"),
        ("ok,decode,2,6.5,,32,1,,", "row 1: prompt_len is not an integer: 6.5"),
        ("ok,decode,,64,,32,1,,", "row 1: batch_size is missing"),
        ("ok,prefill,2,,64,,1,,", "row 1: a prefill of 0 tokens has no time"),
        ("ok,train,2,64,,32,1,,", "row 1: 'train' is not a phase"),
        ("ok,decode,2,64,,32,,,", "row 1: tokens_per_s is missing"),
    ):
        path.write_text(names + "\n".join([broken, *rows]))
        with pytest.raises(RequestError, match=re.escape(message)):
            read_foreign(path)
