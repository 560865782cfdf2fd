"""What these scripts share: the model of the first argument, and random tokens for prompts."""

import sys

import torch
from transformers import AutoModelForCausalLM


def load(dtype="auto", **options):
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype, **options)


def prompts(rows, tokens):
    return torch.randint(3, 900, (rows, tokens))
