"""What people paste: tables and screens of tools, with text around them, cut, or with Windows' line ends."""

import json
import re
from pathlib import Path

import pytest
from foreign_files import FILES, holds

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


@pytest.mark.parametrize(
    ("sign", "encoding"),
    [*((sign, "utf-8") for sign in ("+-", "+/-", "┬▒", "Â±", "\ufffd", "卤")), ("±", "latin-1"), ("±", "utf-16")],
)
def test_a_sign_that_a_console_mangled_is_read(sign: str, encoding: str, tmp_path: Path) -> None:
    """Code pages show the two bytes of `±` as other signs, or write it as one byte: 391.20 ± 0.39 tokens/s."""
    file = read(TABLE.replace("±", sign), tmp_path / "f", encoding)
    assert file.figures[2].time.spread == pytest.approx(0.39 / 391.20**2)
    for not_a_spread in ("-", "–", "of", "/"):
        with pytest.raises(RequestError, match="t/s is not a number"):
            read(TABLE.replace("±", not_a_spread), tmp_path / "f")
    with pytest.raises(RequestError, match="is not a text file"):
        read(TABLE.replace("±", "\0"), tmp_path / "f")


def test_a_csv_that_lost_rows_is_named(tmp_path: Path) -> None:
    """Of three rows the last one is cut in mid-write, or an open quote takes all rows after it."""
    head, row = "batch_size,prompt_len,new_tokens,latency_s\n", "1,64,32,0.02\n"
    for rest in ("4,64,3", '2,64,"32,0.03\n' + row):
        cut = read(head + row + row.replace("64", "128") + rest, tmp_path / "f")
        assert [figure.shape.prompt_len for figure in cut.figures] == [64, 128]
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


def test_lines_above_tables_belong_to_the_next_ones(tmp_path: Path) -> None:
    """Two runs on two GPUs each are not one on four, and a header names the settings of its own table."""
    two = (FILES / "llama-bench-two-gpus.md").read_text()
    assert read(two + two.replace("gpt-oss 20B", "other 20B"), tmp_path / "f").stages == 2
    one = "Device 0: NVIDIA RTX A5000, compute capability 8.6, VMM: yes\n" + TABLE
    assert "of 1 to 2 GPUs" in read(two + one, tmp_path / "f").remarks[0]
    batched = (FILES / "llama-batched-bench.md").read_text()
    file = read(batched + "\n" + batched.replace("flash_attn = 1", "flash_attn = 0"), tmp_path / "f")
    assert {figure.settings for figure in file.figures} == {(("flash_attn", value),) for value in "01"}


@pytest.mark.parametrize("name", ["guidellm.json", "llama-benchy.json", "trtllm-bench.txt"])
def test_no_report_of_several_is_lost(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="it has 2 reports; give each a file"):
        read(2 * (FILES / name).read_text(), tmp_path / "f")


def test_what_cannot_be_read_names_the_option_that_writes_a_file(tmp_path: Path) -> None:
    log = "Decode batch. #running-req: 1, gen throughput (token/s): 95.1, #queue-req: 0\n"
    for text, what in (((FILES / "vllm-log.txt").read_text(), "vLLM server.*--save-result"), (log, "SGLang server")):
        with pytest.raises(RequestError, match=f"log of an? {what}.* batch_size, prompt_len, new_tokens, tokens_per_s"):
            read(text, tmp_path / "f")
    for tool, file in (("GenAI-Perf", "profile_export_genai_perf.json"), ("AIPerf", "profile_export_aiperf.json")):
        with pytest.raises(RequestError, match=f"use its file {file}, or a CSV"):
            read(f"   NVIDIA {tool} | LLM Metrics\n┃ Statistic ┃ avg ┃\n", tmp_path / "f")
    with pytest.raises(RequestError, match="is not a known result file; use"):  # no names of its own
        read("Prompt Tokens: 24\n", tmp_path / "f")


