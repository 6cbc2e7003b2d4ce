"""Reads the fields that families share in a Hugging Face ``config.json``.

Knows their old and new spellings and what is absurd; a family's own fields are read in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import BlockConfig, DecoderConfig
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.layers import Norm, activation_from_hf
from jaxserve.models.rope import rope_from_hf
from jaxserve.models.self_attention import AttentionConfig

# The largest that anybody could mean; tuples and tables of these lengths are made before a weight is seen.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "shared_expert_intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "num_global_key_value_heads": 1 << 12,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "global_head_dim": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "kv_lora_rank": 1 << 16,
    "q_lora_rank": 1 << 16,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "top_k_experts": 1 << 10,
    "vocab_size_per_layer_input": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    "linear_conv_kernel_dim": 1 << 8,
}
_MAY_BE_NULL = frozenset(
    {
        "num_key_value_heads",
        "num_global_key_value_heads",
        "head_dim",
        "global_head_dim",
        "sliding_window",
        "q_lora_rank",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "top_k_experts",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    }
)


def check_sizes(hf: Mapping[str, Any]) -> None:
    """Refuses what is no size, before anything is made of it.

    Raises:
        CheckpointError: a size that is no whole number, below 1 or absurdly large.
    """
    for name, most in _LARGEST.items():
        value = hf.get(name, 1)
        if value is None and name in _MAY_BE_NULL:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(f"config.json: {name} is no whole number from 1 to {most}", param=name)


def need(hf: Mapping[str, Any], name: str) -> Any:
    """A field that must be there.

    Raises:
        CheckpointError: it is not.
    """
    if hf.get(name) is None:
        raise CheckpointError(f"config.json lacks {name!r}", param=name)
    return hf[name]


def norm_from_hf(hf: Mapping[str, Any], **kind: Any) -> Norm:
    """The norm with the configuration's epsilon."""
    return Norm(float(hf.get("rms_norm_eps", 1e-6)), **kind)


def layer_kinds(hf: Mapping[str, Any]) -> tuple[str, ...] | None:
    """``layer_types``, one for each layer, if the file has them.

    Raises:
        CheckpointError: as many as there are layers they are not.
    """
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    if len(kinds) != need(hf, "num_hidden_layers"):
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for {hf['num_hidden_layers']} layers",
            param="layer_types",
        )
    return tuple(map(str, kinds))


def attention_from_hf(hf: Mapping[str, Any], default_theta: float = 10_000.0, **changes: Any) -> AttentionConfig:
    """Plain grouped-query attention as the common fields describe it; ``changes`` are what a family knows better.

    Raises:
        CheckpointError: a field is missing, or heads that do not fit.
    """
    heads, width = need(hf, "num_attention_heads"), need(hf, "hidden_size")
    head_size = changes.get("head_size") or hf.get("head_dim") or width // heads
    if head_size < 1:
        raise CheckpointError(f"config.json: {heads} heads do not fit into a width of {width}")
    fields: dict[str, Any] = {
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_size": head_size,
        "scale": head_size**-0.5,
    } | changes
    if "rope" not in fields:
        fields["rope"] = rope_from_hf(hf, head_size, default_theta)
    config = AttentionConfig(**fields)
    if config.heads % config.kv_heads:
        raise CheckpointError(f"config.json: {config.heads} heads do not divide among {config.kv_heads} key heads")
    return config


def mlp_from_hf(hf: Mapping[str, Any], **changes: Any) -> MLPConfig:
    """The gated feed-forward block of the common fields."""
    activation = activation_from_hf(hf.get("hidden_act", hf.get("hidden_activation", "silu")))
    return MLPConfig(
        **({"ffn": changes.get("ffn") or need(hf, "intermediate_size"), "activation": activation} | changes)
    )


def decoder_from_hf(hf: Mapping[str, Any], layers: Sequence[Any], norm: Norm, **changes: Any) -> DecoderConfig:
    """A decoder of these layers; what is around them comes from the common fields."""
    fields: dict[str, Any] = {
        "vocab_size": need(hf, "vocab_size"),
        "width": need(hf, "hidden_size"),
        "layers": tuple(layers),
        "norm": norm,
        "max_positions": need(hf, "max_position_embeddings"),
        "tied": bool(hf.get("tie_word_embeddings", False)),
    }
    return DecoderConfig(**(fields | changes))


def llama_like(
    hf: Mapping[str, Any],
    *,
    windows: Sequence[int | None] = (),
    ffn: Callable[[int], Any] | None = None,
    default_theta: float = 10_000.0,
    mlp_bias: bool = False,
    **attention: Any,
) -> DecoderConfig:
    """The Llama-shaped decoders: pre-norm blocks that differ in windows and feed-forward parts only.

    Args:
        windows: one for each layer; none at all where no layer has one.
        ffn: the feed-forward part of a layer, by default the common gated block.
        attention: what the family's attention is beside the common fields.
    """
    count, norm = need(hf, "num_hidden_layers"), norm_from_hf(hf)
    if windows and len(windows) != count:
        raise CheckpointError(f"config.json: layer_types has {len(windows)} entries for {count} layers")
    windows = windows or (None,) * count
    shared = {window: attention_from_hf(hf, default_theta, window=window, **attention) for window in set(windows)}
    plain = None if ffn is not None else mlp_from_hf(hf, bias=mlp_bias)
    layers = (
        BlockConfig(shared[window], plain if ffn is None else ffn(index), norm) for index, window in enumerate(windows)
    )
    return decoder_from_hf(hf, tuple(layers), norm)
