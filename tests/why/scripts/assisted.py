"""Assisted decoding with an assistant as large as the model, which never agrees with it."""

import torch
from common import load, prompts
from transformers import AutoModelForCausalLM, set_seed

model = load()
set_seed(1)
assistant = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
assistant.generation_config.eos_token_id = None
for _ in range(3):
    prompt = prompts(1, 32)
    model.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=assistant)
