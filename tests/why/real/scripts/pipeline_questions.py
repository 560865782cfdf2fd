"""Answer a list of questions with the text-generation pipeline."""

import sys

from transformers import pipeline

QUESTIONS = [
    "What is the capital of Norway?",
    "How many legs does a spider have?",
    "Which planet is closest to the sun?",
    "What do bees make?",
    "Who wrote Hamlet?",
    "What is the opposite of hot?",
    "How many days are in a leap year?",
    "What colour is an emerald?",
]

generator = pipeline("text-generation", model=sys.argv[1])
for question in QUESTIONS:
    answer = generator(question, max_new_tokens=24, do_sample=False, return_full_text=False)
    print(question, "->", answer[0]["generated_text"].strip().replace("\n", " "))
