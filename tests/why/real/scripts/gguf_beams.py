"""Continue a prompt with a GGUF file and beam search."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="bfloat16")

inputs = tokenizer("The three most important inventions of the last century are", return_tensors="pt")
output = model.generate(**inputs, num_beams=4, early_stopping=True, max_new_tokens=80)
print(tokenizer.decode(output[0], skip_special_tokens=True))
