"""No cache, padding to the maximum, and 32 bits."""

import torch
from common import load, prompts

model = load(dtype=torch.float32)
ids = prompts(2, 160)
mask = torch.zeros_like(ids)
mask[:, -80:] = 1
model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=False)
