"""Draw eight answers, and keep the longest."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.manual_seed(5)

inputs = tokenizer("Q: Why do leaves turn red in autumn?\nA:", return_tensors="pt")
answers = []
for _ in range(8):
    output = model.generate(**inputs, do_sample=True, top_k=50, temperature=0.9, min_new_tokens=16, max_new_tokens=16)
    answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(max(answers, key=len))
