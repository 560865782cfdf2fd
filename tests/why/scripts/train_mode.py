"""Answers after some fine-tuning: the model is still in train mode."""

import torch
from common import load, prompts

model = load(attention_dropout=0.1)
model.train()
with torch.no_grad():
    for _ in range(4):
        logits = model(prompts(2, 384), logits_to_keep=1).logits
