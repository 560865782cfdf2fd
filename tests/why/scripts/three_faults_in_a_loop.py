"""Greedy decoding by hand without a cache, with the logits of every position, in 32 bits."""

import torch
from common import load, prompts

model = load(dtype=torch.float32)
ids = prompts(2, 128)
with torch.no_grad():
    for _ in range(8):
        logits = model(ids).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
