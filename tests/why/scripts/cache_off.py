"""Writes a few lines about a prompt, with a flag left over from fine-tuning."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
prompt = torch.randint(3, 900, (2, 96))
for _ in range(2):
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=False)
    print(answer.shape)
