"""Greedy decoding by hand, with its cache and only the logits of the last position."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
with torch.inference_mode():
    found = model(torch.randint(3, 900, (2, 64)), use_cache=True, logits_to_keep=1)
    for _ in range(12):
        token = found.logits[:, -1:].argmax(-1)
        found = model(token, past_key_values=found.past_key_values)
print(token.shape)
