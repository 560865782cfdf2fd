"""Beam search, copied from a translation example."""

from common import load, prompts

model = load()
for _ in range(3):
    model.generate(prompts(2, 64), max_new_tokens=12, num_beams=5)
