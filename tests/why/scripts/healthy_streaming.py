"""Streams answers that stop at a certain token."""

import sys

from common import load, prompts
from transformers import StoppingCriteria


class Ends(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 900


class Shown:
    def put(self, tokens):
        sys.stdout.write(".")

    def end(self):
        sys.stdout.write("\n")


model = load()
for _ in range(2):
    prompt = prompts(1, 32)
    model.generate(prompt, max_new_tokens=12, do_sample=False, streamer=Shown(), stopping_criteria=[Ends()])
