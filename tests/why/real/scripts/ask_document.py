"""Ask several questions about one document."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCUMENT = (
    "The lighthouse of Skerry Point was built in 1874 by two brothers from the mainland. Its lamp burned oil until "
    "1931, when a cable was laid across the strait. Three keepers lived there in turns of six weeks. In the winter of "
    "1953 a storm cut them off for forty days, and they survived on fish and flour. The last keeper left in 1989, and "
    "since then the light has been automatic. Today a trust looks after the buildings, and visitors may stay the "
    "night from May to September. "
) * 3
QUESTIONS = [
    "Who built the lighthouse?",
    "When did the last keeper leave?",
    "What did the keepers eat during the storm?",
    "When may visitors stay the night?",
    "How long were the turns of the keepers?",
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for question in QUESTIONS:
    prompt = f"Read the text and answer the question.\n\n{DOCUMENT}\n\nQuestion: {question}\nAnswer:"
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    print(question, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
