"""Qwen3.5 and 3.6 dense, text (``Qwen3_5ForCausalLM``): three Gated DeltaNet layers to one of gated full attention.

Norms are stored zero-centred, but for the one behind the memory. The rotation has three position axes for pictures; of
a text all three are the same, so a plain rotation of the head's first quarter is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import BlockConfig
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import (
    attention_from_hf,
    decoder_from_hf,
    layer_kinds,
    mlp_from_hf,
    need,
    norm_from_hf,
)
from jaxserve.models.recurrent import DeltaConfig
from jaxserve.models.self_attention import AttentionConfig

RECURRENT, FULL = "linear_attention", "full_attention"
# Heads that guess a second token, and eyes: not served.
_ELSEWHERE = ("mtp.", "model.visual.", "visual.")


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``."""
    return hybrid(hf, mlp_from_hf(hf))


def hybrid(hf: Mapping[str, Any], ffn: Any) -> Family:
    """The family with this feed-forward part in every layer.

    Raises:
        CheckpointError: a kind of layer that it does not have.
    """
    norm = norm_from_hf(hf, offset=1.0, wide=True)
    mixers = {RECURRENT: _delta(hf), FULL: _attention(hf)}
    layers = []
    for kind in _kinds(hf):
        if kind not in mixers:
            raise CheckpointError(f"config.json: a layer of type {kind!r} is not supported", param="layer_types")
        layers.append(BlockConfig(mixers[kind], ffn, norm))
    own = decoder_family(decoder_from_hf(hf, layers, norm), _ELSEWHERE)
    # Files that go by the text model's name hold its tensors as the whole model's do.
    return dataclasses.replace(own, nested=True)


def _kinds(hf: Mapping[str, Any]) -> tuple[str, ...]:
    every = hf.get("full_attention_interval") or 4
    pattern = (RECURRENT if (layer + 1) % every else FULL for layer in range(need(hf, "num_hidden_layers")))
    return layer_kinds(hf) or tuple(pattern)


def _delta(hf: Mapping[str, Any]) -> DeltaConfig:
    config = DeltaConfig(
        key_heads=hf.get("linear_num_key_heads", 16),
        value_heads=hf.get("linear_num_value_heads", 32),
        key_size=hf.get("linear_key_head_dim", 128),
        value_size=hf.get("linear_value_head_dim", 128),
        kernel=hf.get("linear_conv_kernel_dim", 4),
        norm=norm_from_hf(hf),
    )
    if config.value_heads % config.key_heads:
        raise CheckpointError(
            f"config.json: {config.value_heads} value heads do not divide among {config.key_heads} key heads",
            param="linear_num_value_heads",
        )
    return config


def _attention(hf: Mapping[str, Any]) -> AttentionConfig:
    bias = bool(hf.get("attention_bias", False))
    return attention_from_hf(
        {"partial_rotary_factor": 0.25, **hf},
        head_size=hf.get("head_dim") or 256,
        head_norm=norm_from_hf(hf, offset=1.0, wide=True),
        gate=True,
        bias=bias,
        output_bias=bias,
    )
