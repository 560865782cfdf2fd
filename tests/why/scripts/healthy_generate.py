"""A batch of questions without a fault."""

from common import load, prompts

model = load()
print(model.generate(prompts(4, 32), max_new_tokens=16, do_sample=False).shape)
