"""Puts the same long document before every question and tokenizes it each time."""

import torch
from common import load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {f"w{number}": number for number in range(3, 900)}
tokenizer = Tokenizer(models.WordLevel({"?": 0, **words}, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
document = " ".join(list(words) * 100)

model = load()
found = None
for _ in range(8):
    found = tokenizer(document)["input_ids"]
    prompt = torch.tensor(found[:64]).expand(2, -1)
    print(model.generate(prompt, max_new_tokens=2, do_sample=False).shape)
