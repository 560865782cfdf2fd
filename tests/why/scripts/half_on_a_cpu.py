"""Runs in float16 on a CPU, as if on a GPU."""

import sys

import torch
from common import prompts
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float16)
with torch.no_grad():
    for _ in range(8):
        logits = model(prompts(2, 128), logits_to_keep=1).logits
