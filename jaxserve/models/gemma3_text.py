"""Gemma 3 text models (``Gemma3ForCausalLM``): norms before and after each part, windows in five layers of six.

The two kinds of layers rotate differently: those with a window by a base of their own, the others by one that is
stretched in the larger sizes. Source: transformers' ``modeling_gemma3``; Gemma 3 technical report (arXiv 2503.19786).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import BlockConfig
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import attention_from_hf, decoder_from_hf, layer_kinds, mlp_from_hf, norm_from_hf
from jaxserve.models.layers import activation_from_hf
from jaxserve.models.rope import Rope, rope_from_hf

WINDOWED, FULL = "sliding_attention", "full_attention"
# What the class means where a file is silent; those of the larger sizes say little more than their width.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``.

    Raises:
        CheckpointError: scores capped or sight in both directions, which no text model of the family has.
    """
    hf = with_defaults(hf, _DEFAULTS)
    if hf.get("attn_logit_softcapping"):
        raise CheckpointError(
            "config.json: attention scores with a cap are not supported", param="attn_logit_softcapping"
        )
    if hf.get("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: attention to later tokens is not supported", param="use_bidirectional_attention"
        )
    norm = norm_from_hf(hf, offset=1.0, wide=True)
    mlp = mlp_from_hf(hf, activation=activation_from_hf(hf["hidden_activation"]))
    bias = bool(hf.get("attention_bias", False))
    blocks = {
        kind: BlockConfig(
            attention_from_hf(
                hf,
                rope=rope_of(hf, kind, _theta(hf, kind), hf["head_dim"]),
                scale=hf["query_pre_attn_scalar"] ** -0.5,
                window=hf["sliding_window"] if kind == WINDOWED else None,
                head_norm=norm,
                bias=bias,
                output_bias=bias,
            ),
            mlp,
            norm,
            after=True,
        )
        for kind in (WINDOWED, FULL)
    }
    layers = tuple(blocks[kind] for kind in kinds_of(hf))
    scale, cap = hf["hidden_size"] ** 0.5, hf.get("final_logit_softcapping")
    return decoder_family(decoder_from_hf(hf, layers, norm, embedding_scale=scale, softcap=cap))


def with_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with the class's own where the file is silent; ``null`` is no silence."""
    return {**defaults, **hf}


def kinds_of(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """What each layer sees: a window or everything before it; by default every sixth, everything.

    Raises:
        CheckpointError: another kind.
    """
    every = hf.get("sliding_window_pattern", 6)
    pattern = (FULL if layer % every == 0 else WINDOWED for layer in range(1, hf["num_hidden_layers"] + 1))
    kinds = layer_kinds(hf) or tuple(pattern)
    strange = next((kind for kind in kinds if kind not in (WINDOWED, FULL)), None)
    if strange is not None:
        raise CheckpointError(f"config.json: a layer of type {strange!r} is not supported", param="layer_types")
    return kinds


def rope_of(hf: Mapping[str, Any], kind: str, theta: float, head_size: int, default: Mapping[str, Any] = {}) -> Rope:
    """The rotation of a kind of layer.

    Args:
        theta: the base, unless ``rope_parameters`` has one for this kind.
        default: fields where ``rope_parameters`` has none for this kind.
    """
    fields = dict((hf.get("rope_parameters") or {}).get(kind) or default)
    if kind == FULL:
        fields |= hf.get("rope_scaling") or {}  # the old spelling: nothing else was ever stretched
    own = {"rope_parameters": fields, "max_position_embeddings": hf["max_position_embeddings"]}
    return rope_from_hf(own, head_size, theta)


def _theta(hf: Mapping[str, Any], kind: str) -> float:
    if kind == FULL:
        return float(hf.get("rope_theta") or 1_000_000.0)
    return float(hf.get("rope_local_base_freq") or 10_000.0)
