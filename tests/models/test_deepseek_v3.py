from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.moe import SIGMOID, ExpertsConfig, RouterConfig

HF: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "num_nextn_predict_layers": 1,
}


def test_dense_layers_come_first():
    layers = family_of(HF).config.layers
    assert [type(layer.ffn) for layer in layers] == [MLPConfig, ExpertsConfig, ExpertsConfig]
    assert (layers[0].ffn.ffn, layers[1].ffn.ffn, layers[1].ffn.shared.ffn) == (48, 24, 48)
    assert {type(layer.ffn) for layer in family_of(HF | {"first_k_dense_replace": 9}).config.layers} == {MLPConfig}


def test_the_layer_that_looks_further_ahead_is_left_out():
    family = family_of(HF)
    assert "model.layers.3." in family.ignored
    assert not "model.layers.30.input_layernorm.weight".startswith(family.ignored)


def test_the_router_is_exact_whatever_the_models_dtype():
    own = {rule.param.rpartition("ffn.")[2]: rule.dtype for rule in family_of(HF).rules if ".router." in rule.param}
    assert own == {"router.kernel": "float32", "router.correction": "float32"}


def test_every_field_of_the_router_is_read():
    router = family_of(HF).config.layers[2].ffn.router
    assert router == RouterConfig(
        SIGMOID, renormalise=True, scale=2.5, correction=True, groups=4, chosen_groups=2, exact=True
    )
    other = {"routed_scaling_factor": 1.5, "n_group": None, "topk_group": None, "norm_topk_prob": False}
    plain = family_of(HF | other).config.layers[2].ffn.router
    assert plain == RouterConfig(SIGMOID, renormalise=False, scale=1.5, correction=True, exact=True)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(CheckpointError, match="groups"):
        family_of(HF | {"n_group": 3})


def test_without_shared_experts():
    assert family_of(HF | {"n_shared_experts": None}).config.layers[1].ffn.shared is None
