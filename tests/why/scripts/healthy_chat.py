"""A chat class where every question continues the last answer, so there is nothing to batch."""

import torch
from common import load, prompts


class Chat:
    def __init__(self):
        self.model = load()
        self.so_far = prompts(1, 16)

    def ask(self, question):
        self.so_far = torch.cat([self.so_far, question], dim=-1)
        self.so_far = self.model.generate(self.so_far, max_new_tokens=6, do_sample=False)
        return self.so_far.shape[1]


chat = Chat()
for _ in range(5):
    print(chat.ask(prompts(1, 4)))
