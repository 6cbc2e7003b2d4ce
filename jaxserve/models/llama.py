"""Llama 2, 3 and what shares its ``model_type``: SmolLM2, Yi, R1-Distill-Llama (``LlamaForCausalLM``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; ``attention_bias`` and ``mlp_bias`` switch biases on everywhere in their block."""
    bias = bool(hf.get("attention_bias", False))
    mlp_bias = bool(hf.get("mlp_bias", False))
    return decoder_family(llama_like(hf, bias=bias, output_bias=bias, mlp_bias=mlp_bias))
