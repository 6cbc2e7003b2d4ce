"""Checkpoints as hubs hold them where `save_pretrained` writes something else: both directions, of plain dictionaries.

A layout turns what transformers' text model has (its ``config.json`` and the tensors of its ``state_dict``) into what a
folder on a hub has, and back. Back is how a golden is computed from such a folder; transformers' own readers of these
forms are not used, so that each form is stated twice.

- ``nested``: the text model inside of a multimodal one: fields under ``text_config``, another prefix, foreign tensors;
  experts stacked in one tensor, as the modules hold them.
- ``mxfp4``: gpt-oss's experts in blocks of 32 numbers of four bits with a shared exponent.
- ``fp8``: DeepSeek's matrices as 8-bit floats with a float32 factor for each block of 128 x 128.
- ``llada2``: GLM-4-MoE under the names of LLaDA2 (the two compute the same).
- ``renamed``: a family whose body is another's, with fields of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A form of a folder: ``write`` makes it of a text model's configuration and tensors, ``read`` the reverse."""

    write: Callable[[Config, Tensors], tuple[Config, Tensors]]
    read: Callable[[Config, Tensors], tuple[Config, Tensors]]


def old_spelling(config: Config) -> Config:
    """The fields as files older than transformers 5 spell them."""
    config = copy.deepcopy(config)
    scaling = config.pop("rope_parameters")
    if "full_attention" in scaling:  # Gemma 3
        config["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = scaling["full_attention"]
    config["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if "type" in scaling:
        scaling.pop("rope_type")
    default = scaling.get("rope_type") == "default"
    config["rope_scaling"] = None if default else scaling
    config["torch_dtype"] = config.pop("dtype", "bfloat16")
    config["transformers_version"] = "4.46.0"
    size = config.get("head_dim")
    if size is None or size * config["num_attention_heads"] == config["hidden_size"]:
        config.pop("head_dim", None)
    return config


def nested(
    outer: str,
    prefix: str,
    foreign: Mapping[str, tuple[int, ...]],
    text: Callable[[Config], Config] = lambda config: config,
    **fields: Any,
) -> Layout:
    """The text model inside of a multimodal one.

    Args:
        outer: ``model_type`` around it.
        prefix: what stands in files where the text model has ``model.``.
        foreign: shapes of tensors of other parts.
        text: the text model's fields as hubs spell them.
        fields: beside ``text_config``.
    """

    def write(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        whole = {"model_type": outer, "text_config": text(copy.deepcopy(config)), **fields}
        named = {prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
                 for name, tensor in tensors.items()}  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        for name, shape in foreign.items():
            named[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
        return whole, named

    def read(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        own = {name: tensor for name, tensor in tensors.items() if name not in foreign}
        return config["text_config"], {
            "model." + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
            for name, tensor in own.items()
        }

    return Layout(write, read)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
QUANTISED = ("gate_up_proj", "down_proj")


def pack_mxfp4(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 ``[..., n/32, 16]`` (even element low, odd one high) and exponents uint8 ``[..., n/32]``."""
    blocks = numbers.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.floor(torch.log2(largest)) - 2  # the largest code is 6, below two to the third
    codes = (blocks[..., None] / 2 ** exponent[..., None] - FP4).abs().argmin(-1)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent[..., 0] + 127).to(torch.uint8)


def unpack_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers ``[..., n]`` in float32."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (FP4[codes] * 2.0 ** (exponents[..., None].float() - 127)).flatten(-2)


def _write_mxfp4(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    config = old_spelling(config)
    config |= {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        "initial_context_length": config["rope_scaling"]["original_max_position_embeddings"],
        "experts_per_token": config["num_experts_per_tok"],
    }
    packed: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(QUANTISED):
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = pack_mxfp4(tensor.transpose(-1, -2))
        else:
            packed[name] = tensor
    return config, packed


def _read_mxfp4(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            whole = unpack_mxfp4(tensor, tensors[name.removesuffix("_blocks") + "_scales"])
            plain[name.removesuffix("_blocks")] = whole.transpose(-1, -2).contiguous()
        elif not name.endswith("_scales"):
            plain[name] = tensor
    return {name: value for name, value in config.items() if name != "quantization_config"}, plain


MXFP4 = Layout(_write_mxfp4, _read_mxfp4)


# --- experts one by one, fp8 blocks -----------------------------------------------------------------------------------


def one_by_one(tensors: Tensors) -> Tensors:
    """Stacked experts ``[e, 2f, d]`` and ``[e, d, f]`` as a tensor each: gate, up and down of every expert."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for index, expert in enumerate(tensor):
                halves = zip(("gate", "up"), expert.chunk(2), strict=True)
                for part, half in halves:
                    out[f"{name.removesuffix('gate_up_proj')}{index}.{part}_proj.weight"] = half.contiguous()
        elif name.endswith("experts.down_proj"):
            for index, expert in enumerate(tensor):
                out[f"{name.removesuffix('down_proj')}{index}.down_proj.weight"] = expert.contiguous()
        else:
            out[name] = tensor
    return out


def stacked(tensors: Tensors) -> Tensors:
    """The reverse."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        path, _, rest = name.partition(".experts.")
        if not rest:
            out[name] = tensor
        elif rest == "0.gate_proj.weight":
            count = sum(1 for other in tensors if other.startswith(f"{path}.experts.") and "down_proj.weight" in other)
            experts = [f"{path}.experts.{index}." for index in range(count)]
            both = [
                torch.cat([tensors[f"{expert}{part}_proj.weight"] for part in ("gate", "up")]) for expert in experts
            ]
            out[f"{path}.experts.gate_up_proj"] = torch.stack(both)
            out[f"{path}.experts.down_proj"] = torch.stack([tensors[f"{expert}down_proj.weight"] for expert in experts])
    return out


BLOCK = 128
LARGEST_E4M3 = 448.0


def _spread_over_blocks(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, columns = shape
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def pack_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in e4m3, and what each block of 128 x 128 is to be multiplied by, float32."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / LARGEST_E4M3
    return (matrix.float() / _spread_over_blocks(scales, matrix.shape)).to(torch.float8_e4m3fn), scales


def fp8(foreign: Mapping[str, tuple[int, ...]]) -> Layout:
    """Every matrix of the layers in blocks, except for the router's; experts one by one."""

    def write(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        config = old_spelling(config)
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
        packed: Tensors = {}
        for name, tensor in one_by_one(tensors).items():
            if (name.startswith("model.layers.") and name.endswith("_proj.weight")) or "proj_with_mqa" in name:
                packed[name], packed[f"{name}_scale_inv"] = pack_fp8(tensor)
            else:
                packed[name] = tensor
        for name, shape in foreign.items():
            packed[name] = torch.zeros(shape, dtype=torch.bfloat16)
        return config, packed

    def read(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        plain: Tensors = {}
        for name, tensor in tensors.items():
            scales = tensors.get(f"{name}_scale_inv")
            if name in foreign or name.endswith("_scale_inv"):
                continue
            plain[name] = tensor if scales is None else tensor.float() * _spread_over_blocks(scales, tensor.shape)
        return {name: value for name, value in config.items() if name != "quantization_config"}, stacked(plain)

    return Layout(write, read)


# --- LLaDA2 -----------------------------------------------------------------------------------------------------------

_LLADA2_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
_LLADA2_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_JOINED = ".attention.query_key_value.weight"


def _write_llada2(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    config = old_spelling(config)
    for ours, theirs in _LLADA2_FIELDS.items():
        config[theirs] = config.pop(ours)
    config |= {
        "model_type": "llada2_moe",
        "architectures": ["LLaDA2MoeModelLM"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "use_qkv_bias": config.pop("attention_bias"),
        "use_bias": False,
    }
    config["rotary_dim"] = int(config["head_dim"] * config["partial_rotary_factor"])
    named: Tensors = {}
    for name, tensor in one_by_one(tensors).items():
        path, _, part = name.partition(".self_attn.")
        if part == "q_proj.weight":
            three = [tensors[f"{path}.self_attn.{one}_proj.weight"] for one in "qkv"]
            named[path + _JOINED] = torch.cat(three)
        elif part not in {"k_proj.weight", "v_proj.weight"}:
            for ours, theirs in _LLADA2_NAMES.items():
                name = name.replace(ours, theirs)
            named[name] = tensor
    return config, named


def _read_llada2(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    config = config | {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": config["use_qkv_bias"]}
    for ours, theirs in _LLADA2_FIELDS.items():
        config[ours] = config.pop(theirs)
    size = config["head_dim"]
    rows = [size * config["num_attention_heads"]] + 2 * [size * config["num_key_value_heads"]]
    named: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(_JOINED):
            for one, part in zip("qkv", tensor.split(rows), strict=True):
                named[f"{name.removesuffix(_JOINED)}.self_attn.{one}_proj.weight"] = part
        else:
            for ours, theirs in _LLADA2_NAMES.items():
                name = name.replace(theirs, ours)
            named[name] = tensor
    return config, stacked(named)


LLADA2 = Layout(_write_llada2, _read_llada2)


# --- SDAR -------------------------------------------------------------------------------------------------------------


def renamed(model_type: str, architecture: str, **fields: Any) -> Layout:
    """A family that differs from another in its configuration alone.

    Args:
        model_type, architecture: its own.
        fields: that the other does not have.
    """

    def write(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        config = old_spelling(config) | {"model_type": model_type, "architectures": [architecture], **fields}
        return config, one_by_one(tensors)

    def read(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
        own = {name: value for name, value in config.items() if name not in fields}
        return own | {"model_type": BODIES[model_type]}, stacked(tensors)

    return Layout(write, read)


BODIES = {"sdar": "qwen3", "sdar_moe": "qwen3_moe"}
