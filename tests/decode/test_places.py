"""Tokens behind each other and to the left, each row at a place of its own."""

from __future__ import annotations

import jax.numpy as jnp

from jaxserve.decode.places import appended, moved


def test_only_as_many_as_count_are_put_behind():
    tokens, new = jnp.asarray([[1, 2, 3, 4, 5, 6]] * 3), jnp.asarray([[10, 11]] * 3)
    behind = appended(tokens, new, jnp.asarray([0, 2, 5]), jnp.asarray([0, 1, 2]))
    assert behind.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 10, 4, 5, 6], [1, 2, 3, 4, 5, 10]]


def test_rows_are_moved_by_what_is_given():
    leaf = jnp.arange(8).reshape(2, 4)
    assert moved(leaf, jnp.asarray([0, 3]), -1).tolist() == [[0, 1, 2, 3], [7, -1, -1, -1]]
    deep = jnp.stack([leaf, leaf + 10], axis=-1)
    assert moved(deep, jnp.asarray([2, 4]), 0)[..., 1].tolist() == [[12, 13, 0, 0], [0, 0, 0, 0]]
