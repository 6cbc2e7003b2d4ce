from __future__ import annotations

import jax.numpy as jnp

from jaxserve.decode.block_memory import by_rows, ends, joined, with_block
from jaxserve.decode.sampling import TokenScores
from jaxserve.decode.step import Verdict
from jaxserve.decode.tally import tally
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


def test_rows_are_picked_leaf_by_leaf():
    chosen, other = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    picked = by_rows(jnp.asarray([True, False]), chosen, other)
    assert (picked["a"].tolist(), picked["b"].tolist()) == ([[1.0] * 3, [0.0] * 3], [1.0, 0.0])


def verdict(tokens, count, advance):
    tokens = jnp.asarray(tokens, jnp.int32)
    scores = TokenScores(tokens / 10, jnp.stack([tokens] * 2, axis=-1), jnp.zeros((*tokens.shape, 2)))
    counted = tally(len(tokens), edited=jnp.asarray(count, jnp.int32))
    return Verdict(tokens, jnp.asarray(count), jnp.asarray(advance), scores, advance, counted)


def test_two_blocks_stand_one_behind_the_other():
    """A row with one given position, one whose first block is all given, one without a second block."""
    one = verdict([[1, 2, MASK], [MASK] * 3, [4, 5, 6]], [2, 0, 3], [3, 3, 3])
    two = verdict([[7, 8, 9], [10, 11, 12], [MASK] * 3], [0, 3, 0], [0, 3, 0])
    both = joined(one, two, jnp.asarray([2, 0, 3]), MASK)
    assert both.tokens.tolist() == [[1, 2, 7, 8, 9, MASK], [10, 11, 12, *[MASK] * 3], [4, 5, 6, *[MASK] * 3]]
    assert (both.count.tolist(), both.advance.tolist()) == ([2, 3, 3], [3, 6, 3])
    assert both.scores.top_ids[0, :, 1].tolist() == [1, 2, 7, 8, 9, 0]
    assert (both.memory, both.tally.sum(1).tolist()) == ([0, 3, 0], [2, 3, 3])
    alone = joined(one, None, jnp.asarray([2, 0, 3]), MASK)
    assert alone.tokens.tolist() == [[1, 2, *[MASK] * 4], [MASK] * 6, [4, 5, 6, *[MASK] * 3]]
    assert alone.count.tolist() == [2, 0, 3]
