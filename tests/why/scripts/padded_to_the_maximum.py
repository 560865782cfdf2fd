"""Short questions, each padded to the model's maximum."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
length = 384
for _ in range(3):
    ids = torch.randint(3, 900, (4, length))
    mask = torch.zeros_like(ids)
    mask[:, -48:] = 1
    answer = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
print(answer.shape[0])
