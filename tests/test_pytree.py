from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from jaxserve.pytree import pytree


@pytree
class Pair:
    left: Float[Array, " n"]
    right: Float[Array, " n"]


def test_it_is_a_frozen_dataclass_and_a_pytree():
    pair = Pair(jnp.zeros(2), jnp.ones(2))
    doubled = jax.tree.map(lambda leaf: leaf * 2, pair)
    assert doubled.right.tolist() == [2.0, 2.0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.left = pair.right
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(pair)] == [".left", ".right"]


def test_it_is_rebuilt_from_leaves_that_are_no_arrays():
    shapes = jax.tree.map(lambda leaf: leaf.shape, Pair(jnp.zeros(2), jnp.ones(2)))
    assert shapes.left == (2,)
    assert jax.jit(lambda pair: pair.left + pair.right)(Pair(jnp.zeros(2), jnp.ones(2))).tolist() == [1.0, 1.0]
