"""What GGUF's architectures call things, in the terms of their Hugging Face originals.

It knows tensor names, the value changes that the GGUF converters make, and where the fields of ``config.json`` are
kept. It does not know the container nor what the models compute: :mod:`jaxserve.models` states that once, for the
Hugging Face form.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jaxserve.checkpoint.gguf_recurrent import NAMES, PLAIN_NORM, WHOLE_NAMES, Undo, ValueHeads
from jaxserve.errors import CheckpointError

ROPE_DIVISORS: Final = "rope_freqs.weight"  # one divisor per frequency: configuration, not a weight
_NO_TOKEN: Final = 0xFFFFFFFF
_BLOCK_NAME: Final = re.compile(r"blk\.(\d{1,4})\.([a-z0-9_]+)\.(weight|bias)")
_ANY_BLOCK: Final = re.compile(r"blk\.(\d{1,4})\.(.+)")

_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_COMMON_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS: Final = _COMMON_NAMES | {"ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS: Final = _COMMON_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# All experts of a layer in one tensor, so it has the name of none of them.
_EXPERTS: Final = {f"ffn_{name}_exps.weight": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")}
_SHARED_EXPERT: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}


class _Fields:
    """Typed access to one architecture's metadata; what is missing or of the wrong kind is named in the error."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str) -> None:
        self.path = path
        self.metadata = metadata
        self.prefix = prefix

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.fail(f"metadata '{self.prefix}.{key}' is {_brief(value)}, not a positive whole number")
        return value

    def count(self, key: str) -> int:
        """As an integer, but it may be 0, and is if it is not there."""
        return self.integer(key) if self.metadata.get(f"{self.prefix}.{key}", 0) != 0 else 0

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(f"metadata '{self.prefix}.{key}' is {_brief(value)}, not a positive number")
        # Stored as float32: the shortest decimal that rounds to it is what the original configuration said.
        return float(str(np.float32(value)))

    def token(self, key: str, vocabulary: int) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id", _NO_TOKEN)
        if value == _NO_TOKEN:
            return None
        if type(value) is not int or not 0 <= value < vocabulary:
            raise self.fail(f"the {key} token is {_brief(value)}, outside of the {vocabulary} embedding rows")
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What tells one architecture from another.

    Attributes:
        model_type, model_class: as in a Hugging Face configuration.
        names: block tensors, GGUF to Hugging Face.
        permutes: query and key rows are stored for rotary embedding of neighbouring pairs.
        shifts_norms: norm weights are stored as 1 + w.
        recurrent: most layers have a memory (see ``gguf_recurrent``), and heads are rotated in part.
        whole: block tensors whose names end otherwise, GGUF to Hugging Face, with their endings.
        fields: of the configuration, the same in every file.
        extend: further fields, from the metadata and the common ones.
    """

    model_type: str
    model_class: str
    names: Mapping[str, str]
    permutes: bool = False
    shifts_norms: bool = False
    recurrent: bool = False
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extend: Callable[[_Fields, Mapping[str, Any]], dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """One file's translation.

    Attributes:
        config: the fields of ``config.json``.
        names: GGUF name to Hugging Face name of every weight.
        heads: by GGUF name, how many heads a permuted tensor's rows belong to.
        shifted: GGUF names of the tensors stored as 1 + w.
        undone: by GGUF name, what makes a tensor's values those of the original, where something else does.
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    heads: Mapping[str, int]
    shifted: frozenset[str]
    undone: Mapping[str, Undo] = dataclasses.field(default_factory=dict)

    def restore(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Undoes what the GGUF converter did to the tensor's values."""
        if name in self.undone:
            return self.undone[name](array)
        if name in self.shifted:
            return (array.astype(np.float32) - np.float32(1)).astype(array.dtype)
        if name not in self.heads:
            return array
        heads = self.heads[name]
        if array.shape[0] % (2 * heads):
            raise CheckpointError(f"Tensor {name} has {array.shape[0]} rows, which {heads} heads cannot share.")
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)


