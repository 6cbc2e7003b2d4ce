"""Mixtral (``MixtralForCausalLM``): Llama with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like, need
from jaxserve.models.moe import ExpertFiles, RouterConfig, experts_from_hf


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``; what two experts give is always weighed by their share of each other."""
    hf = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2, **hf}
    files = ExpertFiles("block_sparse_moe", ("w1", "w3", "w2"))
    experts = experts_from_hf(hf, RouterConfig(), ffn=need(hf, "intermediate_size"), files=files)
    windows = (hf.get("sliding_window"),) * need(hf, "num_hidden_layers")
    return decoder_family(llama_like(hf, windows=windows, ffn=lambda _: experts, default_theta=1e6))
