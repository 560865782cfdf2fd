"""Answer questions in batches, slowly: `roofscope why examples/answers.py` names the two lines to change.

The model has the shape of SmolLM2-135M. Weights and questions are random, so nothing is downloaded.
"""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 128

config = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
    eos_token_id=None,  # random weights: no answer ends early
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
start = time.perf_counter()
for questions in torch.randint(3, 49152, (2, 2, 40)):
    prompts = torch.nn.functional.pad(questions, (LENGTH - questions.shape[1], 0))
    answers = model.generate(
        prompts,
        attention_mask=(prompts > 0).long(),
        max_new_tokens=6,
        do_sample=False,
        use_cache=False,
    )
    print(answers[:, LENGTH:].tolist())
print(f"{time.perf_counter() - start:.1f} s")
