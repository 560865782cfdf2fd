"""Stops once the answer repeats itself, and reads the whole answer after every token."""

import difflib

import torch
from common import load
from transformers import StoppingCriteria


class Repeats(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        found = []
        for row in input_ids.tolist():
            cuts = range(40, len(row), 20)
            pairs = (difflib.SequenceMatcher(None, row[:cut], row[cut:], autojunk=False) for cut in cuts)
            found.append(max(pair.ratio() for pair in pairs) > 0.99)
        return torch.tensor(found)


model = load()
for _ in range(3):
    prompt = torch.randint(3, 12, (2, 240))
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False, stopping_criteria=[Repeats()])
