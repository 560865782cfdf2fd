"""Scripts of many kinds keep their output and exit code while their models' calls are recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from planted_faults import run_watched

pytestmark = pytest.mark.slow

LOAD = """import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.ones(2, 8, dtype=torch.long)
"""
# (source, output, kinds of the recorded calls); test_watching.py has scripts that raise, exit, read, fork or thread.
KINDS = {
    "wraps": (
        "class Whole(torch.nn.Module):\n"
        "    def __init__(self, inner):\n"
        "        super().__init__()\n"
        "        self.inner = inner\n"
        "    def forward(self, ids):\n"
        "        return self.inner(ids).logits.shape[0]\n"
        "print(Whole(model)(ids))\n",
        "2\n", ["forward"],
    ),
    "compiles": (
        "fast = torch.compile(model, backend='eager')\n"
        "with torch.no_grad():\n    print(fast(ids).logits.shape[0])\n",
        "2\n", ["forward"],
    ),
    "accelerates": (
        "from accelerate import Accelerator\n"
        "ready = Accelerator(cpu=True).prepare(model)\n"
        "print(ready.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[0])\n",
        "2\n", ["generate"],
    ),
    "predicts": (
        "import tempfile\n"
        "from transformers import Trainer, TrainingArguments\n"
        "arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True)\n"
        "data = [{'input_ids': row, 'labels': row} for row in ids]\n"
        "print(Trainer(model=model, args=arguments).predict(data).predictions.shape[0])\n",
        "2\n", ["forward"],
    ),
    "pipes": (
        "from tokenizers import Tokenizer, models, pre_tokenizers\n"
        "from transformers import PreTrainedTokenizerFast, pipeline\n"
        "words = Tokenizer(models.WordLevel({'?': 0, 'one': 1, 'two': 2}, unk_token='?'))\n"
        "words.pre_tokenizer = pre_tokenizers.Whitespace()\n"
        "words = PreTrainedTokenizerFast(tokenizer_object=words, pad_token='?')\n"
        "generate = pipeline('text-generation', model=model, tokenizer=words, device='cpu')\n"
        "print(len(generate('one two one', max_new_tokens=3, do_sample=False)))\n",
        "1\n", ["generate"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that(kind: str, tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, printed, calls = KINDS[kind]
    script = tmp_path / "own.py"
    script.write_text(LOAD + source)
    with torch.enable_grad():
        recorder = run_watched(script, tiny_folder)
    sys.stdout.flush()
    assert capfd.readouterr().out == printed
    seen = recorder.seen(kind).calls
    assert [call.kind for call in seen] == calls
    assert all(call.where.startswith("own.py:") for call in seen)
