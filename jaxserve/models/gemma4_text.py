"""Gemma 4 text models (``Gemma4ForCausalLM``): dense, with experts beside the dense blocks, and the small E models.

Layers with a window and those without have heads of their own size and number; in the larger models the latter use
their keys as values. The last layers of the E models use the keys and values of an earlier one, and every layer of
them gets an embedding of its own. Source: transformers' ``configuration_gemma4`` and ``modeling_gemma4``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.gemma3_text import FULL, WINDOWED, kinds_of, rope_of, with_defaults
from jaxserve.models.gemma4_layer import LayerInputsConfig, ScaledBlockConfig, ScaledExpertsConfig
from jaxserve.models.hf_fields import attention_from_hf, check_sizes, decoder_from_hf, mlp_from_hf, need, norm_from_hf
from jaxserve.models.layers import Norm, activation_from_hf
from jaxserve.models.self_attention import AttentionConfig

# What the class means where a file is silent.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
}
_THETA = {WINDOWED: 10_000.0, FULL: 1_000_000.0}
_ROPE: dict[str, dict[str, Any]] = {
    WINDOWED: {"rope_type": "default"},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
_OWN = ("head_dim", "num_key_value_heads")
_LARGEST = 1 << 14  # embedding of one layer
_SHARED = ("k_proj", "v_proj", "k_norm", "v_norm")


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``.

    Raises:
        CheckpointError: sight in both directions, or layers that differ in what they may not.
    """
    hf = with_defaults(hf, _DEFAULTS)
    if hf.get("use_bidirectional_attention") == "all":
        raise CheckpointError(
            "config.json: attention to later tokens is not supported", param="use_bidirectional_attention"
        )
    kinds = (*kinds_of(hf)[:-1], FULL)  # the last layer has no window, whatever the file says
    norm, shares = norm_from_hf(hf, wide=True), _shares(hf, kinds)
    activation, inputs = activation_from_hf(hf["hidden_activation"]), _inputs(hf)
    experts = _experts(hf, activation, norm)
    plain, wide = (mlp_from_hf(hf, activation=activation, ffn=times * hf["intermediate_size"]) for times in (1, 2))
    layers = tuple(
        ScaledBlockConfig(
            mixer,
            wide if mixer.shares is not None and hf.get("use_double_wide_mlp") else plain,
            norm,
            experts,
            inputs,
            activation,
        )
        for mixer in _mixers(hf, kinds, shares, norm)
    )
    side = LayerInputsConfig(hf["vocab_size_per_layer_input"], len(layers), inputs, norm) if inputs else None
    config = decoder_from_hf(
        hf,
        layers,
        norm,
        embedding_scale=hf["hidden_size"] ** 0.5,
        softcap=hf.get("final_logit_softcapping"),
        side=side,
    )
    # Files may carry keys and values for layers that use another one's.
    unused = (
        f"model.layers.{layer}.self_attn.{name}"
        for layer, source in enumerate(shares)
        if source is not None
        for name in _SHARED
    )
    return decoder_family(config, tuple(unused))


def _mixers(
    hf: Mapping[str, Any], kinds: Sequence[str], shares: Sequence[int | None], norm: Norm
) -> tuple[AttentionConfig, ...]:
    bias = bool(hf.get("attention_bias", False))
    own = {
        kind: attention_from_hf(
            fields,
            rope=rope_of(hf, kind, _THETA[kind], fields["head_dim"], _ROPE[kind]),
            scale=1.0,
            window=hf["sliding_window"] if kind == WINDOWED else None,
            head_norm=norm,
            value_norm=norm,
            keys_are_values=bool(hf.get("attention_k_eq_v", False)) and kind == FULL,
            bias=bias,
            output_bias=bias,
        )
        for kind, fields in _geometry(hf, kinds).items()
    }
    return tuple(dataclasses.replace(own[kind], shares=source) for kind, source in zip(kinds, shares, strict=True))


def _geometry(hf: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The fields as they hold for each kind: what ``per_layer_config`` says, or what files say that have none."""
    stated = hf.get("per_layer_config")
    if stated is None:
        own = {"head_dim": hf["global_head_dim"]}
        if hf.get("attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = hf["num_global_key_value_heads"]
        stated = {layer: own for layer, kind in enumerate(kinds) if kind == FULL}
    changes = {int(layer): own for layer, own in stated.items()}  # "05" is layer 5
    found = {kind: changes.get(layer, {}) for layer, kind in enumerate(kinds)}
    same = all(changes.get(layer, {}) == found[kind] for layer, kind in enumerate(kinds))
    if (
        not same
        or not changes.keys() <= set(range(len(kinds)))
        or any(own.keys() - set(_OWN) for own in found.values())
    ):
        raise CheckpointError(
            f"config.json: per_layer_config may change {' and '.join(_OWN)}, in all layers of a type alike",
            param="per_layer_config",
        )
    for own in found.values():
        check_sizes(own)
    return {kind: {**hf, **own} for kind, own in found.items()}


def _shares(hf: Mapping[str, Any], kinds: Sequence[str]) -> tuple[int | None, ...]:
    """For each layer the earlier one whose keys and values it uses: the last of its kind that has some."""
    first = len(kinds) - (hf["num_kv_shared_layers"] or 0)
    sources = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not 0 < first <= len(kinds) or set(kinds) != set(sources):
        raise CheckpointError(
            "config.json: num_kv_shared_layers leaves a kind of layers without keys and values",
            param="num_kv_shared_layers",
        )
    return tuple(sources[kind] if layer >= first else None for layer, kind in enumerate(kinds))


def _inputs(hf: Mapping[str, Any]) -> int:
    """Size of each layer's own embeddings; 0 where there are none."""
    size = int(hf["hidden_size_per_layer_input"] or 0)
    if not 0 <= size <= _LARGEST:
        raise CheckpointError(
            f"config.json: hidden_size_per_layer_input is not from 0 to {_LARGEST}", param="hidden_size_per_layer_input"
        )
    if size and hf["vocab_size_per_layer_input"] < hf["vocab_size"]:
        raise CheckpointError(
            "config.json: fewer embeddings for each layer than tokens", param="vocab_size_per_layer_input"
        )
    return size


def _experts(hf: Mapping[str, Any], activation: str, norm: Norm) -> ScaledExpertsConfig | None:
    if not hf.get("enable_moe_block"):
        return None
    count, chosen = need(hf, "num_experts"), need(hf, "top_k_experts")
    if not 0 < chosen <= count:
        raise CheckpointError(f"config.json: {chosen} of {count} experts cannot be chosen", param="top_k_experts")
    return ScaledExpertsConfig(count, chosen, need(hf, "moe_intermediate_size"), activation, norm)
