"""A training step, which needs gradients and train mode."""

import torch
from common import load, prompts

model = load().train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    ids = prompts(2, 64)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
