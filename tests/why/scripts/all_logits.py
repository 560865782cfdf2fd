"""A hand-written loop with a cache, whose prompt computes the logits of every position."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
with torch.no_grad():
    for _ in range(5):
        ids = torch.randint(3, 900, (4, 256))
        found = model(ids, use_cache=True)
        for _ in range(2):
            token = found.logits[:, -1:].argmax(-1)
            found = model(token, past_key_values=found.past_key_values)
print(token.shape)