def test_a_concurrency_before_a_report_belongs_to_it(tmp_path: Path) -> None:
    """Container logs have a prefix, comments a hash; vLLM once named the concurrency above the report alone."""
    report = (FILES / "vllm-serve.txt").read_text()
    twice = f"Maximum request concurrency: 4\n{report}\nMaximum request concurrency: 8\n{report}"
    for prefix in ("", "bench-1  | ", "# ", "(APIServer pid=12) ", "[1,0]<stdout>: "):
        text = "".join(f"{prefix}{line}\n" for line in twice.splitlines())
        caps = [figure.shape.cap for figure in read(text, tmp_path / "f").figures if figure.covers == "decode"]
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
    assert [(each.tokens_given, each.tokens_processed) for each in (first, second)] == [(2, 2.5), (1, 1)]
    assert file.remarks == ("assumed, as the file does not say it: no token from a cache.",)


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


def text_of(name: str) -> str:
    return (FILES / name).read_text()


ROWS = "batch_size,prompt_len,new_tokens,tokens_per_s\n1,512,128,104.9\n"
BENCHY = "\n".join(line for line in text_of("llama-benchy-cached.md").splitlines() if "ctx_" not in line)
DRAFTED = "Acceptance length:     3.20\nDrafts:          6393\nDraft tokens:    19179\n" + "=" * 50
THROUGHPUT = "Throughput: 5.35 requests/s, 2735.50 total tokens/s, 1369.41 output tokens/s\n"
LATENCY = "Avg" + text_of("vllm-latency.txt").partition("Avg")[2]
CLI = re.sub(r"(?m)^.*(offloaded|-ngl ).*\n", "", text_of("llama-cli.txt"))
LOADED = "load_tensors: offloaded 12/33 layers to GPU\n"
SERVER = text_of("llama-server-drafts.txt")
TIMINGS = SERVER[SERVER.index("0.11") :]
CUT_OFF = (
    "draft acceptance = 0.9 ( 108 accepted / 160 generated), mean len = 4.38\n"
    "prompt eval time = 8476.55 ms / 1938 tokens (\n eval time = 1834.34 ms / 61 tokens (\n"
    "draft acceptance = 0.9 ( 51 accepted / 55 generated), mean len = 5.64\n"
)
VULKAN = "ggml_vulkan: 0 = AMD Radeon RX 7900 XT (RADV NAVI31) (radv) | uma: 0 | fp16: 1\n"
SHARED = "ggml_vulkan: {} = V3D 7.1.10.2 (V3DV Mesa) | uma: 1 | fp16: 0\n"


def processor(share: str) -> str:
    """What `ollama ps` prints above a request."""
    return f"NAME ID SIZE PROCESSOR\nx 0b28 20 GB {share} 4 minutes\n" + text_of("ollama.txt")


