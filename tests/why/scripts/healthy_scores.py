"""Likelihoods without gradients, which use the logits of every position."""

import torch
from common import load, prompts

model = load()
with torch.inference_mode():
    for _ in range(3):
        ids = prompts(4, 64)
        print(float(model(ids, labels=ids).loss) > 0)
