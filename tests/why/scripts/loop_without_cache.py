"""Greedy decoding by hand, as in a first tutorial: each step computes all earlier tokens again."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = torch.randint(3, 900, (2, 128))
with torch.no_grad():
    past = None
    for _ in range(16):
        logits = model(ids, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
print(ids.shape)
