"""Embed notes with mean pooling, and find the one nearest to a query."""

import sys

import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

NOTES = [f"Note {n}: call the {who} about the {what}." for n, (who, what) in enumerate(
    (who, what)
    for who in ("plumber", "teacher", "bank", "dentist", "garage", "landlord", "library", "embassy")
    for what in ("invoice", "appointment", "missing key", "form", "broken window", "parcel", "holiday")
)]  # fmt: skip

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1])
model.eval()


def embed(text):
    encoded = tokenizer(text, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


vectors = torch.cat([embed(note) for note in NOTES])
print(NOTES[(vectors @ embed("who fixes the car?").T).argmax()])
