"""Scores batches of texts by their likelihood, and records gradients that it does not use."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
scores = []
with torch.enable_grad():
    for _ in range(240):
        ids = torch.randint(3, 900, (4, 6))
        scores.append(float(model(ids, labels=ids).loss))
print(len(scores))
