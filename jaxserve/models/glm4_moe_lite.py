"""GLM-4.7-Flash (``Glm4MoeLiteForCausalLM``): DeepSeek-V3 with one group of experts and a single dense layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.deepseek_v3 import dense_then_experts
from jaxserve.models.family import Family
from jaxserve.models.hf_fields import need


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; new files say which layers are dense, old ones how many."""
    kinds = hf.get("mlp_layer_types")
    dense = int(hf.get("first_k_dense_replace", 1)) if kinds is None else list(kinds).count("dense")
    if kinds is not None:
        rest = need(hf, "num_hidden_layers") - dense
        if list(kinds) != ["dense"] * dense + ["sparse"] * rest:
            raise CheckpointError(
                "config.json: mlp_layer_types does not begin with all of its dense layers", param="mlp_layer_types"
            )
    return dense_then_experts(hf, dense)
