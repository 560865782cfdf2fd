"""Answer a queue of messages in one batch."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MESSAGES = [
    "When do you open?",
    "Is there a parking lot?",
    "I ordered a blue chair and got a red one. " * 30 + "What shall I do?",
    "Do you deliver on Sundays?",
    "Where is my parcel?",
    "Can I pay by card?",
    "Do you sell lamps?",
    "Thank you!",
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer(MESSAGES, padding=True, return_tensors="pt")
with torch.inference_mode():
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
for message, answer in zip(MESSAGES, output[:, inputs["input_ids"].shape[1] :], strict=True):
    print(message[:30], "->", tokenizer.decode(answer, skip_special_tokens=True).strip()[:60])
