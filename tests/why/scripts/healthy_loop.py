"""Greedy decoding by hand, with its cache and only the logits of the last position."""

import torch
from common import load, prompts

model = load()
with torch.inference_mode():
    found = model(prompts(2, 64), use_cache=True, logits_to_keep=1)
    for _ in range(12):
        token = found.logits[:, -1:].argmax(-1)
        found = model(token, past_key_values=found.past_key_values)
