"""Short questions, each padded to the model's maximum."""

import torch
from common import load, prompts

model = load()
length = 384
for _ in range(3):
    ids = prompts(4, length)
    mask = torch.zeros_like(ids)
    mask[:, -48:] = 1
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
