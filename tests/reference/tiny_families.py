"""The tiny checkpoints beyond Llama's shape: windows, experts, recurrent layers, latents, and hubs' own forms.

As tiny_cases.py, whose kinds of mistakes it uses. Widths differ from each other wherever a family allows it, so that no
mistake in shapes goes unseen; windows are shorter than the prompt; a mixture has more experts than a token uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.reference.hub_layouts import LLADA2, MXFP4, Config, fp8, nested, old_spelling, renamed
from tests.reference.tiny_cases import Case, Mistake, dropped, ignored, rope, rope_of, setting, weights

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def halves_swapped(axis: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gate rows for up rows and the other way round."""
    return lambda w: torch.cat(w.chunk(2, axis)[::-1], axis)


def rolled(shift: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each expert (or head) for its neighbour."""
    return lambda w: w.roll(shift, 0)


def without_gates(w: torch.Tensor) -> torch.Tensor:
    """Rows of 4 heads, query and gate each, with the gates' rows zero: a sigmoid of one half."""
    parts = w.unflatten(0, (4, 2, -1)).clone()
    parts[:, 1] = 0
    return parts.reshape(w.shape)


EXPERTS: dict[str, Mistake] = {
    "gate and up swapped": weights("experts.gate_up_proj", halves_swapped(1)),
    "another expert's output": weights("experts.down_proj", rolled(1)),
    "one expert fewer": setting(num_experts_per_tok=2),
}
WITHOUT_OFFSET = weights("norm.weight", lambda w: w - 1)


# --- Gemma ------------------------------------------------------------------------------------------------------------

GEMMA3_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
}
GEMMA4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def gemma3_of_a_hub(config: Config) -> Config:
    """As files of March 2025 have it: a pattern instead of a list, and what is true by default left out."""
    config = old_spelling(config) | {"sliding_window_pattern": 3}
    for name in ("layer_types", "tie_word_embeddings", "final_logit_softcapping", "attn_logit_softcapping"):
        config.pop(name, None)
    return config


def gemma4_of_a_hub(config: Config) -> Config:
    """With the sizes of the global layers as fields of their own, instead of a table of layers."""
    wide = next(iter(config.pop("per_layer_config").values()))
    return config | {
        "global_head_dim": wide["head_dim"],
        "num_global_key_value_heads": wide["num_key_value_heads"],
        "use_bidirectional_attention": "vision",  # of images only
    }


