"""What people paste: tables and screens of tools, with text around them, cut, or with Windows' line ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from foreign_files import FILES

from profiler.errors import RequestError
from profiler.readers.detect import read_foreign
from profiler.readers.figures import ForeignFile

TABLE = (FILES / "llama-bench-moe.md").read_text()


def read(text: str, path: Path, encoding: str = "utf-8") -> ForeignFile:
    path.write_bytes(text.encode(encoding))
    return read_foreign(path)


@pytest.mark.parametrize("swept", ["max_num_seqs", "random_input_len"])
def test_runs_of_a_sweep_are_repetitions(swept: str, tmp_path: Path) -> None:
    """Three runs of each of two settings: 10.0, 10.1, 10.2 ms and 5 ms more. SGLang, too, has `random_input_len`."""
    file = read((FILES / "vllm-sweep.csv").read_text().replace("max_num_seqs", swept), tmp_path / "f")
    decodes = {figure.settings: figure for figure in file.figures if figure.covers == "decode"}
    assert {settings: figure.time.values for settings, figure in decodes.items()} == {
        ((swept, "32"),): pytest.approx((0.0100, 0.0101, 0.0102)),
        ((swept, "128"),): pytest.approx((0.0150, 0.0151, 0.0152)),
    }
    assert (file.tool, file.gpus) == ("vllm bench sweep", 2)


def test_lengths_that_a_dataset_only_promises_are_reported_first() -> None:
    assert read_foreign(FILES / "trtllm-bench.txt").remarks == (
        "its requests have 128 tokens in and 28 out on average, though the dataset is called 128_128_30000.jsonl.",
    )


def test_a_pinned_acceptance_is_reported() -> None:
    """2,056 of 8,192 tokens are left when the texts are tokenised again; the file names 8 GPUs."""
    file = read_foreign(FILES / "sglang-mtp.jsonl")
    assert ("pinned" in file.remarks[0], file.gpus) == (True, 8)


BEFORE = "$ ./llama-bench -m gpt-oss.gguf\nggml_cuda_init: found 1 CUDA devices:\n"
VARIANTS = {
    "text before and after": BEFORE + TABLE + "\nbuild: b730706a (6263)\n",
    "Windows' line ends": TABLE.replace("\n", "\r\n"),
    "text between": TABLE.replace("| gpt-oss 20B", "ggml_metal_init: allocating\n| gpt-oss 20B", 4),
    "a terminal's colours": TABLE.replace("391.20 ± 0.39", "\x1b[1;32m391.20 ± 0.39\x1b[0m"),
    "another spread": TABLE.replace("±", "+/-"),
    "bold": TABLE.replace("391.20 ± 0.39", "**391.20 ± 0.39**"),
    "a table of something else": "| GPU | RAM |\n| --- | --- |\n| RTX | 96 GB |\n\n" + TABLE,
    "a space in each test": TABLE.replace("pp128 |", "pp 128 |").replace("tg64 |", "tg 64 |"),
    "copied from a rendered page": "".join(
        f"{line.strip('| ').replace('|', chr(9))}\n" for line in TABLE.splitlines() if "---" not in line
    ),
    "without the line of dashes": "".join(f"{line}\n" for line in TABLE.splitlines() if "---" not in line),
    "without frame": "".join(f"{line.strip('| ')}\n" for line in TABLE.splitlines()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_text_around_a_table_changes_nothing(name: str, tmp_path: Path) -> None:
    file, expected = read(VARIANTS[name], tmp_path / "f"), read_foreign(FILES / "llama-bench-moe.md")
    assert list(file.figures) == list(expected.figures)
    assert not file.remarks


def test_a_row_that_was_cut_is_named(tmp_path: Path) -> None:
    for cut in (2, 20, 60):
        file = read(TABLE.rstrip()[:-cut], tmp_path / "f")
        assert len(file.figures) == 6
        assert "row 7 is cut or broken" in file.remarks[0]


def test_a_csv_that_lost_rows_is_named(tmp_path: Path) -> None:
    """Of three rows the last one is cut in mid-write, or an open quote takes all rows after it."""
    head, row = "batch_size,prompt_len,new_tokens,latency_s\n", "1,64,32,0.02\n"
    for rest in ("4,64,3", '2,64,"32,0.03\n' + row):
        cut = read(head + row + row.replace("64", "128") + rest, tmp_path / "f")
        assert [figure.prompt_len for figure in cut.figures] == [64, 128]
        assert "row 3 is cut or broken" in cut.remarks[0]
    with pytest.raises(RequestError, match="several columns called latency_s"):
        read("batch_size,prompt_len,latency_s,latency_s\n1,64,0.02,0.03\n", tmp_path / "f")


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


def test_rates_of_llama_benchy_tell_whether_a_prompt_was_cached(tmp_path: Path) -> None:
    """Its table with prefix caching, without the rows `ctx_`: 2,048 tokens over a cache of 32,768 in 450 ms."""
    lines = (FILES / "llama-benchy-cached.md").read_text().splitlines()
    file = read("\n".join(line for line in lines if "ctx_" not in line), tmp_path / "f")
    prefill = next(figure for figure in file.figures if figure.covers == "prefill" and figure.context_len)
    assert (prefill.prompt_len, prefill.context_len) == (2048, 32_768)
    assert prefill.time.value == pytest.approx(0.45044)


def test_an_unknown_column_is_named(tmp_path: Path) -> None:
    """A typing error in an optional column must not go unseen."""
    file = read((FILES / "table.csv").read_text().replace("new_tokens", "luck"), tmp_path / "f")
    assert file.remarks == ("columns that are not read: luck.",)


def test_a_csv_may_have_a_title_and_text_below(tmp_path: Path) -> None:
    rows = "batch_size,prompt_len,new_tokens,tokens_per_s\n1,512,128,104.9\n"
    for text in (
        f"My results, RTX 4090\n\n{rows}\nmeasured on Monday\n",
        rows.replace(",", ";"),
        rows.replace(",", "\t"),
    ):
        [figure] = read(text, tmp_path / "f").figures
        assert figure.time.value == pytest.approx(1 / 104.9)


def test_json_between_other_lines_is_read(tmp_path: Path) -> None:
    text = f"$ cat result.json\n{(FILES / 'vllm-serve.json').read_text()}\n$\n"
    assert read(text, tmp_path / "f").tool == "vllm bench serve"
    table = "| GPU | RAM |\n| --- | --- |\n| RTX | 96 GB |\n\n```json\n"
    assert read(f"{table}{(FILES / 'vllm-serve.json').read_text()}\n```\n", tmp_path / "f").tool == "vllm bench serve"


def test_lines_above_tables_belong_to_the_next_ones(tmp_path: Path) -> None:
    """Two runs on two GPUs each are not one on four, and a header names the settings of its own table."""
    two = (FILES / "llama-bench-two-gpus.md").read_text()
    assert read(two + two.replace("gpt-oss 20B", "other 20B"), tmp_path / "f").stages == 2
    with pytest.raises(RequestError, match="unequal numbers of GPUs"):
        read(two + "Device 0: NVIDIA RTX A5000, compute capability 8.6, VMM: yes\n" + TABLE, tmp_path / "f")
    batched = (FILES / "llama-batched-bench.md").read_text()
    file = read(batched + "\n" + batched.replace("flash_attn = 1", "flash_attn = 0"), tmp_path / "f")
    assert {figure.settings for figure in file.figures} == {(("flash_attn", value),) for value in "01"}


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        ("--input_len 1024 --batch_size=32 -tp 8", (32, 1024, 128, 8)),
        ("--input-len $IN --batch-size ${BS} --output-len 64 --tensor_parallel_size '2'", (None, None, 64, 2)),
        ("--input-len 64 --input-len \\\n 256 $MORE", (None, 256, None, None)),
        ("--model m", (8, 32, 128, None)),
    ],
)
def test_options_of_a_command_are_read_as_its_parser_does(
    command: str, shape: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Underscores and dashes are the same, the last value counts, and what the shell fills in is unknown."""
    report = (FILES / "vllm-latency.txt").read_text().partition("Avg")[2]
    file = read(f"$ vllm bench latency {command}\nAvg{report}", tmp_path / "f")
    [figure] = file.figures
    assert (figure.batch_size, figure.prompt_len, figure.new_tokens, file.gpus) == shape


