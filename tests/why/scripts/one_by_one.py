"""Eight questions, one after the other."""

import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
questions = torch.randint(3, 900, (8, 24))
for question in questions.split(1):
    answer = model.generate(question, max_new_tokens=12, do_sample=False)
print(answer.shape[1])
