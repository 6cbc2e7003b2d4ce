from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models.family import decoder_family, family_of
from jaxserve.models.gemma3_text import FULL, WINDOWED
from jaxserve.models.gemma4_text import family
from tests.models import tiny_checkpoints as tiny
from tests.models.every_pass import whole

HF = {
    "model_type": "gemma4_text",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
SMALL = HF | {"attention_k_eq_v": False, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 6}


def test_layers_without_a_window_have_heads_of_their_own():
    config = family(HF).config
    mixers = [layer.mixer for layer in config.layers]
    assert [index for index, mixer in enumerate(mixers) if mixer.window is None] == [5, 11]
    assert [(one.kv_heads, one.head_size, one.keys_are_values) for one in mixers[4:6]] == [
        (2, 16, False),
        (1, 32, True),
    ]
    assert {one.scale for one in mixers} == {1.0}
    assert all(one.value_norm is not None for one in mixers)
    assert config.shape.cache[5].per_position == config.shape.cache[4].per_position == 64


def test_a_file_may_say_it_layer_by_layer():
    fields = {"head_dim": 32, "num_key_value_heads": 1}
    table = {name: value for name, value in HF.items() if name not in ("global_head_dim", "num_global_key_value_heads")}
    assert family(table | {"per_layer_config": {"05": fields, "11": fields}}).config == family(HF).config
    alike = family(table | {"per_layer_config": {}}).config
    assert {layer.mixer.head_size for layer in alike.layers} == {16}


def test_the_last_layer_has_no_window():
    kinds = [WINDOWED] * 5 + [FULL] + [WINDOWED] * 6
    assert family(HF | {"layer_types": kinds}).config == family(HF).config


def test_where_only_a_part_of_the_pairs_turns():
    windowed, full = (family(HF).config.layers[index].mixer.rope for index in (0, 5))
    assert np.flatnonzero(full.frequencies).tolist() == [0, 1, 2, 3]
    assert len(full.frequencies) == 16
    assert full.frequencies[1] == pytest.approx(1_000_000.0 ** (-2 / 32))
    assert windowed.frequencies[1] == pytest.approx(10_000.0 ** (-2 / 16))


def test_the_last_layers_use_the_keys_of_the_last_of_their_kind():
    config = family(SMALL | {"use_double_wide_mlp": True}).config
    assert [layer.mixer.shares for layer in config.layers] == [None] * 6 + [4] * 5 + [5]
    assert [layer.ffn.ffn for layer in config.layers] == [40] * 6 + [80] * 6
    assert [layer.mixer.empty(1, 64, jnp.float32, 16) is None for layer in config.layers] == [False] * 6 + [True] * 6
    assert sum(shape.per_position for shape in config.shape.cache[6:]) == 0
    ignored = family(SMALL).ignored
    assert "model.layers.6.self_attn.k_proj.weight".startswith(ignored)
    assert not "model.layers.5.self_attn.k_proj.weight".startswith(ignored)


def test_layers_inputs_are_there_or_not():
    assert family(HF).config.side is None
    assert family(SMALL).config.side.rows == 262_144
    assert family(HF | {"hidden_size_per_layer_input": None}).config.side is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "later tokens"),
        ({"per_layer_config": {"05": {"intermediate_size": 7}}}, "head_dim and num_key_value_heads"),
        ({"per_layer_config": {"05": {"head_dim": 24}}}, "in all layers of a type alike"),
        ({"per_layer_config": {"12": {"head_dim": 24}}}, "per_layer_config"),
        ({"per_layer_config": {"five": {"head_dim": 24}}}, "ValueError"),
        ({"per_layer_config": {"05": {"head_dim": -1}, "11": {"head_dim": -1}}}, "head_dim"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 8, "layer_types": [WINDOWED] * 11 + [FULL]}, "without keys"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 7}, "fewer embeddings"),
        ({"hidden_size_per_layer_input": 1 << 20}, "hidden_size_per_layer_input"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8}, "5 of 4"),
    ],
)
def test_what_the_family_does_not_have_is_refused(wrong, named):
    with pytest.raises(CheckpointError, match=named):
        family_of(HF | wrong)


CASES = ("gemma4", "gemma4_moe", "gemma4_ple")


@pytest.mark.parametrize("case", CASES)
def test_the_module_and_the_rules_agree(case):
    family, params = tiny.load(case)
    module = nnx.eval_shape(lambda: family.build(jnp.float32, nnx.Rngs(0)))
    leaves = nnx.to_pure_dict(nnx.split(module)[1])
    assert jax.tree.map(lambda leaf: leaf.shape, leaves) == jax.tree.map(lambda leaf: leaf.shape, params)


def one_base(config):
    """Windowed layers that turn by the base of the full ones."""
    stated = {kind: {"rope_theta": 1_000_000.0} for kind in (WINDOWED, FULL)}
    rope = family(HF | {"rope_parameters": stated}).config.layers[0].mixer.rope
    turned = (dataclasses.replace(one, mixer=dataclasses.replace(one.mixer, rope=rope)) for one in config.layers)
    layers = tuple(
        plain if plain.mixer.window is None else other for plain, other in zip(config.layers, turned, strict=True)
    )
    return dataclasses.replace(config, layers=layers)


@pytest.mark.reference
def test_one_base_for_all_layers_would_show():
    family, params = tiny.load("gemma4")
    golden = tiny.goldens("gemma4")
    assert np.abs(whole(family, params, golden["prompt"]) - golden["logits"]).max() <= 1e-4
    logits = whole(decoder_family(one_base(family.config)), params, golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() > 1e-3