@pytest.mark.parametrize("name", ["guidellm.json", "llama-benchy.json", "trtllm-bench.txt"])
def test_no_report_of_several_is_lost(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="it has 2 reports; give each a file"):
        read(2 * (FILES / name).read_text(), tmp_path / "f")


def test_vllm_speculation_is_read_from_its_screen(tmp_path: Path) -> None:
    """Acceptance length 3.20; 19,179 draft tokens in 6,393 drafts are 3 each, so a step processes 4."""
    more = "Acceptance length:     3.20\nDrafts:          6393\nDraft tokens:    19179\n" + "=" * 50
    report = (FILES / "vllm-serve.txt").read_text().rstrip().removesuffix("=" * 50) + more
    decode = read(report, tmp_path / "f").figures[1]
    assert (decode.gives, decode.processes) == (3.2, 4)
    assert decode.time.value == pytest.approx(3.2 * 0.01708)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ((FILES / "vllm-log.txt").read_text(), "log of a vLLM server.*--save-result"),
        ("Decode batch. #running-req: 1, gen throughput (token/s): 95.1, #queue-req: 0\n", "SGLang server"),
    ],
)
def test_what_cannot_be_read_names_the_option_that_writes_a_file(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=what) as refused:
        read(text, tmp_path / "f")
    assert "batch_size, prompt_len, new_tokens, tokens_per_s" in str(refused.value)


