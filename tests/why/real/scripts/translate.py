"""Translate sentences with T5, in one greedy batch."""

import sys

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

SENTENCES = [
    "The house is wonderful.",
    "I would like a cup of tea.",
    "Where is the railway station?",
    "The meeting starts at ten.",
    "My sister lives near the harbour.",
    "It will rain tomorrow.",
    "He sold his old bicycle.",
    "We are out of flour and eggs.",
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
inputs = tokenizer([f"translate English to German: {each}" for each in SENTENCES], padding=True, return_tensors="pt")
with torch.inference_mode():
    for _ in range(2):
        output = model.generate(**inputs, max_new_tokens=40, min_new_tokens=40)
print(output.shape)
