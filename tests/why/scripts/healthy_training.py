"""A training step, which needs gradients and train mode."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    ids = torch.randint(3, 900, (2, 64))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
