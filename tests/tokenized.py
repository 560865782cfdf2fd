"""Tiny models with a tokenizer of known words, so that a text has known tokens."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

EXPERTS = 8
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
"""A chat template that begins each message with the word `w1`, and the answer with `w2`."""


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose token n is the n-th of these words, and whose token 0 is also any other word."""
    unknown, *others = words
    ids = {word: number for number, word in enumerate((unknown, *others))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)


def save_tokenizer(folder: Path, words: int, template: str | None = None) -> None:
    """Save a tokenizer in which the word `w7` is token 7, and any other word is the unknown token 0."""
    fast = word_tokenizer(f"w{number}" for number in range(words))
    fast.chat_template = template
    fast.save_pretrained(folder)


def planted_mixture(folder: Path, per_token: int, *, all_alike: bool) -> None:
    """Save a mixture of 8 experts in one layer whose router sends token n to expert n mod 8, and to others if it may.

    With `all_alike`, all tokens are the same vector, so that the router sends all to the same experts. Attention adds
    nothing, and the model always writes token 0.
    """
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=EXPERTS, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=16, max_position_embeddings=64, num_local_experts=EXPERTS, num_experts_per_tok=per_token,
        tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    layer, one_hot = model.model.layers[0], torch.eye(EXPERTS)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(one_hot[:1].expand(16, -1) if all_alike else torch.cat([one_hot] * 2))
        layer.mlp.gate.weight.copy_(one_hot)
        layer.self_attn.o_proj.weight.zero_()
        model.lm_head.weight.zero_()
    model.save_pretrained(folder)
    save_tokenizer(folder, 16)
