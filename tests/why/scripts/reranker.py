"""Scores of pairs by the logits of two words at the last position, of which every position is computed."""

import torch
from common import load, prompts

model = load()
for _ in range(4):
    ids = prompts(4, 192)
    pairs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        last = model(**pairs).logits[:, -1]
    print(last[:, [5, 9]].float().softmax(-1)[:, 1].tolist())
