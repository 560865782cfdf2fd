"""Embed product reviews in batches of eight."""

import sys

import torch
from transformers import AutoModel, AutoTokenizer

REVIEWS = [
    f"{opening} The {thing} {verdict}."
    for opening in ("Bought it in May.", "A present for my brother.")
    for thing in ("kettle", "lamp", "tent", "keyboard")
    for verdict in ("works well and looks good", "broke after a week", "is smaller than on the picture")
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1]).eval()

embeddings = []
for start in range(0, len(REVIEWS), 8):
    batch = tokenizer(
        REVIEWS[start : start + 8], padding="max_length", max_length=256, truncation=True, return_tensors="pt"
    )
    with torch.inference_mode():
        output = model(**batch)
    mask = batch["attention_mask"].unsqueeze(-1)
    embeddings.append((output.last_hidden_state * mask).sum(1) / mask.sum(1))
print(torch.cat(embeddings).shape)
