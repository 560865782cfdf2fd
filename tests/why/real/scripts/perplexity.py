"""Perplexity of a text under GPT-2, with a sliding window."""

import sys

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, GPT2LMHeadModel

model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = " ".join(
    f"In the year {year} the river rose by {year % 17} feet and the mill stood still." for year in range(90)
)
encodings = tokenizer(text, return_tensors="pt")

max_length, stride = 512, 256
seq_len = encodings.input_ids.size(1)
nll_sum, n_tokens, prev_end = 0.0, 0, 0
for begin in tqdm(range(0, seq_len, stride)):
    end = min(begin + max_length, seq_len)
    trg_len = end - prev_end
    input_ids = encodings.input_ids[:, begin:end]
    target_ids = input_ids.clone()
    target_ids[:, :-trg_len] = -100
    with torch.no_grad():
        neg_log_likelihood = model(input_ids, labels=target_ids).loss
    valid = (target_ids != -100).sum().item() - 1
    nll_sum += neg_log_likelihood * valid
    n_tokens += valid
    prev_end = end
    if end == seq_len:
        break
print(f"perplexity {torch.exp(nll_sum / n_tokens):.0f} over {n_tokens} tokens")
