"""Chat with a mixture-of-experts model."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", experts_implementation="eager")

questions = ["Where do penguins live?", "What is a prime number?", "Name a river in Asia.", "Who invented paper?"]
inputs = tokenizer(questions, padding=True, padding_side="left", return_tensors="pt")
with torch.inference_mode():
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
print(output.shape)
