"""What people paste: tables and screens of tools, with text around them, cut, or with Windows' line ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.errors import RequestError
from profiler.readers.detect import read_foreign
from profiler.readers.figures import ForeignFile

FILES = Path(__file__).parents[1] / "data" / "foreign"
TABLE = (FILES / "llama-bench-moe.md").read_text()


def read(text: str, path: Path, encoding: str = "utf-8") -> ForeignFile:
    path.write_bytes(text.encode(encoding))
    return read_foreign(path)


@pytest.mark.parametrize(
    ("name", "tool", "expected"),
    [
        # (what, batch, prompt, cached before, seconds); a rate counts the tokens of the whole prompt
        (
            "llama-benchy.md",
            "llama-benchy",
            [
                ("prefill", 1, 2048, None, 0.24036),
                ("decode", 1, 2048, None, 1 / 73.18),
                ("prefill", 1, 10240, None, 1.20737),
                ("decode", 1, 10240, None, 1 / 71.78),
                ("prefill", 1, 34816, None, 5.04831),
                ("decode", 1, 34816, None, 1 / 65.80),
            ],
        ),
        (
            "llama-benchy-cached.md",
            "llama-benchy",
            [
                ("prefill", 1, 2048, None, 0.2487),
                ("decode", 1, 2048, None, 1 / 73.96),
                ("prefill", 1, 32768, None, 4.75038),
                ("decode", 1, 32768, None, 1 / 69.77),
                ("prefill", 1, 2048, 32768, 0.45044),
                ("decode", 1, 2048, 32768, 1 / 62.18),
            ],
        ),
        # Two prompts of 2,048 tokens at 1,968 tokens/s in total.
        (
            "llama-benchy.json",
            "llama-benchy",
            [
                ("prefill", 1, 2048, None, 2.07477),
                ("decode", 1, 2048, None, 1 / 49.978),
                ("prefill", 2, 2048, None, 2 * 2048 / 1968.5),
                ("decode", 2, 2048, None, 1 / 49.92),
            ],
        ),
        # 0.583 s for 32 tokens of each of four sequences are 18.2 ms per step.
        (
            "llama-batched-bench.md",
            "llama-batched-bench",
            [
                ("prefill", 1, 512, None, 0.211),
                ("decode", 1, 512, None, 0.241 / 32),
                ("prefill", 2, 512, None, 0.374),
                ("decode", 2, 512, None, 0.364 / 32),
                ("prefill", 4, 512, None, 0.707),
                ("decode", 4, 512, None, 0.0182),
                ("prefill", 1, 4096, None, 1.502),
                ("decode", 1, 4096, None, 0.260 / 32),
            ],
        ),
        (
            "sweep-bench.md",
            "sweep-bench",
            [
                ("prefill", 1, 512, 0, 2.271),
                ("decode", 1, None, 0, 1 / 22.57),
                ("prefill", 1, 512, 512, 2.352),
                ("decode", 1, None, 512, 1 / 21.75),
                ("prefill", 1, 512, 4096, 2.918),
                ("decode", 1, None, 4096, 1 / 18.57),
            ],
        ),
        # 1,042 tokens/s x 17.08 ms are 17.8 sequences at a time.
        (
            "vllm-serve.txt",
            "vllm bench serve",
            [("prefill", 1, 16396, None, 149.33937), ("decode", 18, 16396, None, 0.01708)],
        ),
        # 2.46 tokens per step.
        (
            "sglang-serving.txt",
            "SGLang bench_serving",
            [("prefill", 1, 197, None, 0.19131), ("decode", 1, 197, None, 2.46 * 0.00925)],
        ),
        # 128 new tokens, the command's default.
        ("vllm-latency.txt", "vllm bench latency", [("generate", 8, 256, None, 5.258143)]),
        ("trtllm-bench.txt", "trtllm-bench", [("generate", None, 128, None, 120.7364401)]),
        (
            "trtllm-bench-streaming.txt",
            "trtllm-bench",
            [("prefill", 1, 2048, None, 52.6670339), ("decode", 1012, 2048, None, 0.1829639)],
        ),
        (
            "inference-perf.json",
            "inference-perf",
            [("prefill", 1, 218, None, 0.0892877), ("decode", 47, 218, None, 0.0175472)],
        ),
        (
            "sglang-mtp.jsonl",
            "SGLang bench_serving",
            [
                ("prefill", 1, 8192, None, 0.664493),
                ("decode", 1, 8192, None, 3.5 * 5.124073e-3),
                ("prefill", 1, 8192, None, 6.147929),
                ("decode", 12, 8192, None, 3.5 * 16.10947e-3),
            ],
        ),
    ],
)  # fmt: skip
def test_each_is_read(name: str, tool: str, expected: list[tuple[object, ...]]) -> None:
    file = read_foreign(FILES / name)
    assert file.tool == tool
    shapes = [(item.covers, item.batch_size, item.prompt_len, item.context_len) for item in file.figures]
    assert shapes == [row[:4] for row in expected]
    for figure, (*_, seconds) in zip(file.figures, expected, strict=True):
        assert figure.seconds == pytest.approx(seconds, rel=2e-3)


def test_json_lines_and_table_of_batched_bench_agree() -> None:
    lines, table = (read_foreign(FILES / f"llama-batched-bench.{kind}") for kind in ("jsonl", "md"))
    assert [figure.seconds for figure in lines.figures] == pytest.approx([figure.seconds for figure in table.figures])
    assert lines.settings == table.settings
    assert table.settings["threads"] == "16"


def test_one_prompt_for_all_sequences_is_a_prefill_of_one(tmp_path: Path) -> None:
    text = (FILES / "llama-batched-bench.jsonl").read_text().splitlines()[2]
    prefill, decode = read(text.replace('"is_pp_shared": 0', '"is_pp_shared": 1'), tmp_path / "f").figures
    assert (prefill.batch_size, decode.batch_size) == (1, 4)


def test_runs_of_a_sweep_are_repetitions() -> None:
    """Three runs of each of two settings: 10.0, 10.1, 10.2 ms and 5 ms more."""
    file = read_foreign(FILES / "vllm-sweep.csv")
    decodes = {figure.settings: figure for figure in file.figures if figure.covers == "decode"}
    assert {settings: figure.samples_s for settings, figure in decodes.items()} == {
        (("max_num_seqs", "32"),): pytest.approx((0.0100, 0.0101, 0.0102)),
        (("max_num_seqs", "128"),): pytest.approx((0.0150, 0.0151, 0.0152)),
    }
    assert (file.tool, file.gpus) == ("vllm bench sweep", 2)


def test_lengths_that_a_dataset_only_promises_are_reported_first() -> None:
    assert read_foreign(FILES / "trtllm-bench.txt").remarks == (
        "its requests have 128 tokens in and 28 out on average, though the dataset is called 128_128_30000.jsonl.",
    )


def test_a_pinned_acceptance_is_reported() -> None:
    """2,056 of 8,192 tokens are left when the texts are tokenised again; the file names 8 GPUs and 6 drafted tokens."""
    file = read_foreign(FILES / "sglang-mtp.jsonl")
    assert "pinned" in file.remarks[0]
    assert file.gpus == 8
    assert [figure.verified_tokens for figure in file.figures if figure.covers == "decode"] == [6, 6]


def test_devices_above_a_table_are_read() -> None:
    file = read_foreign(FILES / "llama-bench-two-gpus.md")
    assert (file.settings["device"], file.gpus, file.splits_layers) == ("NVIDIA RTX A5000", 2, True)


BEFORE = "$ ./llama-bench -m gpt-oss.gguf\nggml_cuda_init: found 1 CUDA devices:\n"
VARIANTS = {
    "text before and after": BEFORE + TABLE + "\nbuild: b730706a (6263)\n",
    "Windows' line ends": TABLE.replace("\n", "\r\n"),
    "quoted": "".join(f"> {line}\n" for line in TABLE.splitlines()),
    "text between": TABLE.replace("| gpt-oss 20B", "ggml_metal_init: allocating\n| gpt-oss 20B", 4),
    "another spread": TABLE.replace("±", "+/-"),
    "bold": TABLE.replace("391.20 ± 0.39", "**391.20 ± 0.39**"),
    "a table of something else": "| GPU | RAM |\n| --- | --- |\n| RTX | 96 GB |\n\n" + TABLE,
    "thousands": TABLE.replace("5127.80", "5,127.80"),
    "indented": "".join(f"    {line}\n" for line in TABLE.splitlines()),
    "coloured": TABLE.replace("pp128 |", "\x1b[32mpp128\x1b[0m |"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_text_around_a_table_changes_nothing(name: str, tmp_path: Path) -> None:
    file, expected = read(VARIANTS[name], tmp_path / "f"), read_foreign(FILES / "llama-bench-moe.md")
    assert list(file.figures) == list(expected.figures)
    assert not file.remarks


def test_a_redirected_screen_of_powershell_is_read(tmp_path: Path) -> None:
    assert len(read(TABLE, tmp_path / "f", "utf-16").figures) == 7


def test_a_row_that_was_cut_is_named(tmp_path: Path) -> None:
    for cut in (2, 20, 60):
        file = read(TABLE.rstrip()[:-cut], tmp_path / "f")
        assert len(file.figures) == 6
        assert "row 7 is cut or broken" in file.remarks[0]


def test_two_tables_in_one_file_are_told_apart(tmp_path: Path) -> None:
    file = read(TABLE + "\nand with the patch:\n\n" + TABLE, tmp_path / "f")
    assert len(file.figures) == 14
    assert {figure.settings for figure in file.figures} == {(("table", "1"),), (("table", "2"),)}
    q4, q8 = (TABLE.replace("gpt-oss 20B MXFP4 MoE", f"llama 8B {name}") for name in ("Q4_0", "Q8_0"))
    file = read(q4 + "\n" + q8, tmp_path / "f")
    assert {figure.settings for figure in file.figures} == {(("precision", f"llama 8B {n}"),) for n in ("Q4_0", "Q8_0")}
    # A sweep in the second table alone; sizes follow from names, and tell nothing more apart.
    lines = [line.replace("2048", "1024") if " tg64 |" in line else line for line in q8.splitlines()]
    swept = "\n".join(lines).replace("11.27 GiB", "20.00 GiB")
    names = {name for figure in read(q4 + "\n" + swept, tmp_path / "f").figures for name, _ in figure.settings}
    assert names == {"precision", "n_ubatch"}


def test_tables_of_two_tools_need_two_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="llama-bench and llama-benchy; give each a file"):
        read(TABLE + "\n" + (FILES / "llama-benchy.md").read_text(), tmp_path / "f")


def test_benchy_is_not_llama_bench_without_its_own_columns(tmp_path: Path) -> None:
    """`(c2)` and `ctx_pp` are no tests of llama-bench, and are no guess either."""
    text = "| model | test | t/s |\n| --- | --- | --- |\n| x | pp2048 (c2) | 10 |\n"
    with pytest.raises(RequestError, match="not a known result file"):
        read(text, tmp_path / "f")


def test_an_unknown_column_is_named_and_is_no_setting(tmp_path: Path) -> None:
    text = TABLE.replace("| fa |", "| luck |")
    file = read(text, tmp_path / "f")
    assert file.remarks == ("columns that are not read: luck.",)
    assert "luck" not in file.settings
    table = read("batch_size,prompt_len,latency_s,mood\n1,8,1,good\n", tmp_path / "f")
    assert table.remarks == ("columns that are not read: mood.",)


def test_a_csv_may_have_a_title_and_text_below(tmp_path: Path) -> None:
    rows = "batch_size,prompt_len,new_tokens,tokens_per_s\n1,512,128,104.9\n"
    for text in (
        f"My results, RTX 4090\n\n{rows}\nmeasured on Monday\n",
        rows.replace(",", ";"),
        rows.replace(",", "\t"),
    ):
        [figure] = read(text, tmp_path / "f").figures
        assert figure.seconds == pytest.approx(1 / 104.9)


def test_json_between_other_lines_is_read(tmp_path: Path) -> None:
    text = f"$ cat result.json\n{(FILES / 'vllm-serve.json').read_text()}\n$\n"
    assert read(text, tmp_path / "f").tool == "vllm bench serve"
    lines = (FILES / "sglang-mtp.jsonl").read_text()
    assert len(read(f"$ head out.jsonl\n{lines[: len(lines) * 3 // 4]}", tmp_path / "f").figures) == 2


def test_two_printed_reports_are_told_apart(tmp_path: Path) -> None:
    report = (FILES / "vllm-serve.txt").read_text()
    other = report.replace("20.00 ", "5.00 ").replace("17.08", "9.08")
    file = read(f"first\n{report}\nsecond\n{other}", tmp_path / "f")
    assert [figure.settings for figure in file.figures if figure.covers == "decode"] == [
        (("request_rate", "20.00"),),
        (("request_rate", "5.00"),),
    ]


def test_a_printed_report_that_was_cut_is_named(tmp_path: Path) -> None:
    report = (FILES / "vllm-serve.txt").read_text()
    with pytest.raises(RequestError, match="total_output_tokens is missing"):
        read(report[: report.index("Total generated")], tmp_path / "f")
    [prefill] = read(report[: report.index("-----Time per")] + "", tmp_path / "f").figures[:1]
    assert prefill.covers == "prefill"


def test_vllm_speculation_is_read_from_its_screen(tmp_path: Path) -> None:
    """Acceptance length 3.20; 19,179 draft tokens in 6,393 drafts are 3 each, so a step processes 4."""
    more = (
        "---------------Speculative Decoding---------------\n"
        "Acceptance rate (%):                     73.47\n"
        "Acceptance length:                       3.20\n"
        "Drafts:                                  6393\n"
        "Draft tokens:                            19179\n"
        "Accepted tokens:                         14090\n"
        + "=" * 50
    )  # fmt: skip
    report = (FILES / "vllm-serve.txt").read_text().rstrip().removesuffix("=" * 50) + more
    decode = read(report, tmp_path / "f").figures[1]
    assert (decode.step_tokens, decode.verified_tokens) == (3.2, 4)
    assert decode.seconds == pytest.approx(3.2 * 0.01708)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ((FILES / "vllm-log.txt").read_text(), "log of a vLLM server.*--save-result"),
        ("Throughput: 5.35 requests/s, 2735.50 total tokens/s, 1369.41 output tokens/s\n", "--output-json"),
        ("Decode batch. #running-req: 1, gen throughput (token/s): 95.1, #queue-req: 0\n", "SGLang server"),
        ("llama_perf: eval time = 900.00 ms / 63 runs ( 14.29 ms per token, 70.00 tokens per second)\n", "llama-bench"),
    ],
)
def test_what_cannot_be_read_names_the_option_that_writes_a_file(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=what) as refused:
        read(text, tmp_path / "f")
    assert "batch_size, prompt_len, new_tokens, tokens_per_s" in str(refused.value)


def test_chunks_of_tokens_are_a_doubt(tmp_path: Path) -> None:
    """A time between arrivals of 3.5 times the time per token: several tokens arrive at once."""
    content = json.loads((FILES / "sglang-mtp.jsonl").read_text().splitlines()[0])
    decode = read(json.dumps({**content, "accept_length": None}), tmp_path / "f").figures[1]
    assert decode.seconds == pytest.approx(5.124e-3, rel=1e-3)
    assert decode.may_speculate
    assert "tokens arrive about 3.5 at a time" in " ".join(decode.notes)


def test_a_server_without_speculation_is_no_doubt(tmp_path: Path) -> None:
    content = json.loads((FILES / "sglang-mtp.jsonl").read_text().splitlines()[0])
    plain = {**content, "accept_length": None, "server_info": {"tp_size": 8, "speculative_algorithm": None}}
    assert not read(json.dumps(plain), tmp_path / "f").figures[1].may_speculate


def test_json_beside_a_table_of_something_else_is_read(tmp_path: Path) -> None:
    """An issue with its hardware as a table, and the result as JSON; prose with a quote is no broken CSV."""
    table = "| GPU | RAM |\n| --- | --- |\n| RTX | 96 GB |\n\n```json\n"
    text = f"{table}{(FILES / 'vllm-serve.json').read_text()}\n```\n"
    assert read(text, tmp_path / "f").tool == "vllm bench serve"
    log = 'INFO "a quote, without an end\n' + (FILES / "vllm-log.txt").read_text()
    with pytest.raises(RequestError, match="log of a vLLM server"):
        read(log, tmp_path / "f")


def test_a_concurrency_before_a_report_belongs_to_it(tmp_path: Path) -> None:
    """Container logs have a prefix, comments a hash; vLLM once named the concurrency above the report alone."""
    report = (FILES / "vllm-serve.txt").read_text()
    twice = f"Maximum request concurrency: 4\n{report}\nMaximum request concurrency: 8\n{report}"
    for prefix in ("", "bench-1  | ", "# "):
        text = "".join(f"{prefix}{line}\n" for line in twice.splitlines())
        caps = [figure.cap for figure in read(text, tmp_path / "f").figures if figure.covers == "decode"]
        assert caps == [4, 8]
