"""Models of two narrow layers with random weights: one for each kind of attention and of MLP."""

from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OF_KIND: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 16},
    # Five local layers, then a global one (Gemma 3 report, arXiv:2503.19786).
    "Gemma3": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**_EXPERTS, "num_experts": 4, "head_dim": 16},
    # A dense first layer, then experts; latents in place of keys and values (DeepSeek-V2, arXiv:2405.04434).
    "DeepseekV2": {
        **_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1,
    },
}  # fmt: skip


def small_model(kind: str, **options: Any) -> Any:
    """A `kind`ForCausalLM of transformers in float32, always with the same weights; `options` are its config's."""
    model = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    return model(model.config_class(**{**SIZES, **_OF_KIND.get(kind, {}), **options})).eval()
