"""Draw one sample, then eight, from a GGUF file."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)

torch.manual_seed(7)
inputs = tokenizer("Once upon a time, in a village by the sea,", return_tensors="pt")
for samples in (1, 8):
    output = model.generate(
        **inputs, do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=32, num_return_sequences=samples
    )
    for text in tokenizer.batch_decode(output, skip_special_tokens=True):
        print("-", text.replace("\n", " "))