@pytest.mark.parametrize(
    ("text", "covers", "expected", "said"),
    [
        (text_of("trtllm-bench.txt"), "generate", {},
         "its requests have 128 tokens in and 28 out on average, though the dataset is called 128_128_30000.jsonl."),
        # 2,056 of 8,192 tokens are left when the texts are tokenised again; the file names 8 GPUs.
        (text_of("sglang-mtp.jsonl"), "decode", {"gpus": 8}, "pinned"),
        # Its table with prefix caching, without the rows `ctx_`: 2,048 tokens over a cache of 32,768 in 450 ms.
        (BENCHY, "prefill", {"prompt_len": 2048, "context_len": 32_768, "seconds": 0.45044}, ""),
        # A typing error in an optional column must not go unseen.
        (text_of("table.csv").replace("prompt_len", "luck").replace("new_tokens", "prompt_len"), "prefill", {},
         "columns that are not read: luck."),
        # A CSV may have a title and text below, or other signs between its cells.
        (f"My results, RTX 4090\n\n{ROWS}\nmeasured on Monday\n", "decode", {"seconds": 1 / 104.9}, ""),
        (ROWS.replace(",", ";"), "decode", {"seconds": 1 / 104.9}, ""),
        (ROWS.replace(",", "\t"), "decode", {"seconds": 1 / 104.9}, ""),
        # JSON between other lines, and below a table of something else.
        (f"$ cat result.json\n{text_of('vllm-serve.json')}\n$\n", "decode", {"tool": "vllm bench serve"}, ""),
        (f"| GPU | RAM |\n| --- | --- |\n| RTX | 96 GB |\n\n```json\n{text_of('vllm-serve.json')}\n```\n", "decode",
         {"tool": "vllm bench serve"}, ""),
        # A command above a report names its GPUs.
        ("$ vllm serve m -tp 2 --port 1\n" + text_of("vllm-serve.txt"), "decode", {"gpus": 2, "model's name": "m"}, ""),
        ("$ vllm serve m --tensor-parallel-size=4\n" + text_of("vllm-serve.txt"), "decode", {"gpus": 4}, ""),
        # 19,179 draft tokens in 6,393 drafts are 3 each, so a step processes 4.
        (text_of("vllm-serve.txt").rstrip().removesuffix("=" * 50) + DRAFTED, "decode",
         {"tokens_given": 3.2, "tokens_processed": 4.0, "seconds": 3.2 * 0.01708}, ""),
        # 1,366.09 and 1,369.41 tokens/s are 255 in and 256 out, in an hour's requests; the batch is not in the line.
        (THROUGHPUT, "generate",
         {"batch_size": None, "prompt_len": 255, "new_tokens": 256, "requests": 19_260, "seconds": 3600.0}, ""),
        # Underscores and dashes are the same, the last value counts, and what the shell fills in is unknown.
        ("$ vllm bench latency --input_len 1024 --batch_size=32 -tp 8\n" + LATENCY, "generate",
         {"batch_size": 32, "prompt_len": 1024, "new_tokens": 128, "gpus": 8}, ""),
        ("$ vllm bench latency --input-len $IN --batch-size ${BS} --output-len 64 --tensor_parallel_size '2'\n"
         + LATENCY, "generate", {"batch_size": None, "prompt_len": None, "new_tokens": 64, "gpus": 2}, ""),
        ("$ vllm bench latency --input-len 64 --input-len \\\n 256 $MORE\n" + LATENCY, "generate",
         {"batch_size": None, "prompt_len": 256, "new_tokens": None, "gpus": None}, ""),
        ("$ vllm bench latency --model m\n" + LATENCY, "generate",
         {"batch_size": 8, "prompt_len": 32, "new_tokens": 128, "gpus": None}, ""),
        # What was loaded counts, if the log has it. Options for experts name those in the host's memory.
        ("$ llama-cli -ngl 99 -cmoe\n" + CLI, "decode", {"weights_on_host": True}, ""),
        ("$ llama-cli -ngl 99 --n-cpu-moe 8\n" + CLI, "decode", {"weights_on_host": True}, ""),
        ("$ llama-cli -ngl 99 -ot exps=CPU\n" + CLI, "decode", {"weights_on_host": True}, ""),
        ("$ llama-cli -ngl 99 -ncmoe 0\n" + CLI, "decode", {"weights_on_host": False}, ""),
        ("$ llama-cli -ngl 30 -fa\n" + CLI, "decode", {"gpu_layers": 30}, ""),
        ("$ llama-cli --n-gpu-layers 30\n" + CLI, "decode", {"gpu_layers": 30}, ""),
        ("$ llama-cli -ngl 30\n" + LOADED + CLI, "decode", {"gpu_layers": 12}, ""),
        # What ollama holds on the CPU.
        (processor("43%/57% CPU/GPU"), "decode", {"weights_on_host": True}, "does not say it: no token from"),
        (processor("100% GPU"), "decode", {"weights_on_host": False}, "does not say it: no token from"),
        (processor(""), "decode", {"weights_on_host": False}, "all layers on the GPU"),
        (processor("100% CPU"), "decode", {"gpu_layers": 0}, "does not say it: no token from"),
        ("$ llama-cli --gpu-layers 30\n" + CLI, "decode", {"gpu_layers": 30}, ""),
        (text_of("ollama.txt").replace("run mistral", "run --keepalive 5m --verbose mistral"), "decode",
         {"model's name": "mistral-small:24b"}, ""),
        (processor("100% GPU").replace("x 0b28", "mistral-small:24b 0b28").replace("$ ollama", ""), "decode",
         {"model's name": "mistral-small:24b"}, ""),
        ("Namespace(draft_model='d', model='Qwen/Q-FP8')\n" + text_of("vllm-serve.txt"), "decode",
         {"model's name": "Qwen/Q-FP8"}, ""),
        # llama.cpp's list of SYCL devices has equal heads in several columns.
        ("| | |compute|Max |compute|Max |\n|--|--|--|--|--|--|\n| 0| B580| 160| 1024| 32| 12G|\n\n" + TABLE, "decode",
         {"tool": "llama-bench"}, ""),
        (SERVER + TIMINGS.replace("id  0", "id  1"), "decode", {}, "no other request at the same time"),
        # Drafts of a request that was cut off belong to no other. 51 accepted tokens of 4.64 per step are 11 steps,
        # which wrote 60 tokens: the last one gave more than it wrote.
        (CUT_OFF, "decode", {"seconds": 1.83434 / 11, "tokens_given": 60 / 11, "tokens_processed": 6.0}, ""),
        # 299 tokens after the first, of which 176 were drafted, are 123 steps with four drafts each.
        ("18.0 tok/sec • 300 tokens • 1.16s to first token • Accepted 176/492 draft tokens",
         "decode", {"tokens_given": 299 / 123, "tokens_processed": 5.0, "seconds": 300 / 18 / 123}, ""),
        # A log of progress has several lines of a request: 101 tokens at 20 a second are 100 steps in 5.05 s.
        ("n_gen = 50, tg = 19.0 t/s, tg_3s = 18.1 t/s\nn_gen = 101, tg = 20.0 t/s, tg_3s = 20.1 t/s", "decode",
         {"seconds": 0.0505, "new_tokens": 101}, ""),
        ("Prompt: 33898 tokens, 869.279 tokens-per-sec", "prefill", {"seconds": 33_898 / 869.279}, ""),
        # `/api/v1/chat` of LM Studio: 24 tokens at 32 a second are 23 steps in 0.75 s.
        (json.dumps({"stats": {"input_tokens": 59, "total_output_tokens": 24, "tokens_per_second": 32.0,
                               "time_to_first_token_seconds": 0.117}}), "decode",
         {"seconds": 0.75 / 23, "prompt_len": 59, "new_tokens": 24}, ""),
        # A copy of LM Studio's window may have a line for each part.
        (text_of("lm-studio-window.txt").replace(" • ", "\n\n•\n\n"), "decode",
         {"seconds": 1 / 19.08 * 10_013 / 10_012, "new_tokens": 10_013}, ""),
        # Reports of SGLang since 2025: 95.62 tokens/s of 9.35 ms each are 0.9 at a time.
        (re.sub(r"-----Time per Output(.*\n){4}", "", text_of("sglang-serving.txt")), "decode",
         {"batch_size": 1, "tokens_given": 2.46, "seconds": 2.46 * 7.64e-3}, "the time between arrivals is used"),
        # A GPU that shares the host's memory did not run beside another.
        (VULKAN + SHARED.format(1) + TABLE, "decode", {"stages": 1, "device": "AMD Radeon RX 7900 XT"}, ""),
        (SHARED.format(0) + TABLE, "decode", {"stages": 1, "device": "V3D 7.1.10.2"}, ""),
    ],
)  # fmt: skip
def test_what_is_pasted_says(text: str, covers: str, expected: dict[str, object], said: str, tmp_path: Path) -> None:
    holds(read(text, tmp_path / "f"), covers, expected, said)
