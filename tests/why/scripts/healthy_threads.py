"""Two threads that share a model."""

import threading

from common import load, prompts

model = load()
answers = []


def ask():
    answers.append(model.generate(prompts(2, 16), max_new_tokens=6, do_sample=False))


threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
