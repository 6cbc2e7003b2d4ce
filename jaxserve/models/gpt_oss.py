"""gpt-oss (``GptOssForCausalLM``): sinks, windows on every other layer, experts with biases and a clamped activation.

Model card: arXiv 2508.10925. Files hold the experts as plain numbers or, as published, in MXFP4 (``quant.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import BlockConfig
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import attention_from_hf, decoder_from_hf, layer_kinds, need
from jaxserve.models.layers import Norm
from jaxserve.models.moe import SOFTMAX_CHOSEN, ExpertFiles, ExpertsConfig, RouterConfig

_WINDOWED, _FULL = "sliding_attention", "full_attention"
# Where a configuration says nothing of it.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``."""
    for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if float(hf.get(name, known)) != known:
            raise CheckpointError(f"config.json: {name} is {hf[name]}, only {known} is supported", param=name)
    fields = dict(hf) if hf.get("rope_parameters") or hf.get("rope_scaling") else {**hf, "rope_parameters": _ROPE}
    norm = Norm(float(hf.get("rms_norm_eps", 1e-5)), wide=True)
    count, bias = need(hf, "num_hidden_layers"), bool(hf.get("attention_bias", True))
    kinds = layer_kinds(hf) or tuple(_FULL if index % 2 else _WINDOWED for index in range(count))
    if not {*kinds} <= {_WINDOWED, _FULL}:
        raise CheckpointError("config.json: layer_types has kinds other than the two", param="layer_types")
    windows = {_WINDOWED: hf.get("sliding_window", 128), _FULL: None}
    blocks = {
        kind: BlockConfig(
            attention_from_hf(
                fields,
                150_000.0,
                window=windows[kind],
                head_size=hf.get("head_dim") or 64,
                bias=bias,
                output_bias=bias,
                sinks=True,
            ),
            experts(hf),
            norm,
        )
        for kind in set(kinds)
    }
    return decoder_family(decoder_from_hf(hf, [blocks[kind] for kind in kinds], norm))


def experts(hf: Mapping[str, Any]) -> ExpertsConfig:
    """The experts and their router."""
    return ExpertsConfig(
        need(hf, "num_local_experts"),
        hf.get("num_experts_per_tok") or need(hf, "experts_per_token"),
        need(hf, "intermediate_size"),
        RouterConfig(SOFTMAX_CHOSEN, bias=True, name="router"),
        "clamped",
        bias=True,
        files=ExpertFiles(across=True),
    )
