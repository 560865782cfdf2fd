"""No cache, padding to the maximum, and 32 bits."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.randint(3, 900, (2, 160))
mask = torch.zeros_like(ids)
mask[:, -80:] = 1
answer = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=False)
print(answer.shape)