GEMMA: dict[str, Case] = {
    "gemma3": Case(
        Gemma3TextConfig,
        {"rope_parameters": GEMMA3_ROPE, "sliding_window": 20, "query_pre_attn_scalar": 24, "head_dim": 16},
        {
            "norm without its offset": WITHOUT_OFFSET,
            "q norm dropped": dropped("q_norm.weight"),
            "norm behind attention dropped": dropped("post_attention_layernorm.weight"),
            "norm behind the feed-forward block dropped": dropped("post_feedforward_layernorm.weight"),
            "scaled by the head size": setting(query_pre_attn_scalar=16),
            "window one short": setting(sliding_window=19),
            "window one long": setting(sliding_window=21),
            "no global layer": setting(layer_types=[SLIDING] * 7),
            "one theta": rope_of(SLIDING, rope_theta=1_000_000.0),
            "global layers not stretched": rope_of(FULL, rope_type="default"),
            "silu for gelu": setting(hidden_activation="silu"),
        },
        shape={"num_hidden_layers": 7, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
    "gemma3_hub": Case(
        Gemma3TextConfig,
        {
            "rope_parameters": GEMMA3_ROPE,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "head_dim": 24,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
        },
        {
            "pattern of six": setting(layer_types=[SLIDING] * 5 + [FULL]),
            "global layers not stretched": rope_of(FULL, rope_type="default"),
        },
        shape={"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 1},
        layout=nested(
            "gemma3",
            "language_model.model.",
            {
                "vision_tower.vision_model.post_layernorm.weight": (8,),
                "multi_modal_projector.mm_soft_emb_norm.weight": (8,),
            },
            gemma3_of_a_hub,
            architectures=["Gemma3ForConditionalGeneration"],
            vision_config={"model_type": "siglip_vision_model", "hidden_size": 8},
        ),
        taps=True,
    ),
    "gemma4": Case(
        Gemma4TextConfig,
        {
            "rope_parameters": GEMMA4_ROPE,
            "sliding_window": 20,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 6.0,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
        },
        {
            "norm with an offset": weights("norm.weight", lambda w: w + 1),
            "k norm dropped": ignored("k_norm.weight"),
            "layer scalar dropped": ignored("layer_scalar"),
            "no softcap": setting(final_logit_softcapping=None),
            "window one short": setting(sliding_window=19),
            "window one long": setting(sliding_window=21),
            "whole heads turn": rope_of(FULL, partial_rotary_factor=1.0),
            "one theta": rope_of(SLIDING, rope_theta=1_000_000.0),
            "norm behind attention dropped": ignored("post_attention_layernorm.weight"),
        },
        shape={"num_hidden_layers": 6, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
    "gemma4_moe": Case(
        Gemma4TextConfig,
        {
            "rope_parameters": GEMMA4_ROPE,
            "sliding_window": 24,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "layer_types": [SLIDING, FULL] * 2,
        },
        {
            "scale of experts dropped": ignored("per_expert_scale"),
            "scale of the router dropped": ignored("router.scale"),
            "one expert fewer": setting(top_k_experts=2),
            "gate and up swapped": EXPERTS["gate and up swapped"],
            "norm of the dense part dropped": ignored("post_feedforward_layernorm_1.weight"),
            "norm before the experts dropped": ignored("pre_feedforward_layernorm_2.weight"),
            "norm behind the experts dropped": ignored("post_feedforward_layernorm_2.weight"),
            "layer scalar dropped": ignored("layer_scalar"),
        },
        shape={"num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 40},
        taps=True,
    ),
    "gemma4_moe_hub": Case(
        Gemma4TextConfig,
        {
            "rope_parameters": GEMMA4_ROPE,
            "sliding_window": 16,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 6.0,
            "layer_types": [SLIDING, SLIDING, FULL],
        },
        {"no softcap": setting(final_logit_softcapping=None), "window one long": setting(sliding_window=17)},
        shape={"num_hidden_layers": 3, "hidden_size": 40, "intermediate_size": 32},
        layout=nested(
            "gemma4",
            "model.language_model.",
            {"model.vision_tower.std_bias": (8,), "model.embed_vision.embedding_projection.weight": (40, 8)},
            gemma4_of_a_hub,
            architectures=["Gemma4ForConditionalGeneration"],
            vision_config={"model_type": "gemma4_vision", "hidden_size": 8},
            audio_config=None,
            tie_word_embeddings=True,
        ),
        taps=True,
    ),
    "gemma4_ple": Case(
        Gemma4TextConfig,
        {
            "rope_parameters": GEMMA4_ROPE,
            "sliding_window": 20,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 257,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 6.0,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
        },
        {
            "per-layer table dropped": dropped("embed_tokens_per_layer.weight"),
            "per-layer projection dropped": dropped("per_layer_model_projection.weight"),
            "per-layer norm dropped": ignored("per_layer_projection_norm.weight"),
            "per-layer output norm dropped": ignored("post_per_layer_input_norm.weight"),
            "layer scalar dropped": ignored("layer_scalar"),
            "window one short": setting(sliding_window=19),
        },
        shape={"num_hidden_layers": 6, "hidden_size": 48, "intermediate_size": 40, "num_key_value_heads": 1},
        taps=True,
    ),
}


# --- mixtures ---------------------------------------------------------------------------------------------------------

MIXTURES: dict[str, Case] = {
    "qwen3_moe": Case(
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        EXPERTS
        | {
            "not renormalised": setting(norm_topk_prob=False),
            "k norm with an offset": weights("k_norm.weight", lambda w: w + 1),
            "theta": rope(rope_theta=10_000.0),
        },
        old_spelling=True,
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
    "qwen3_moe_sparse": Case(
        Qwen3MoeConfig,
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
        {"renormalised": setting(norm_topk_prob=True), "one expert fewer": EXPERTS["one expert fewer"]},
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
    "mixtral": Case(
        MixtralConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        {
            "one expert only": setting(num_experts_per_tok=1),
            "gate and up swapped": EXPERTS["gate and up swapped"],
            "another expert's output": EXPERTS["another expert's output"],
            "theta": rope(rope_theta=10_000.0),
        },
        old_spelling=True,
        shape={"hidden_size": 48, "intermediate_size": 40},
        taps=True,
    ),
    "glm4_moe": Case(
        Glm4MoeConfig,
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        },
        EXPERTS
        | {
            "scale of experts dropped": setting(routed_scaling_factor=1.0),
            "not renormalised": setting(norm_topk_prob=False),
            "correction dropped": dropped("e_score_correction_bias"),
            "shared expert dropped": dropped("shared_experts.down_proj.weight"),
            "q norm dropped": ignored("q_norm.weight"),
            "v bias dropped": dropped("v_proj.bias"),
            "whole heads turn": rope(partial_rotary_factor=1.0),
        },
        old_spelling=True,
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
    "llada2_moe": Case(
        Glm4MoeConfig,
        {
            "head_dim": 16,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 600_000.0, "partial_rotary_factor": 0.5},
        },
        EXPERTS
        | {
            "groups ignored": setting(n_group=1, topk_group=1),
            "three groups": setting(topk_group=3),
            "correction dropped": dropped("e_score_correction_bias"),
            "scale of experts dropped": setting(routed_scaling_factor=1.0),
            "whole heads turn": rope(partial_rotary_factor=1.0),
        },
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
        layout=LLADA2,
        taps=True,
        block=8,
    ),
}


# --- Qwen3.5 ----------------------------------------------------------------------------------------------------------

DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}


def qwen3_5_of_a_hub(config: Config) -> Config:
    """With the fields that describe images, prediction of several tokens and the state."""
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    return config | {
        "attn_output_gate": True,
        "full_attention_interval": 3,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }


DELTA_MISTAKES: dict[str, Mistake] = {
    "norm without its offset": weights("layernorm.weight", lambda w: w - 1),
    "q norm without its offset": weights("q_norm.weight", lambda w: w - 1),
    "recurrent norm with an offset": weights("linear_attn.norm.weight", lambda w: w + 1),
    "whole heads turn": rope(partial_rotary_factor=1.0),
    "attention's gate dropped": weights("q_proj.weight", without_gates),
    "gates in a block of their own": weights(
        "q_proj.weight", lambda w: w.unflatten(0, (2, 4, -1)).swapaxes(0, 1).reshape(w.shape)
    ),
    "decay dropped": weights("A_log", lambda w: w - 30),
    "bias of the decay dropped": dropped("dt_bias"),
    "convolution turned round": weights("conv1d.weight", lambda w: w.flip(-1)),
    "keys before queries": weights("in_proj_qkv.weight", lambda w: torch.cat([w[32:64], w[:32], w[64:]])),
    "key heads tiled": weights("in_proj_b.weight", lambda w: w[[0, 2, 1, 3]]),
}

QWEN35: dict[str, Case] = {
    "qwen3_5": Case(
        Qwen3_5TextConfig,
        DELTA | {"layer_types": [LINEAR, LINEAR, FULL, LINEAR], "tie_word_embeddings": True},
        DELTA_MISTAKES,
        shape={"num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
    "qwen3_5_moe": Case(
        Qwen3_5MoeTextConfig,
        DELTA
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "layer_types": [LINEAR, FULL, LINEAR],
        },
        EXPERTS
        | {
            "shared expert's gate dropped": dropped("shared_expert_gate.weight"),
            "shared expert dropped": dropped("shared_expert.down_proj.weight"),
            "decay dropped": DELTA_MISTAKES["decay dropped"],
        },
        shape={"num_hidden_layers": 3, "hidden_size": 48},
        taps=True,
    ),
    "qwen3_5_moe_hub": Case(
        Qwen3_5MoeTextConfig,
        DELTA
        | {
            "num_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": [LINEAR, LINEAR, FULL],
        },
        {"one expert fewer": EXPERTS["one expert fewer"], "gate and up swapped": EXPERTS["gate and up swapped"]},
        shape={"num_hidden_layers": 3, "hidden_size": 40, "num_key_value_heads": 1},
        layout=nested(
            "qwen3_5_moe",
            "model.language_model.",
            {
                "model.visual.blocks.0.norm1.weight": (8,),
                "mtp.fc.weight": (40, 80),
                "mtp.layers.0.input_layernorm.weight": (40,),
            },
            qwen3_5_of_a_hub,
            architectures=["Qwen3_5MoeForConditionalGeneration"],
            vision_config={"model_type": "qwen3_5_moe", "hidden_size": 8, "depth": 1},
            image_token_id=248056,
            tie_word_embeddings=False,
        ),
        taps=True,
    ),
}


# --- gpt-oss, DeepSeek, SmolLM3 ---------------------------------------------------------------------------------------

OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 2048,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}

OTHERS: dict[str, Case] = {
    "gpt_oss": Case(
        GptOssConfig,
        OSS | {"sliding_window": 12},
        {
            "sinks dropped": weights("sinks", lambda w: torch.full_like(w, -1e4)),
            "window one short": setting(sliding_window=11),
            "window one long": setting(sliding_window=13),
            "odd layers slide": setting(layer_types=[FULL, SLIDING] * 2),
            "rope truncated": rope(truncate=True),
            "no attention factor": rope(attention_factor=1.0),
            "not clamped": setting(swiglu_limit=1e9),
            "plain silu": setting(swiglu_alpha=1.0),
            "router's bias dropped": dropped("router.bias"),
            "gate and up in blocks": weights(
                "experts.gate_up_proj", lambda w: w.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            ),
            "bias of experts dropped": dropped("experts.down_proj_bias"),
            "bias of the output dropped": dropped("o_proj.bias"),
            "one expert fewer": EXPERTS["one expert fewer"],
        },
        shape={"num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 32},
        taps=True,
    ),
    "gpt_oss_mxfp4": Case(
        GptOssConfig,
        OSS | {"sliding_window": 16, "head_dim": 24},
        {
            "sinks dropped": weights("sinks", lambda w: torch.full_like(w, -1e4)),
            "nibbles swapped": weights(
                "experts.down_proj", lambda w: w.unflatten(1, (-1, 2)).flip(2).flatten(1, 2).contiguous()
            ),
            "exponent one too large": weights("experts.down_proj", lambda w: 2 * w),
        },
        shape={"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96},
        layout=MXFP4,
        taps=True,
    ),
    "deepseek_v3": Case(
        DeepseekV3Config,
        LATENT | {"q_lora_rank": 24, "rms_norm_eps": 1e-2},  # the latents' norms have 1e-6 whatever this says
        EXPERTS
        | {
            "halves turn, not pairs": setting(rope_interleave=False),
            "no mscale": rope(mscale_all_dim=0.0),
            "no scaling": rope(rope_type="default"),
            "latent's norm dropped": ignored("kv_a_layernorm.weight"),
            "queries' norm dropped": ignored("q_a_layernorm.weight"),
            "groups ignored": setting(n_group=1, topk_group=1),
            "correction dropped": dropped("e_score_correction_bias"),
            "scale of experts dropped": setting(routed_scaling_factor=1.0),
            "not renormalised": setting(norm_topk_prob=False),
            "shared expert dropped": dropped("shared_experts.down_proj.weight"),
        },
        old_spelling=True,
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64, "num_key_value_heads": 4},
        taps=True,
    ),
    "deepseek_v3_fp8": Case(
        DeepseekV3Config,
        LATENT | {"q_lora_rank": None, "v_head_dim": 16},
        {
            "scale of another block": weights(
                "mlp.down_proj.weight", lambda w: w * (1 + 0.2 * (torch.arange(160) > 127))
            ),
            "correction dropped": dropped("e_score_correction_bias"),
        },
        shape={"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 160, "num_key_value_heads": 4},
        layout=fp8({"model.layers.2.embed_tokens.weight": (257, 48), "model.layers.2.eh_proj.weight": (48, 96)}),
        taps=True,
    ),
    "smollm3": Case(
        SmolLM3Config,
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 2_000_000.0},
            "no_rope_layers": [1, 0, 1],
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
        {
            "every layer turns": setting(no_rope_layers=[1, 1, 1]),
            "the next layer does not turn": setting(no_rope_layers=[1, 1, 0]),
        },
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
        taps=True,
    ),
}

# --- SDAR -------------------------------------------------------------------------------------------------------------

MASK = 254  # no prompt of these cases has it

BLOCKS: dict[str, Case] = {
    "sdar": Case(
        Qwen3Config,
        {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
        {"q norm dropped": ignored("q_norm.weight"), "theta": rope(rope_theta=10_000.0)},
        shape={"hidden_size": 40, "intermediate_size": 56},
        layout=renamed("sdar", "SDARForCausalLM", block_size=4, mask_token_id=MASK),
        taps=True,
        block=4,
    ),
    "sdar_moe": Case(
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        {"one expert fewer": setting(num_experts_per_tok=2), "not renormalised": setting(norm_topk_prob=False)},
        shape={"hidden_size": 40, "intermediate_size": 56},
        layout=renamed("sdar_moe", "SDARMoeForCausalLM", block_size=4, mask_token_id=MASK),
        taps=True,
        block=4,
    ),
}

CASES: dict[str, Case] = MIXTURES | GEMMA | QWEN35 | OTHERS | BLOCKS
