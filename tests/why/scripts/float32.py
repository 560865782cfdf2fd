"""Loads a 16-bit checkpoint in float32, as older examples do."""

import sys

import torch
from common import prompts
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    for _ in range(4):
        logits = model(prompts(4, 256), logits_to_keep=1).logits
