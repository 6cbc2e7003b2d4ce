from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.cache import KV, Ring, write
from jaxserve.models.family import Family, family_of
from jaxserve.testing import random_params

HF: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "swiglu_limit": 7.0,
}
PACKED = HF | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def whole(family: Family, params: dict[Any, Any], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jitted.logits(family.graphdef(jnp.float32), params, jnp.asarray(tokens, jnp.int32)[None]))[0]


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 96, 40)


def test_every_other_layer_has_a_window_and_a_ring():
    family = family_of(HF)
    assert [layer.mixer.window for layer in family.config.layers] == [8, None]
    assert [type(layer) for layer in family.empty_cache(1, 64, jnp.float32).layers] == [Ring, KV]
    swapped = family_of(HF | {"layer_types": ["full_attention", "sliding_attention"]})
    assert [layer.mixer.window for layer in swapped.config.layers] == [None, 8]
    assert all(layer.norm.wide and layer.mixer.sinks and layer.mixer.output_bias for layer in family.config.layers)


def test_what_old_files_leave_out():
    bare = {name: value for name, value in HF.items() if name not in ("rope_scaling", "rope_theta", "sliding_window")}
    config = family_of(bare).config
    rope = config.layers[0].mixer.rope
    assert rope.scale == pytest.approx(0.1 * math.log(32) + 1)
    assert rope.frequencies[1] == pytest.approx(150_000.0 ** (-1 / 8))
    assert config.layers[0].mixer.window == 128
    assert config.norm.eps == 1e-5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ],
)
def test_what_it_cannot_serve_is_named(change, named):
    with pytest.raises(CheckpointError, match=named):
        family_of(HF | change)


def test_cached_passes_give_the_whole_pass(tokens):
    """With the experts packed: chunks, then a few tokens at a time, over rings."""
    family = family_of(PACKED)
    params, graph = random_params(family), family.graphdef(jnp.float32)
    expected = whole(family, params, tokens)

    @jax.jit
    def passed(cache, part, start):
        model, t = nnx.merge(graph, params), part.shape[0]
        hidden, fresh = model(part[None], start[None], jnp.tril(jnp.ones((1, t, t), bool)), cache)
        return model.logits(hidden)[0], write(cache, fresh, 0, start[None], jnp.asarray([t], jnp.int32))

    cache, start = family.empty_cache(1, 64, jnp.float32), 0
    for size in (16, 16, 2, 2, 2, 2):
        logits, cache = passed(cache, jnp.asarray(tokens[start : start + size], jnp.int32), jnp.int32(start))
        np.testing.assert_allclose(logits, expected[start : start + size], atol=5e-5)
        start += size


def test_every_part_changes_the_numbers(tokens):
    """In one layer, which has a window."""
    hf = HF | {"num_hidden_layers": 1}
    family = family_of(hf)
    params = random_params(family)
    expected = whole(family, params, tokens)
    (layer,) = family.config.layers
    over_all = dataclasses.replace(layer.ffn.router, kind="softmax", renormalise=False)
    before_top_k = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, router=over_all))
    for wrong in (
        family_of(hf | {"sliding_window": 7}),
        family_of(hf | {"rope_scaling": HF["rope_scaling"] | {"truncate": True}}),
        dataclasses.replace(family, config=dataclasses.replace(family.config, layers=(before_top_k,))),
    ):
        assert np.abs(whole(wrong, params, tokens) - expected).max() > 1e-3
    for path, value in ((("sinks",), -1e4), (("qkv", "bias"), 0), (("o", "bias"), 0)):
        without = random_params(family)
        owner = without["layers"][0]["mixer"]
        for name in path[:-1]:
            owner = owner[name]
        owner[path[-1]] = jnp.full_like(owner[path[-1]], value)
        assert np.abs(whole(family, without, tokens) - expected).max() > 1e-3, path
