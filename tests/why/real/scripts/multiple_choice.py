"""Multiple choice: pick the option with the highest log-likelihood."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = {
    "Water freezes at": ["zero degrees Celsius", "ten degrees Celsius", "fifty degrees Celsius", "no temperature"],
    "The sun rises in the": ["east", "west", "north", "evening"],
    "A triangle has": ["three sides", "four sides", "five sides", "no sides"],
    "Cows eat mostly": ["grass", "meat", "stones", "paper"],
    "The author of a book": ["writes it", "eats it", "paints it", "forgets it"],
    "At night the sky is": ["dark", "green", "bright yellow", "made of wood"],
    "A carpenter works with": ["wood", "fish", "clouds", "tax law"],
    "Paris is a city in": ["France", "Spain", "Canada", "the ocean"],
}

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()


@torch.no_grad()
def log_likelihood(context: str, continuation: str) -> float:
    start = len(tokenizer(context).input_ids)
    ids = tokenizer(f"{context} {continuation}", return_tensors="pt").input_ids
    log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return log_probs.gather(-1, ids[0, start:, None]).sum().item()


correct = 0
for context, options in QUESTIONS.items():
    scores = [log_likelihood(context, option) for option in options]
    correct += scores.index(max(scores)) == 0
print(f"{correct} of {len(QUESTIONS)}")
