"""Qwen3 dense (``Qwen3ForCausalLM``): Llama with a norm on each head of q and k, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like, norm_from_hf
from jaxserve.models.qwen2 import layer_windows


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``."""
    return decoder_family(llama_like(hf, windows=layer_windows(hf), **attention(hf)))


def attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen3's attention is; ``head_dim`` is 128 by the class default and never derived from the width."""
    bias = bool(hf.get("attention_bias", False))
    size = hf.get("head_dim") or 128
    return {"head_norm": norm_from_hf(hf), "head_size": size, "bias": bias, "output_bias": bias}
