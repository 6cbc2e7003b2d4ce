"""Qwen2 and Qwen2.5 dense (``Qwen2ForCausalLM``): Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import layer_kinds, llama_like


def layer_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """A window only where it is switched on, in the layers that ``layer_types`` or ``max_window_layers`` name."""
    layers, window = hf.get("num_hidden_layers", 0), hf.get("sliding_window")
    if not hf.get("use_sliding_window", False):
        return (None,) * layers
    kinds = layer_kinds(hf)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if layer >= hf.get("max_window_layers", layers) else None for layer in range(layers))


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``."""
    return decoder_family(llama_like(hf, bias=True, windows=layer_windows(hf)))
