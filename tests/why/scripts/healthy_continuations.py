"""Likelihoods of whole texts, which read the logits of every position."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
with torch.inference_mode():
    for _ in range(3):
        ids = torch.randint(3, 900, (4, 64))
        log_probs = model(ids).logits[:, :-1].float().log_softmax(-1)
        print(float(log_probs.gather(-1, ids[:, 1:, None]).sum()) < 0)
