"""Qwen3-MoE (``Qwen3MoeForCausalLM``): Qwen3's attention, and experts in all layers but those that are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like, mlp_from_hf, need, norm_from_hf
from jaxserve.models.moe import RouterConfig, experts_from_hf


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; a head's size follows from the width here where the file does not say it."""
    hf = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, **hf}
    bias, count = bool(hf.get("attention_bias", False)), need(hf, "num_hidden_layers")
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    # Off by the class default, on in every released model.
    router = RouterConfig(renormalise=bool(hf.get("norm_topk_prob", False)))
    step, dense_layers = hf.get("decoder_sparse_step", 1), frozenset(hf.get("mlp_only_layers") or ())
    experts, dense = experts_from_hf(hf, router), mlp_from_hf(hf)
    return decoder_family(
        llama_like(
            hf,
            windows=(window,) * count,
            ffn=lambda layer: dense if layer in dense_layers or (layer + 1) % step else experts,
            head_norm=norm_from_hf(hf),
            bias=bias,
            output_bias=bias,
        )
    )
