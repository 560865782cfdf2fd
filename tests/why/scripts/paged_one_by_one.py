"""Eight questions, each with a call of continuous batching of its own."""

from common import load, prompts
from transformers import ContinuousBatchingConfig, GenerationConfig

model = load()
generation = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(page_size=32, num_blocks=64, max_batch_tokens=256)
questions = prompts(8, 24).tolist()
for batch in [[question] for question in questions]:
    model.generate_batch(batch, generation_config=generation, continuous_batching_config=batching)
