"""The tiny checkpoints: how each is configured, how it is stored, and which mistakes its golden must expose.

Knows transformers' configuration classes; make_tiny.py builds the models and writes the folders. Here are the cases of
Llama's shape; the others stand in tiny_families.py.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.reference.hub_layouts import Layout

VOCAB, BOS, EOS = 257, 255, 256

Mistake = Callable[[PreTrainedConfig, dict[str, torch.Tensor]], None]


@dataclass(frozen=True)
class Case:
    """One checkpoint: how to configure it, how to store it, and which mistakes its golden must expose."""

    config: Callable[..., PreTrainedConfig]
    fields: dict[str, Any]
    wrong: dict[str, Mistake]
    dtype: torch.dtype = torch.bfloat16
    old_spelling: bool = False  # rope_theta + rope_scaling, as files written before transformers 5 have it
    shard_size: str = "10MB"
    short_prompt: int = 0  # also logits of the first so many tokens alone, where the length changes the frequencies
    shape: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None  # as hubs have it, where save_pretrained writes something else
    taps: bool = False  # the residual stream after every layer, not only after the first
    block: int = 0  # also logits where each position sees all of its block of so many positions


def rope(**changes: Any) -> Mistake:
    """Mistake: the rope settings with some values replaced."""

    def apply(config: PreTrainedConfig, _: dict[str, torch.Tensor]) -> None:
        config.rope_parameters = config.rope_parameters | changes

    return apply


def rope_of(kind: str, **changes: Any) -> Mistake:
    """Mistake: the rope settings of one kind of layer with some values replaced."""

    def apply(config: PreTrainedConfig, _: dict[str, torch.Tensor]) -> None:
        config.rope_parameters = config.rope_parameters | {kind: config.rope_parameters[kind] | changes}

    return apply


def setting(**changes: Any) -> Mistake:
    """Mistake: configuration fields with other values."""

    def apply(config: PreTrainedConfig, _: dict[str, torch.Tensor]) -> None:
        for name, value in changes.items():
            setattr(config, name, value)

    return apply


def weights(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    """Mistake: every tensor whose name ends in `suffix` changed."""

    def apply(_: PreTrainedConfig, tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if name.endswith(suffix)]
        if not names:
            raise SystemExit(f"no tensor ends in {suffix}")
        for name in names:
            tensors[name] = change(tensors[name])

    return apply


def swapped_halves(head_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows as if the rotary pairs were adjacent (2i, 2i+1) instead of (i, i+head_size/2)."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, 2, head_size // 2, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)

    return change


def dropped(suffix: str) -> Mistake:
    """Mistake: tensors whose names end in `suffix` taken for zeros."""
    return weights(suffix, torch.zeros_like)


def ignored(suffix: str) -> Mistake:
    """Mistake: factors whose names end in `suffix` taken for ones."""
    return weights(suffix, torch.ones_like)


OFFSET_NORM = weights("layernorm.weight", lambda w: w + 1)
NO_NORM = weights("layernorm.weight", torch.ones_like)
NO_SCALING = rope(rope_type="default")
SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
LONG = [1.0, 1.1, 1.6, 2.5, 3.7, 5.0, 6.5, 8.0]
SHORT = [1.0, 1.0, 1.05, 1.1, 1.3, 1.6, 2.0, 2.2]

CASES: dict[str, Case] = {
    "llama": Case(
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-5},
        {
            "norm offset": OFFSET_NORM,
            "norm weight dropped": NO_NORM,
            "final norm dropped": weights("model.norm.weight", torch.ones_like),
            "theta": rope(rope_theta=20000.0),
            "adjacent pairs": weights("q_proj.weight", swapped_halves(16)),
            "head tied": setting(tie_word_embeddings=True),
            "relu for silu": setting(hidden_act="relu"),
        },
        dtype=torch.float32,
    ),
    "llama_tied": Case(
        LlamaConfig,
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
        {"norm offset": OFFSET_NORM, "default theta": rope(rope_theta=10000.0)},
        old_spelling=True,
    ),
    "llama_bias": Case(
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        {
            f"{name} bias dropped": weights(f"{name}_proj.bias", torch.zeros_like)
            for name in ("q", "v", "o", "gate", "up", "down")
        },
        dtype=torch.float16,
        shape={"num_key_value_heads": 4, "intermediate_size": 80},
    ),
    "llama31": Case(
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "no scaling": NO_SCALING,
            "factor": rope(factor=32.0),
            "low_freq_factor": rope(low_freq_factor=2.0),
            "high_freq_factor": rope(high_freq_factor=8.0),
            "original length": rope(original_max_position_embeddings=128),
        },
        old_spelling=True,
        shape=SMALL,
    ),
    "llama_linear": Case(
        LlamaConfig,
        {"rope_parameters": {"type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        {"no scaling": NO_SCALING, "inverse": rope(factor=0.25)},
        old_spelling=True,
        shard_size="80KB",
        shape={"num_key_value_heads": 1},
    ),
    "llama_yarn": Case(
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "no scaling": NO_SCALING,
            "no attention factor": rope(attention_factor=1.0),
            "not truncated": rope(truncate=False),
            "original length": rope(original_max_position_embeddings=256),
        },
        shape=SMALL,
    ),
    "llama_yarn_exact": Case(
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        {
            "truncated": rope(truncate=True),
            "default beta": rope(beta_fast=32.0),
            "no attention factor": rope(attention_factor=1.0),
        },
        old_spelling=True,
        shape=SMALL,
    ),
    "llama_longrope": Case(
        LlamaConfig,
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": SHORT,
                "long_factor": LONG,
            },
        },
        {"short list": rope(long_factor=SHORT), "no attention factor": rope(attention_factor=1.0)},
        short_prompt=40,
        shape=SMALL,
    ),
    "mistral": Case(
        MistralConfig,
        {"sliding_window": 24, "head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {
            "no window": setting(sliding_window=None),
            "window one short": setting(sliding_window=23),
            "window one long": setting(sliding_window=25),
        },
        old_spelling=True,
        shape={"intermediate_size": 72},
    ),
    "qwen2": Case(
        Qwen2Config,
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {f"{name} bias dropped": weights(f"{name}_proj.bias", torch.zeros_like) for name in ("q", "v")},
        old_spelling=True,
    ),
    "qwen2_window": Case(
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {
            "no window": setting(layer_types=["full_attention"] * 3),
            "window everywhere": setting(layer_types=["sliding_attention"] * 3),
            "window one long": setting(sliding_window=17),
        },
        shape={"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64},
    ),
    "qwen3": Case(
        Qwen3Config,
        {
            "tie_word_embeddings": True,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {
            "q norm dropped": weights("q_norm.weight", torch.ones_like),
            "k norm offset": weights("k_norm.weight", lambda w: w + 1),
        },
        old_spelling=True,
        shape={"intermediate_size": 72},
    ),
    "qwen3_yarn": Case(
        Qwen3Config,
        {
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.4,
            },
        },
        {"attention factor ignored": rope(attention_factor=None), "no scaling": NO_SCALING},
        shape={"hidden_size": 48, "intermediate_size": 64},
    ),
}


def configuration(case: Case) -> PreTrainedConfig:
    """The case's configuration object, always in the new spelling."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "attn_implementation": "eager",
    }
    return case.config(**copy.deepcopy(fields | case.shape | case.fields))
