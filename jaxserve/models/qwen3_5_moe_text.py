"""Qwen3.5 and 3.6 with experts, text (``Qwen3_5MoeForCausalLM``): the dense family's layers, each with experts.

A softmax over all experts, the best ones renormalised, and an expert for every token behind a gate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family
from jaxserve.models.hf_fields import mlp_from_hf, need
from jaxserve.models.moe import RouterConfig, experts_from_hf
from jaxserve.models.qwen3_5_text import hybrid


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``."""
    shared = mlp_from_hf(hf, ffn=need(hf, "shared_expert_intermediate_size"), name="mlp.shared_expert")
    return hybrid(hf, experts_from_hf(hf, RouterConfig(), shared=shared, shared_gate=True))
