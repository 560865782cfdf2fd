"""Stop generation at the next question of a transcript."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

TRANSCRIPT = "Interview of a beekeeper.\n" + "".join(
    f"Q{n}: How was the year {1990 + n}?\nA{n}: The bees were well and we had {n + 10} jars of honey.\n"
    for n in range(9)
)


class StopOnSequences(StoppingCriteria):
    def __init__(self, sequences, start):
        self.sequences = sequences
        self.start = start

    def __call__(self, input_ids, scores, **kwargs):
        for sample in input_ids:
            for sequence in self.sequences:
                if sample.shape[-1] < len(sequence):
                    continue
                for window in sample.unfold(0, len(sequence), 1)[self.start :]:
                    if torch.all(torch.eq(window, sequence)):
                        return True
        return False


tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
stops = [tokenizer(text, return_tensors="pt").input_ids[0] for text in ("\nQ10", "\nQ11", "The end.", "###", "\n\n\n")]
inputs = tokenizer(TRANSCRIPT + "Q9: And last year?\nA9:", return_tensors="pt")
output = model.generate(
    **inputs,
    max_new_tokens=96,
    do_sample=False,
    stopping_criteria=StoppingCriteriaList([StopOnSequences(stops, start=0)]),
)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
