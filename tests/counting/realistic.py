"""Small configs with the proportions of published models, for types whose defaults hide what differs between layers."""

from __future__ import annotations

from typing import Any

# fmt: off
_TEXT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_MLA = {
    **_TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}
_ROUTED = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_DSA = {
    **_MLA, **_ROUTED, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 6, "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
_MAMBA_2 = {
    "mamba_chunk_size": 8, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_expand": 2,
    "mamba_n_groups": 2, "mamba_n_heads": 8,
}
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_ONE_IN_FOUR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_KDA = {
    **_MLA, **_ROUTED, "q_lora_rank": None, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_hidden_layers": 4, "head_dim": 16,
}
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_SHARED_KV = {
    **_GROUPED, "sliding_window": 6, "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4, "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
}
_GLOBAL_HEADS = {
    **_GROUPED, **_WINDOWS, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
}
_QWEN_HYBRID = {**_GROUPED, **_DELTA_NET, "num_hidden_layers": 4, "layer_types": _ONE_IN_FOUR}
_QWEN_MIXTURE = {**_QWEN_HYBRID, **_ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 32}
_MAMBA_1 = {"vocab_size": 128, "hidden_size": 64, "state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
_ZAMBA = {
    **_TEXT, "num_hidden_layers": 6, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
}
_QWEN_4 = {
    **_QWEN_MIXTURE, "layer_types": [*_ONE_IN_FOUR[:3], "indexed_attention"], "hc_count": 4, "hc_lowrank": 8,
    "ple_layer_ids": [2], "ple_embed_dim": 64, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 100,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "eos_token_id": 1, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
    },
}
_DOTS_3 = {
    **_DSA, "sliding_window": 6, "layer_types": ["indexed_attention", "sliding_attention"] * 2,
    "shared_experts_intermediate_size": 32,
    "per_layer_config": {
        str(index): {
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 24,
        "head_dim": 32,
        }
        for index in (1, 3)
    },
}

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "axk2": [_DSA], "deepseek_v2": [{**_MLA, **_ROUTED, "n_routed_experts": 8, "num_hidden_layers": 3}],
    "deepseek_v3": [
        {**_MLA, **_ROUTED, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_hidden_layers": 4},
    ],
    "deepseek_v32": [_DSA], "glm_moe_dsa": [{**_DSA, "indexer_types": ["full", "full", "shared", "shared"]}],
    "hy_v4": [{**_DSA, "indexer_types": ["full", "full", "shared", "shared"]}],
    "bamba": [{**_GROUPED, **_MAMBA_2, "num_hidden_layers": 4, "attn_layer_indices": [1]}],
    "granitemoehybrid": [{
        **_GROUPED, **_MAMBA_2, "intermediate_size": 32, "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_experts_per_tok": 2, "num_local_experts": 8,
        "shared_intermediate_size": 48, "position_embedding_type": "nope",
    }],
    "falcon": [{
        "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **kinds,
    } for kinds in ({"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2})],
    "falcon_h1": [{**_GROUPED, **_MAMBA_2, "mamba_d_ssm": 128, "num_hidden_layers": 3}],
    "jamba": [{
        **_GROUPED, "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 4,
        "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2, "use_mamba_kernels": False,
    }],
    "mamba": [{**_MAMBA_1, "num_hidden_layers": 3}], "falcon_mamba": [{**_MAMBA_1, "num_hidden_layers": 3}],
    "mamba2": [{
        "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 24, "head_dim": 16,
        "num_heads": 8, "expand": 2, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    }],
    "nemotron_h": [{
        **_GROUPED, **_ROUTED, "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 8,
        "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 48,
    }],
    "zamba": [{
        **_ZAMBA, "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    }],
    "zamba2": [{
        **_ZAMBA, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 24, "mamba_ngroups": 2,
        "num_mem_blocks": blocks, "adapter_rank": 8, "use_mem_rope": True, "hybrid_layer_ids": [2, 4], "chunk_size": 8,
        "use_shared_attention_adapter": blocks == 1,
    } for blocks in (1, 2)],
    "xlstm": [{"vocab_size": 128, "hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "num_blocks": 2}],
    "hrm_text": [{
        **_TEXT, "head_dim": 16, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 3, "prefix_lm": False,
    }],
    "qwen3_next": [_QWEN_MIXTURE], "qwen3_5_text": [_QWEN_HYBRID], "qwen3_5": [{"text_config": _QWEN_HYBRID}],
    "qwen3_5_moe_text": [_QWEN_MIXTURE], "qwen3_5_moe": [{"text_config": _QWEN_MIXTURE}],
    "cohere_compass_text": [{
        **_GROUPED, **_WINDOWS,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _WINDOWS["layer_types"][:2]
        },
    }],
    "dots3_note_text": [_DOTS_3], "dots3_note": [{"text_config": _DOTS_3}], "qwen4_exp_text": [_QWEN_4],
    "qwen4_exp": [{"text_config": _QWEN_4}],
    "olmo_hybrid": [
        {**_GROUPED, **_DELTA_NET, "num_hidden_layers": 4, "layer_types": _ONE_IN_FOUR, "linear_num_key_heads": 4}
    ],
    "kimi_linear": [{
        **_KDA,
        "linear_attn_config": {
            "full_attn_layers": [4], "head_dim": 24, "kda_layers": [1, 2, 3], "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }],
    "bailing_hybrid": [{
        **_KDA, "layer_group_size": 4, "num_expert_group": 1, "topk_group": 1, "linear_head_dim": 24,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    }],
    "minimax": [{
        **_GROUPED, "num_hidden_layers": 4, "layer_types": _ONE_IN_FOUR, "num_experts_per_tok": 2,
        "num_local_experts": 8, "block_size": 8,
    }],
    "lfm2": [{**_GROUPED, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}],
    "lfm2_moe": [{
        **_GROUPED, **_ROUTED, "num_experts": 8, "num_dense_layers": 1, "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3,
    }],
    "lfm3": [{
        **_GROUPED, "num_hidden_layers": 4, "sliding_window": 6,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "conv_L_cache": 5,
    }],
    "gemma3n_text": [
        {**_SHARED_KV, "altup_num_inputs": 4, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 8},
    ],
    "gemma3n": [{"text_config": {**_SHARED_KV, "altup_num_inputs": 4, "laurel_rank": 8}}],
    "gemma4_text": [
        {**_SHARED_KV, "global_head_dim": 32, "use_double_wide_mlp": True},
        {
        **_GLOBAL_HEADS, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8,
        "top_k_experts": 2, "moe_intermediate_size": 32,
    }],
    "gemma4": [{"text_config": {**_GLOBAL_HEADS, "hidden_size_per_layer_input": 0}, "vision_config": None}],
    "gemma4_unified_text": [_GLOBAL_HEADS], "gemma4_unified": [{"text_config": _GLOBAL_HEADS, "vision_config": None}],
    "mimo_v2_flash": [{
        **_GROUPED, **_ROUTED, **_WINDOWS, "v_head_dim": 12, "n_routed_experts": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }],
    "hunyuan_v1_moe": [
        {**_GROUPED, "num_hidden_layers": 2, "num_experts": 8, "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    ],
    "dbrx": [{
        "vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    }],
    "dots1": [{
        **_GROUPED, **_ROUTED, "n_routed_experts": 8, "n_shared_experts": 1, "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    }],
    "longcat_flash": [{
        **_MLA, "head_dim": 8, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
        "moe_topk": 3, "n_routed_experts": 8, "zero_expert_num": 4,
    }],
    "llama4_text": [{
        **_GROUPED, "intermediate_size_mlp": 80, "num_local_experts": 8, "num_hidden_layers": 4,
        "attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"] * 2,
        "moe_layers": [1, 3],
    }],
    "deepseek_v4": [{
        **_TEXT, **_ROUTED, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 24, "n_routed_experts": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "heavily_compressed_attention"] + ["compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "sliding_window": 6, "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 4, "index_head_dim": 16,
        "index_topk": 3, "partial_rotary_factor": 0.5,
    }],
    "minimax_m3_vl_text": [{
        **_GROUPED, "num_hidden_layers": 4, "num_experts_per_tok": 2, "num_local_experts": 8,
        "dense_intermediate_size": 96, "shared_intermediate_size": 48, "rotary_dim": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3, "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1,
    }],
    "laguna": [{
        **_GROUPED, **_ROUTED, **_WINDOWS, "num_attention_heads_per_layer": [4, 6, 4, 6], "num_experts": 8,
        "shared_expert_intermediate_size": 48, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }],
    "xmod": [{**_TEXT, "num_hidden_layers": 2, "default_language": "en_XX", "is_decoder": True}],
    "rwkv": [{"vocab_size": 128, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}],
    "mellum": [{**_GROUPED, **_ROUTED, **_WINDOWS, "num_local_experts": 8, "mlp_layer_types": ["sparse"] * 4}],
}
# fmt: on
