"""Assisted decoding with an assistant as large as the model, which never agrees with it."""

import sys

import torch
from transformers import AutoModelForCausalLM, set_seed

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
set_seed(1)
assistant = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
assistant.generation_config.eos_token_id = None
for _ in range(3):
    prompt = torch.randint(3, 900, (1, 32))
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=assistant)
print(answer.shape[0])
