"""DeepSeek-V3 and R1 (``DeepseekV3ForCausalLM``): latent attention, and experts chosen in groups behind dense layers.

Technical report: arXiv 2412.19437. The layer behind the last one in files, which predicts a token further ahead, is
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.decoder import BlockConfig
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import decoder_from_hf, mlp_from_hf, need, norm_from_hf
from jaxserve.models.latent import latent_from_hf
from jaxserve.models.moe import SIGMOID, ExpertsConfig, RouterConfig


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``."""
    return dense_then_experts(hf, int(hf.get("first_k_dense_replace", 3)))


def dense_then_experts(hf: Mapping[str, Any], dense: int) -> Family:
    """A family of this shape whose first ``dense`` layers have no experts."""
    count, norm, mixer = need(hf, "num_hidden_layers"), norm_from_hf(hf), latent_from_hf(hf)
    first = BlockConfig(mixer, mlp_from_hf(hf), norm)
    rest = BlockConfig(mixer, experts(hf), norm) if dense < count else first
    layers = tuple(first if index < dense else rest for index in range(count))
    return decoder_family(decoder_from_hf(hf, layers, norm), (f"model.layers.{count}.",))


def experts(hf: Mapping[str, Any]) -> ExpertsConfig:
    """The experts and their router, whose weights are float32 always."""
    ffn, shared = need(hf, "moe_intermediate_size"), hf.get("n_shared_experts")
    plain = mlp_from_hf(hf, ffn=ffn * (shared or 1), name="mlp.shared_experts")
    router = RouterConfig(
        SIGMOID,
        renormalise=bool(hf.get("norm_topk_prob", True)),
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        correction=True,
        groups=hf.get("n_group") or 1,
        chosen_groups=hf.get("topk_group") or 1,
        exact=True,
    )
    return ExpertsConfig(
        need(hf, "n_routed_experts"),
        need(hf, "num_experts_per_tok"),
        ffn,
        router,
        plain.activation,
        plain if shared else None,
    )
