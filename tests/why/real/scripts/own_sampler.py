"""Nucleus sampling written by hand."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.eval()


def sample_top_p(logits, p=0.9, temperature=0.8):
    probs = torch.softmax(logits / temperature, dim=-1)
    probs_sort, order = torch.sort(probs, descending=True)
    probs_sort[probs_sort.cumsum(-1) - probs_sort > p] = 0.0
    return order[torch.multinomial(probs_sort / probs_sort.sum(), 1)]


torch.manual_seed(0)
ids = tokenizer(
    "Dear customer,\n\nthank you for your message of last Monday. We have looked at your washing machine and",
    return_tensors="pt",
).input_ids
with torch.no_grad():
    for _ in range(48):
        logits = model(ids).logits[0, -1].float()
        token = sample_top_p(logits)
        ids = torch.cat([ids, token[None]], dim=1)
        if token.item() == tokenizer.eos_token_id:
            break
print(tokenizer.decode(ids[0]))
