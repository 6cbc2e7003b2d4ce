from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract
from jaxserve.testing import TINY


def test_the_module_and_the_rules_agree():
    """A parameter tree built from the rules has exactly the leaves and shapes of the module."""
    from flax import nnx

    family = family_of(TINY)
    module = nnx.eval_shape(lambda: family.build(jnp.float32, nnx.Rngs(0)))
    leaves = nnx.to_pure_dict(nnx.split(module)[1])
    ours = jax.eval_shape(family.arrange, abstract(family.rules, jnp.float32))
    assert jax.tree.structure(leaves) == jax.tree.structure(ours)
    assert jax.tree.map(lambda leaf: leaf.shape, leaves) == jax.tree.map(lambda leaf: leaf.shape, ours)


def test_the_shape_counts_every_weight():
    family = family_of(TINY)
    assert family.shape.parameters == sum(leaf.size for leaf in jax.tree.leaves(abstract(family.rules, jnp.float32)))
    assert family.shape.cache_per_position == 2 * 2 * 2 * 8


@pytest.mark.parametrize("name", [None, 7, "", "family", "layers", "../llama", "os", "nobody", "LLAMA", "llama.x"])
def test_what_is_no_family_is_refused(name):
    with pytest.raises(CheckpointError, match="model_type"):
        family_of(TINY | {"model_type": name})
