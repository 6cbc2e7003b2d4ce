from __future__ import annotations

import jax.numpy as jnp

from jaxserve.decode.block_memory import by_rows, ends, moved, with_block
from tests.decode.rows import sampling_rows

MASK = 7


def test_where_a_block_is_left_early():
    canvas = jnp.asarray([[1, 9, 3, 8, MASK]] * 5)
    fixed = jnp.zeros_like(canvas, bool).at[:, 0].set(True)
    stop_ids = [[8, -1, -1], [8, -1, -1], [1, -1, -1], [8, -1, -1], [-1] * 3]
    rows, length = sampling_rows(5, stop_ids=stop_ids, limit=[99, 99, 99, 99, 104]), jnp.asarray([0, 0, 0, 0, 100])
    settling = jnp.full_like(canvas, -1).at[1].set(canvas[1]).at[3].set(jnp.asarray([1, 2, 3, 8, MASK]))
    found = ends(canvas, MASK, fixed, length, rows, settling)
    # A stop token; one that a pass has confirmed; one that is given only; one behind a token just edited; the limit.
    assert found.tolist() == [True, True, False, False, True]
    masked = canvas.at[:, 2].set(MASK)
    assert not ends(masked, MASK, fixed, length, rows, jnp.full_like(canvas, -1)).any()


def test_a_text_with_its_block_in_its_place():
    tokens, canvas = jnp.asarray([[1, 2, 3, 4, 5, 6]] * 3), jnp.asarray([[10, 11]] * 3)
    expected = [[10, 11, 3, 4, 5, 6], [1, 2, 10, 11, 5, 6], [1, 2, 3, 4, 5, 10]]
    assert with_block(tokens, canvas, jnp.asarray([0, 2, 5])).tolist() == expected


def test_rows_are_moved_by_what_is_given():
    leaf = jnp.arange(8).reshape(2, 4)
    assert moved(leaf, jnp.asarray([0, 3]), -1).tolist() == [[0, 1, 2, 3], [7, -1, -1, -1]]
    deep = jnp.stack([leaf, leaf + 10], axis=-1)
    assert moved(deep, jnp.asarray([2, 4]), 0)[..., 1].tolist() == [[12, 13, 0, 0], [0, 0, 0, 0]]


def test_rows_are_picked_leaf_by_leaf():
    chosen, other = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    picked = by_rows(jnp.asarray([True, False]), chosen, other)
    assert (picked["a"].tolist(), picked["b"].tolist()) == ([[1.0] * 3, [0.0] * 3], [1.0, 0.0])
