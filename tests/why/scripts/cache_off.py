"""Writes a few lines about a prompt, with a flag left over from fine-tuning."""

from common import load, prompts

model = load()
prompt = prompts(2, 96)
for _ in range(2):
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=False)
    print(answer.shape)
