"""First words for many short texts, with frozen weights as before fine-tuning."""

import torch
from common import load, prompts

model = load()
model.requires_grad_(False)
with torch.inference_mode():
    for _ in range(8):
        words = model(prompts(16, 8), logits_to_keep=1).logits.argmax(-1)
