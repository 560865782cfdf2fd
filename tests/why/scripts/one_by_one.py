"""Eight questions, one after the other."""

from common import load, prompts

model = load()
questions = prompts(8, 24)
for question in questions.split(1):
    model.generate(question, max_new_tokens=12, do_sample=False)