def test_rates_of_vllm_throughput_give_its_shapes(tmp_path: Path) -> None:
    """1,366.09 and 1,369.41 tokens/s of 5.35 requests/s are 255 in and 256 out; the batch is not in the line."""
    text = "Throughput: 5.35 requests/s, 2735.50 total tokens/s, 1369.41 output tokens/s\n"
    [figure] = read(text, tmp_path / "f").figures
    assert (figure.batch_size, figure.prompt_len, figure.new_tokens) == (None, 255, 256)
    assert figure.with_shape(32).time.value == pytest.approx(32 / 5.35)


def test_a_concurrency_before_a_report_belongs_to_it(tmp_path: Path) -> None:
    """Container logs have a prefix, comments a hash; vLLM once named the concurrency above the report alone."""
    report = (FILES / "vllm-serve.txt").read_text()
    twice = f"Maximum request concurrency: 4\n{report}\nMaximum request concurrency: 8\n{report}"
    for prefix in ("", "bench-1  | ", "# ", "(APIServer pid=12) ", "[1,0]<stdout>: "):
        text = "".join(f"{prefix}{line}\n" for line in twice.splitlines())
        caps = [figure.cap for figure in read(text, tmp_path / "f").figures if figure.covers == "decode"]
        assert caps == [4, 8]


CONSOLES = ("ollama.txt", "llama-server.txt", "llama-cli.txt", "mlx.txt", "lm-studio.txt")
"""Their formats: ollama's api/types.go (Summary), llama.cpp's tools/server/server-context.cpp (print_timings) and
src/llama-context.cpp (llama_perf_context_print), mlx_lm/generate.py, and src/subcommands/chat/util.ts of LM Studio."""


@pytest.mark.parametrize("name", CONSOLES)
def test_what_is_around_console_lines_changes_nothing(name: str, tmp_path: Path) -> None:
    """Slots and times in front, a list, a terminal's colours, Windows' UTF-16, commas, and an answer with code."""
    text, expected = (FILES / name).read_text(), list(read_foreign(FILES / name).figures)
    slot = "0.24.865.106 I slot print_timing: id  0 | task 27 | "
    answer = '{"model": [\n| a | b |\n| --- | --- |\n| 1 | 2 |\n```json\n{\n'
    for changed, encoding in (
        (slot + text.replace("\n", f"\n{slot}"), "utf-8"),
        (text.replace("\n", "\n- "), "utf-8"),
        (text.replace(": ", ":\x1b[1m \x1b[0m "), "utf-8"),
        ("\ufeff" + text.replace("\n", "\r\n"), "utf-16-le"),
        (re.sub(r"(\d)\.(\d)", r"\1,\2", text), "utf-8"),
        ("$ cat log\n" + answer + text, "utf-8"),
    ):
        assert list(read(changed, tmp_path / "f", encoding).figures) == expected


def test_what_a_server_logs_of_its_model_holds_for_its_requests(tmp_path: Path) -> None:
    """4.67 bits per weight and all 37 layers, whatever a draft model has; a second request follows the first."""
    text = (FILES / "llama-server-drafts.txt").read_text()
    draft = "print_info: file size = 0.64 GiB (8.50 BPW)\nload_tensors: offloaded 17/17 layers to GPU\n"
    head, timings = text[: text.index("0.11")], text[text.index("0.11") :]
    file = read(
        head + draft + timings + timings.replace("draft acceptance", "x").replace("accepted", "x"), tmp_path / "f"
    )
    assert {(figure.weight_bytes, figure.gpu_layers) for figure in file.figures} == {(4.67 / 8, 37)}
    first, second = (figure for figure in file.figures if figure.covers == "decode")
    assert (first.settings, second.settings) == ((("run", "1"),), (("run", "2"),))
    assert (first.gives, first.processes, second.gives) == (2, 2.5, 1)
    assert file.remarks == ("assumed, as the file does not say it: no token from a cache.",)


def test_what_ollama_holds_on_the_cpu_and_slots_are_doubts(tmp_path: Path) -> None:
    text = (FILES / "ollama.txt").read_text()
    for above, on_host, unsaid in (("43%/57% CPU/GPU", True, False), ("100% GPU", False, False), ("", False, True)):
        file = read(f"NAME ID SIZE PROCESSOR\nx 0b28 20 GB {above} 4 minutes\n{text}", tmp_path / "f")
        assert {figure.weights_on_host for figure in file.figures} == {on_host}
        assert ("all layers on the GPU" in file.remarks[0]) == unsaid
    text = (FILES / "llama-server-drafts.txt").read_text()
    file = read(text + text[text.index("0.11") :].replace("id  0", "id  1"), tmp_path / "f")
    assert "no other request at the same time" in file.remarks[0]


