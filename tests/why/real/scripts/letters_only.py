"""Generate text without digits, with a logits processor."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList


class NoDigits(LogitsProcessor):
    """Forbids tokens with digits among the likely ones."""

    def __init__(self, tokenizer, candidates=2000):
        self.tokenizer = tokenizer
        self.candidates = candidates

    def __call__(self, input_ids, scores):
        for row in range(scores.shape[0]):
            for token in torch.topk(scores[row], self.candidates).indices.tolist():
                if any(character.isdigit() for character in self.tokenizer.decode([token])):
                    scores[row, token] = -float("inf")
        return scores


tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("The history of the town begins in", return_tensors="pt")
output = model.generate(
    **inputs, max_new_tokens=96, do_sample=True, logits_processor=LogitsProcessorList([NoDigits(tokenizer)])
)
print(tokenizer.decode(output[0], skip_special_tokens=True))
