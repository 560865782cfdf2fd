"""Rank answers with a reward model."""

import sys

from transformers import AutoModelForSequenceClassification, AutoTokenizer

PAIRS = [
    (question, answer)
    for question in (
        "How do I get red wine out of a carpet?",
        "Why is the sky blue?",
        "What is a good gift for a cook?",
    )
    for answer in (
        "Blot it with a cloth, then use cold water and salt, and wait before you wash it again with some soap.",
        "Because short waves are scattered more by the air than long ones, and our eyes see blue better than violet.",
        "I do not know, and I would not say so if I did, because it is none of my business what you do at home.",
        "A sharp knife, if they have none, or a jar of good salt, and a book that somebody else has already tried.",
    )
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
rank_model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=1)
rank_model.config.pad_token_id = tokenizer.pad_token_id

for start in range(0, len(PAIRS), 4):
    questions, answers = zip(*PAIRS[start : start + 4], strict=True)
    inputs = tokenizer(list(questions), list(answers), padding=True, return_tensors="pt")
    scores = rank_model(**inputs).logits[:, 0].cpu().detach()
    print(answers[int(scores.argmax())])
