"""Likelihoods of whole texts, which read the logits of every position."""

import torch
from common import load, prompts

model = load()
with torch.inference_mode():
    for _ in range(3):
        ids = prompts(4, 64)
        log_probs = model(ids).logits[:, :-1].float().log_softmax(-1)
        print(float(log_probs.gather(-1, ids[:, 1:, None]).sum()) < 0)