def test_drafts_of_a_request_that_was_cut_off_belong_to_no_other(tmp_path: Path) -> None:
    """51 accepted tokens of 4.64 per step are 11 steps, which wrote 60 tokens: the last one gave more than it wrote."""
    times = "prompt eval time = 8476.55 ms / 1938 tokens (\n eval time = 1834.34 ms / 61 tokens (\n"
    lines = [f"draft acceptance = 0.9 ( {n} generated), mean len = {mean}\n" for n, mean in DRAFTS]
    file = read(lines[0] + times + lines[1], tmp_path / "f")
    _, decode = file.figures
    assert decode.settings == ()
    assert decode.time.value == pytest.approx(1.83434 / 11)
    assert (decode.gives, decode.processes) == (pytest.approx(60 / 11), 6)


DRAFTS = (("108 accepted / 160", 4.38), ("51 accepted / 55", 5.64))


def test_a_command_may_name_the_layers_on_the_gpu(tmp_path: Path) -> None:
    """What was loaded counts, if the log has it. Options for experts name those in the host's memory."""
    text = (FILES / "llama-cli.txt").read_text()
    for option, on_host in (("-cmoe", True), ("--n-cpu-moe 8", True), ("-ot exps=CPU", True), ("-ncmoe 0", False)):
        figures = read(f"$ llama-cli -ngl 99 {option} -m x.gguf\n{text}", tmp_path / "f").figures
        assert {figure.weights_on_host for figure in figures} == {on_host}
    loaded = "load_tensors: offloaded 12/33 layers to GPU\n"
    for above, layers in (("-ngl 30 -fa\n", 30), ("--n-gpu-layers 30\n", 30), (f"-ngl 30\n{loaded}", 12)):
        text = re.sub(r"(?m)^.*(offloaded|-ngl ).*\n", "", text)
        file = read(f"$ llama-cli -m x.gguf {above}{text}", tmp_path / "f")
        assert {figure.gpu_layers for figure in file.figures} == {layers}


def test_a_copy_of_lm_studios_window_may_have_a_line_for_each_part(tmp_path: Path) -> None:
    text = (FILES / "lm-studio-window.txt").read_text()
    file = read(text.replace(" • ", "\n\n•\n\n"), tmp_path / "f")
    assert list(file.figures) == list(read_foreign(FILES / "lm-studio-window.txt").figures)


def test_times_between_tokens_stand_for_those_per_token(tmp_path: Path) -> None:
    """Reports of SGLang since 2025: 95.62 tokens/s of 9.35 ms each are 0.9 at a time."""
    report = re.sub(r"-----Time per Output(.*\n){4}", "", (FILES / "sglang-serving.txt").read_text())
    file = read(report, tmp_path / "f")
    assert "the time between arrivals is used" in file.remarks[0]
    decode = file.figures[1]
    assert (decode.batch_size, decode.gives) == (1, 2.46)
    assert decode.time.value == pytest.approx(2.46 * 7.64e-3)


def test_a_gpu_that_shares_the_hosts_memory_did_not_run_beside_another(tmp_path: Path) -> None:
    vulkan = "ggml_vulkan: 0 = AMD Radeon RX 7900 XT (RADV NAVI31) (radv) | uma: 0 | fp16: 1\n"
    shared = "ggml_vulkan: 1 = V3D 7.1.10.2 (V3DV Mesa) | uma: 1 | fp16: 0\n"
    for devices, name in ((vulkan + shared, "AMD Radeon RX 7900 XT"), (shared.replace("1 =", "0 ="), "V3D 7.1.10.2")):
        file = read(devices + TABLE, tmp_path / "f")
        assert (file.stages, file.settings["device"]) == (1, name)


def test_lines_of_two_tools_need_a_file_each(tmp_path: Path) -> None:
    """llama-batched-bench prints its context's times after its table, which has them already."""
    cli = (FILES / "llama-cli.txt").read_text()
    with pytest.raises(RequestError, match=r"results of ollama and llama\.cpp; give each a file"):
        read((FILES / "ollama.txt").read_text() + cli, tmp_path / "f")
    assert read((FILES / "llama-batched-bench.md").read_text() + cli, tmp_path / "f").tool == "llama-batched-bench"
    with pytest.raises(RequestError, match="wrote no time"):
        read(
            "eval time =       0.00 ms /     1 runs   (    0.00 ms per token,      inf tokens per second)",
            tmp_path / "f",
        )
