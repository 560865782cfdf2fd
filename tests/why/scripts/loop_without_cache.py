"""Greedy decoding by hand, as in a first tutorial: each step computes all earlier tokens again."""

import torch
from common import load, prompts

model = load()
ids = prompts(2, 128)
with torch.no_grad():
    past = None
    for _ in range(16):
        logits = model(ids, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=-1)
