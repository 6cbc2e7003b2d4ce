"""LLaDA2 (``LLaDA2MoeModelLM``): the body of a model that fills in blocks of text instead of continuing it.

Half of each head is rotated, heads have norms, the first layers are dense. Who sees whom is the pass's affair, as
everywhere; its whole-sequence pass here is the causal one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoding import blocks_from_hf
from jaxserve.models.family import Family, decoder_family
from jaxserve.models.hf_fields import llama_like, mlp_from_hf, norm_from_hf
from jaxserve.models.moe import experts_from_hf, grouped_router_from_hf
from jaxserve.models.self_attention import AttentionConfig
from jaxserve.models.weights import Piece

BLOCK, MASK_ID = 32, 156_895

_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
}


def family(hf: Mapping[str, Any]) -> Family:
    """Reads ``config.json``.

    Raises:
        CheckpointError: experts that are chosen in another way.
    """
    defaults = {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 16_384,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    }
    hf = {**defaults, **hf}
    if hf.get("score_function", "sigmoid") != "sigmoid":
        raise CheckpointError("config.json: score_function is not sigmoid", param="score_function")
    # A single choice keeps its own share.
    own = {"renormalise": hf["num_experts_per_tok"] > 1, "correction_name": "gate.expert_bias"}
    decoding, pool = blocks_from_hf(hf, block=BLOCK, mask_id=MASK_ID, **_settings(hf)), hf.get("expert_capacity")
    if pool is not None:  # instead of groups
        own |= {"groups": 1, "chosen_groups": 1, "pool": pool, "block": hf.get("block_size", BLOCK)}
    router = grouped_router_from_hf(hf, **own)
    experts, shared = experts_from_hf(hf, router), hf.get("num_shared_experts") or 0
    if shared:
        block = mlp_from_hf(hf, ffn=shared * experts.ffn, name="mlp.shared_experts")
        experts = dataclasses.replace(experts, shared=block)
    dense, first = mlp_from_hf(hf), hf.get("first_k_dense_replace", 0)
    config = llama_like(
        hf,
        ffn=lambda layer: experts if layer >= first else dense,
        bias=bool(hf.get("use_qkv_bias", False)),
        output_bias=bool(hf.get("use_bias", True)),
        head_norm=norm_from_hf(hf) if hf.get("use_qk_norm", True) else None,
    )
    translate = partial(_as_named, config.layers[0].mixer)
    return dataclasses.replace(decoder_family(config), translate=translate, decoding=decoding)


def _settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What the model cards recommend. Files do not say which version they are but by what it brought."""
    if hf.get("delete_token_id") is not None:  # 2.2
        return {"rule": "levenshtein", "threshold": 0.5, "edit_threshold": 0.0, "post_steps": 16}
    if hf["max_position_embeddings"] > 16_384:  # 2.1, where quality matters
        return {"threshold": 0.7, "edit_threshold": 0.5, "post_steps": 16}
    return {"threshold": 0.95}  # 2.0, which has not learnt to edit


def _as_named(attention: AttentionConfig, piece: Piece) -> Piece:
    """Queries, keys and values are one tensor, one after the other."""
    size, source = attention.head_size, piece.source
    ends = [attention.heads * size, (attention.heads + attention.kv_heads) * size]
    rows = {"q": (0, ends[0]), "k": (ends[0], ends[1]), "v": (ends[1], ends[1] + attention.kv_heads * size)}
    for name, bounds in rows.items():
        if f".self_attn.{name}_proj." in source:
            joined = source.replace(f".self_attn.{name}_proj.", ".attention.query_key_value.")
            return dataclasses.replace(piece, source=joined, rows=bounds)
    for name, own in _NAMES.items():
        source = source.replace(name, own)
    return dataclasses.replace(piece, source=source)
