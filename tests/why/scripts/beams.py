"""Beam search, copied from a translation example."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
for _ in range(3):
    answer = model.generate(torch.randint(3, 900, (2, 64)), max_new_tokens=12, num_beams=5)
print(answer.shape[0])
