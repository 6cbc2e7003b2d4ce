"""Qwen3 dense (``Qwen3ForCausalLM``): Llama with a norm on each head of q and k, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.decoder import read_config
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.qwen2 import layer_windows


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; ``head_dim`` is 128 by the class default and never derived from the width."""
    bias = bool(hf.get("attention_bias", False))
    head_size = hf.get("head_dim") or 128
    config = read_config(
        {**hf, "head_dim": head_size}, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=layer_windows(hf)
    )
    return decoder_family(config)
