"""A mixture of experts that runs its experts one after the other."""

import torch
from common import prompts
from transformers import MixtralConfig, MixtralForCausalLM

sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
config = MixtralConfig(num_local_experts=64, num_experts_per_tok=2, num_key_value_heads=4, vocab_size=1024, **sizes)
model = MixtralForCausalLM._from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
with torch.no_grad():
    for _ in range(12):
        logits = model(prompts(2, 64), logits_to_keep=1).logits
