from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract, params_of
from jaxserve.testing import TINY


def test_the_module_and_the_rules_agree():
    """A parameter tree built from the rules has exactly the leaves and shapes of the module."""
    from flax import nnx

    family = family_of(TINY)
    module = nnx.eval_shape(lambda: family.build(jnp.float32, nnx.Rngs(0)))
    leaves = nnx.to_pure_dict(nnx.split(module)[1])
    ours = params_of(abstract(family.rules, jnp.float32))
    assert jax.tree.structure(leaves) == jax.tree.structure(ours)
    assert jax.tree.map(lambda leaf: leaf.shape, leaves) == jax.tree.map(lambda leaf: leaf.shape, ours)


def test_the_shape_counts_every_weight():
    family = family_of(TINY)
    assert family.shape.parameters == sum(leaf.size for leaf in jax.tree.leaves(abstract(family.rules, jnp.float32)))
    assert [layer.per_position for layer in family.shape.cache] == [2 * 2 * 8] * 2


@pytest.mark.parametrize("name", [None, 7, "", "family", "layers", "../llama", "os", "nobody", "LLAMA", "llama.x"])
def test_what_is_no_family_is_refused(name):
    with pytest.raises(CheckpointError, match="model_type"):
        family_of(TINY | {"model_type": name})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": 2**31},
        {"num_hidden_layers": True},
        {"num_attention_heads": 0},
        {"num_attention_heads": "4"},
        {"hidden_size": -1},
        {"vocab_size": 1.5},
        {"intermediate_size": None},
        {"head_dim": 10**30},
        {"max_position_embeddings": "many"},
        {"rope_theta": "a"},
        {"rope_theta": 1e308, "rope_scaling": {"type": "linear", "factor": 1e-308}},
        {"rope_scaling": True},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "default", "partial_rotary_factor": 1e12}},
        {"rms_norm_eps": []},
        {"hidden_size": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": None},
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
    ],
)
def test_what_is_no_configuration_is_refused_at_once(wrong):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        family_of(TINY | wrong)
