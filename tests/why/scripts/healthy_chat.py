"""A chat class where every question continues the last answer, so there is nothing to batch."""

import sys

import torch
from transformers import AutoModelForCausalLM


class Chat:
    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.so_far = torch.randint(3, 900, (1, 16))

    def ask(self, question):
        self.so_far = torch.cat([self.so_far, question], dim=-1)
        self.so_far = self.model.generate(self.so_far, max_new_tokens=6, do_sample=False)
        return self.so_far.shape[1]


chat = Chat(sys.argv[1])
for _ in range(5):
    print(chat.ask(torch.randint(3, 900, (1, 4))))
