"""Answers after some fine-tuning: the model is still in train mode."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", attention_dropout=0.1)
model.train()
with torch.no_grad():
    for _ in range(4):
        logits = model(torch.randint(3, 900, (2, 384)), logits_to_keep=1).logits
print(logits.shape)