def architecture_of(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: NDArray[np.float32] | None,
) -> Architecture:
    """Reads a file's architecture from its metadata and tensor names.

    Args:
        path: for messages.
        metadata: as :class:`jaxserve.checkpoint.gguf.GGUFFile` holds it.
        shapes: of every tensor, by GGUF name.
        rope_divisors: the values of the tensor :data:`ROPE_DIVISORS`, if there is one.

    Raises:
        CheckpointError: an unknown architecture, a tensor it does not have, or metadata that is missing or absurd.
    """
    name = metadata.get("general.architecture")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(sorted(_KINDS))
        raise CheckpointError(f"{path}: GGUF architecture {_brief(name)} is not supported; known are {known}.")
    fields = _Fields(path, metadata, str(name))
    if metadata.get(f"{name}.expert_count", 0) and kind.whole.keys().isdisjoint(_EXPERTS):
        raise fields.fail(f"{name} files with experts are not supported")
    config = {**_common_config(fields, kind, shapes), **kind.fields}
    if kind.extend is not None:
        config |= kind.extend(fields, config)
    config |= _rope_scaling(fields, config, rope_divisors)
    names = _weight_names(fields, kind, config["num_hidden_layers"], shapes)
    undone = _undone(config, names) if kind.recurrent else {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    permuted = {own: heads[hf.split(".")[-2]] for own, hf in names.items() if hf.split(".")[-2] in heads}
    norms = (own for own in names if own.endswith("norm.weight") and not own.endswith(PLAIN_NORM))
    shifted = frozenset(norms) if kind.shifts_norms else frozenset()
    return Architecture(config, names, permuted if kind.permutes else {}, shifted, undone)


def _weight_names(fields: _Fields, kind: _Kind, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    names = {}
    # Blocks behind the last guess further tokens, and are not served.
    guessing = range(layers, layers + fields.count("nextn_predict_layers")) if kind.recurrent else ()
    for own in shapes:
        block, any_block = _BLOCK_NAME.fullmatch(own), _ANY_BLOCK.fullmatch(own)
        index, rest = (int(any_block[1]), any_block[2]) if any_block else (layers, "")
        if own in _TOP_NAMES:
            names[own] = _TOP_NAMES[own]
        elif block and index < layers and block[2] in kind.names:
            names[own] = f"model.layers.{index}.{kind.names[block[2]]}.{block[3]}"
        elif index < layers and rest in kind.whole:
            names[own] = f"model.layers.{index}.{kind.whole[rest]}"
        elif own != ROPE_DIVISORS and not (any_block and index in guessing):
            raise fields.fail(f"tensor {own!r} is not one that {fields.prefix} with {layers} blocks has")
    if len(set(names.values())) != len(names):
        raise fields.fail("two tensors stand for the same weight")
    return names


def _common_config(fields: _Fields, kind: _Kind, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise fields.fail("there is no two-dimensional tensor 'token_embd.weight'")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", *(() if kind.recurrent else ("rope.dimension_count",))):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(f"'{fields.prefix}.{key}' differs from the head size {head_dim}, which is not supported")
    ends = [token for key in ("eos", "eot") if (token := fields.token(key, embedding[0])) is not None]
    return {
        "architectures": [kind.model_class],
        "model_type": kind.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        **(
            {} if _EXPERTS.keys() <= kind.whole.keys() else {"intermediate_size": fields.integer("feed_forward_length")}
        ),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "bos_token_id": fields.token("bos", embedding[0]),
        "eos_token_id": ends[0] if len(set(ends)) == 1 else sorted(set(ends)) or None,
        "pad_token_id": fields.token("padding", embedding[0]),
    }


def _rope_scaling(
    fields: _Fields, config: Mapping[str, Any], divisors: NDArray[np.float32] | None
) -> dict[str, dict[str, Any]]:
    if divisors is not None:
        return {"rope_scaling": _banded_scaling(fields, config, divisors)}
    kind = fields.metadata.get(f"{fields.prefix}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise fields.fail(f"rope scaling of type {_brief(kind)} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
        for own, hf in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"{fields.prefix}.rope.scaling.{own}" in fields.metadata:
                scaling[hf] = fields.number(f"rope.scaling.{own}")
    return {"rope_scaling": scaling}


def _banded_scaling(fields: _Fields, config: Mapping[str, Any], divisors: NDArray[np.float32]) -> dict[str, Any]:
    """The parameters behind per-frequency divisors: long waves divided by a factor, short ones kept, a ramp between.

    A file holds only the result. All published checkpoints use the same band (low 1, high 4) and one of few original
    lengths, so those are tried, and a file that none of them reproduces is refused rather than approximated.
    """
    head_dim, theta = config["head_dim"], config["rope_theta"]
    stated = fields.integer("rope.scaling.original_context_length", 8192)
    if divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all() and divisors.min() >= 1:
        factor = float(divisors.max())
        waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        for original in {stated, 8192}:
            ramp = np.clip((original / waves - 1) / 3, 0, 1)
            if np.allclose(1 / ((1 - ramp) / factor + ramp), divisors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise fields.fail(f"the divisors in {ROPE_DIVISORS!r} follow no known rule")


def _windowed_fields(fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3: five windowed layers to a full one. GGUF leaves out what is the same in all its sizes."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    largest = layers == 62  # the 27B model alone scales queries by its width, not by its head size
    return {
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)],
        "rope_theta": fields.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
    }


def _recurrent_fields(fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3.5 and kin: what a layer remembers, and how much of a head is rotated."""
    value_heads = fields.integer("ssm.time_step_rank")
    layers = config["num_hidden_layers"] - fields.count("nextn_predict_layers")
    if layers < 1:
        raise fields.fail("all of its blocks guess further tokens")
    return {
        "num_hidden_layers": layers,
        "full_attention_interval": fields.integer("full_attention_interval", 4),
        "partial_rotary_factor": fields.integer("rope.dimension_count") / config["head_dim"],
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": fields.integer("ssm.inner_size") // value_heads,
    }


def _recurrent_and_expert_fields(fields: _Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    return _recurrent_fields(fields, config) | {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
    }


def _undone(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Undo]:
    heads = ValueHeads(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
    )
    undone = {own: heads.undo(own.split(".", 2)[2]) for own in names if own.startswith("blk.")}
    return {own: undo for own, undo in undone.items() if undo is not None}


_GATED: Final = {"hidden_act": "silu", "mlp_bias": False}
_KINDS: Final[dict[str, _Kind]] = {
    "qwen35": _Kind(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _COMMON_NAMES | _HEAD_NORMS | NAMES | {"post_attention_norm": "post_attention_layernorm"},
        shifts_norms=True,
        recurrent=True,
        whole=WHOLE_NAMES,
        fields=_GATED,
        extend=_recurrent_fields,
    ),
    "qwen35moe": _Kind(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _COMMON_NAMES | _HEAD_NORMS | NAMES | _SHARED_EXPERT | {"post_attention_norm": "post_attention_layernorm"},
        shifts_norms=True,
        recurrent=True,
        whole=WHOLE_NAMES | _EXPERTS,
        fields=_GATED,
        extend=_recurrent_and_expert_fields,
    ),
    "llama": _Kind("llama", "LlamaForCausalLM", _TWO_NORMS, permutes=True, fields=_GATED),
    "qwen2": _Kind("qwen2", "Qwen2ForCausalLM", _TWO_NORMS, fields=_GATED),
    "qwen3": _Kind("qwen3", "Qwen3ForCausalLM", _TWO_NORMS | _HEAD_NORMS, fields=_GATED),
    "gemma3": _Kind(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _FOUR_NORMS | _HEAD_NORMS,
        shifts_norms=True,
        fields={
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        extend=_windowed_fields,
    ),
}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
