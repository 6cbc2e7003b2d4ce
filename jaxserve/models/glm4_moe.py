"""GLM-4.5, 4.6 and 4.7 (``Glm4MoeForCausalLM``): Llama with half of each head rotated; the first layers are dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like, mlp_from_hf, need, norm_from_hf
from jaxserve.models.moe import experts_from_hf, grouped_router_from_hf


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; the layers that guess more than one token ahead are not read."""
    hf = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, **hf}
    shared = hf.get("n_shared_experts", 1)
    experts = experts_from_hf(
        hf,
        grouped_router_from_hf(hf),
        shared=mlp_from_hf(hf, ffn=shared * hf["moe_intermediate_size"], name="mlp.shared_experts") if shared else None,
    )
    dense, first, count = mlp_from_hf(hf), hf.get("first_k_dense_replace", 1), need(hf, "num_hidden_layers")
    config = llama_like(
        hf,
        ffn=lambda layer: experts if layer >= first else dense,
        bias=bool(hf.get("attention_bias", False)),
        head_norm=norm_from_hf(hf) if hf.get("use_qk_norm", False) else None,
    )
    ahead = hf.get("num_nextn_predict_layers", 1)
    return decoder_family(config, tuple(f"model.layers.{count + index}." for index in range(ahead)))
