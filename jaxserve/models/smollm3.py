"""SmolLM3 (``SmolLM3ForCausalLM``): Llama without rotation in every fourth layer (NoPE, arXiv 2305.19466)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like, need


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``.

    Raises:
        CheckpointError: rotations stated for another number of layers than there are.
    """
    hf = {"num_key_value_heads": 4, "tie_word_embeddings": True, **hf}
    bias, count = bool(hf.get("attention_bias", False)), need(hf, "num_hidden_layers")
    every = hf.get("no_rope_layer_interval") or 4
    turned = hf.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(count)]  # 1 where it turns
    if len(turned) < count:
        raise CheckpointError(
            f"config.json: no_rope_layers has {len(turned)} entries for {count} layers", param="no_rope_layers"
        )
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types") or ["full_attention" if turn else "sliding_attention" for turn in turned[:count]]
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    config = llama_like(
        hf,
        windows=windows,
        default_theta=2_000_000.0,
        mlp_bias=bool(hf.get("mlp_bias", False)),
        bias=bias,
        output_bias=bias,
    )
    layers = (
        layer if turn else dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=None))
        for layer, turn in zip(config.layers, turned, strict=False)
    )
    return decoder_family(dataclasses.replace(config, layers=tuple(layers)))
