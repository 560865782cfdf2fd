"""Two threads that share a model."""

import sys
import threading

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
answers = []


def ask():
    answers.append(model.generate(torch.randint(3, 900, (2, 16)), max_new_tokens=6, do_sample=False))


threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(answers))
