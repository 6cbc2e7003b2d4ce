"""Llama 2, 3 and what shares its ``model_type``: SmolLM2, Yi, R1-Distill-Llama (``LlamaForCausalLM``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.decoder import read_config
from jaxserve.models.family import Family, decoder_family


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; ``attention_bias`` and ``mlp_bias`` switch biases on everywhere in their block."""
    bias = bool(hf.get("attention_bias", False))
    mlp_bias = bool(hf.get("mlp_bias", False))
    return decoder_family(read_config(hf, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias))
