"""Greedy decoding by hand without a cache, with the logits of every position, in 32 bits."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.randint(3, 900, (2, 128))
with torch.no_grad():
    for _ in range(8):
        logits = model(ids).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
print(ids.shape)
