"""A low-rank adapter next to every linear, as after fine-tuning, is never merged."""

import sys

from common import prompts
from torch import nn
from transformers import AutoModelForCausalLM


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 64, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(64, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapters(model):
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child))
    return model


model = with_adapters(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto"))
for _ in range(3):
    model.generate(prompts(2, 16), max_new_tokens=32, do_sample=False)
