from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models.cache import KV, Ring, write
from jaxserve.models.family import decoder_family, family_of
from jaxserve.models.gemma3_text import FULL, WINDOWED
from jaxserve.models.gemma4_text import family
from tests.models import tiny_checkpoints as tiny
from tests.models.test_decoder import TOLERANCE, attention, whole
from tests.models.test_gemma3_text import windows

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


@pytest.mark.parametrize("case", CASES)
def test_cached_passes_give_the_whole_pass(case):
    """Chunks, then a token at a time, with windows shorter than what was read: the same logits."""
    family, params = tiny.load(case)
    family = decoder_family(dataclasses.replace(family.config, key_block=8))
    graphdef, tokens = family.graphdef(jnp.float32), tiny.goldens(case)["prompt"]
    expected = whole(family, params, tokens)
    cache = family.empty_cache(2, 96, jnp.float32)
    assert {type(layer) for layer in cache.layers} == {KV, Ring} | ({type(None)} if case == "gemma4_ple" else set())

    @jax.jit
    def passed(params, cache, part, start, count):
        model, t = nnx.merge(graphdef, params), part.shape[0]
        at = start[None]
        real = (jnp.arange(t) < count)[None]
        mask = jnp.tril(jnp.ones((1, t, t), bool))
        hidden, fresh = model(part[None], at, mask, cache, row=1, real=real)
        return model.logits(hidden)[0], write(cache, fresh, 1, at, count[None])

    start = 0
    for size, count in ((32, 32), (32, 30), *((1, 1),) * 20):
        part = np.zeros(size, np.int32)
        part[:count] = tokens[start : start + count]
        logits, cache = passed(params, cache, jnp.asarray(part), jnp.int32(start), jnp.int32(count))
        np.testing.assert_allclose(logits[:count], expected[start : start + count], atol=5e-5)
        start += count


def one_rope_of_each(config):
    """Windowed layers that turn by the base of the full ones."""
    theirs = family(
        HF | {"rope_parameters": {WINDOWED: {"rope_theta": 1_000_000.0}, FULL: {"rope_theta": 1_000_000.0}}}
    )
    rope = theirs.config.layers[0].mixer.rope
    return attention(config, rope=tuple(one.mixer.rope if one.mixer.window is None else rope for one in config.layers))


MISTAKES = {
    "window one short": ("gemma4", lambda config: windows(config, -1)),
    "window one long": ("gemma4", lambda config: windows(config, 1)),
    "one theta": ("gemma4_ple", one_rope_of_each),
    "values not normalised": ("gemma4", lambda config: attention(config, value_norm=None)),
    "embeddings not scaled": ("gemma4", lambda config: dataclasses.replace(config, embedding_scale=None)),
    "no softcap": ("gemma4", lambda config: dataclasses.replace(config, softcap=None)),
}


@pytest.mark.reference
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_show(mistake):
    case, change = MISTAKES[mistake]
    wrong, golden = decoder_family(change(family_of(tiny.config(case)).config)), tiny.goldens(case)
    logits = whole(wrong, tiny.params(wrong, tiny.tensors(case)), golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() > 10 * TOLERANCE
