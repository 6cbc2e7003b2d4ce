"""Tiny models whose large weights divide by eight, one of each kind of layer: what the rig of meshes runs."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
_PLAIN: Fields = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than devices: the width does the rest
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: Fields = {
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
_RECURRENT: Fields = {
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
_GEMMA_ROPE: Fields = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "default", "rope_theta": 1_000_000.0},
}

MODELS: dict[str, Fields] = {
    "llama": _PLAIN | {"model_type": "llama", "num_key_value_heads": 8},
    "qwen3": _PLAIN | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": _PLAIN | _EXPERTS | {"model_type": "qwen3_moe"},
    "mixtral": _PLAIN | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": _PLAIN
    | _EXPERTS
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "qwen3_5_text": _PLAIN | _RECURRENT | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": _PLAIN
    | _EXPERTS
    | _RECURRENT
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 40},
    "gemma3_text": _PLAIN
    | {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING, FULL],
        "rope_parameters": _GEMMA_ROPE,
        "tie_word_embeddings": True,
    },
    "gemma4_text": _PLAIN
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
        "layer_types": [SLIDING, FULL] * 2,
        "tie_word_embeddings": True,
    },
    "gpt_oss": _PLAIN
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 16,
        "num_experts_per_tok": 3,
        "sliding_window": 16,
        "layer_types": [SLIDING, FULL],
    },
    "deepseek_v3": _PLAIN
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 24,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
