"""Drafts from what the text has said before."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.decode.lookup import LEAST, MOST, agreeing, following, latest_match, tail_of


def text(*rows: list[int], length: int = 16):
    padded = [row + [99] * (length - len(row)) for row in rows]
    return jnp.asarray(padded, jnp.int32), jnp.asarray([len(row) for row in rows], jnp.int32)


def plain(row: list[int]) -> tuple[int, int]:
    """The same by loops: longest agreement of the end with an earlier place, the latest of several."""
    best = (0, -1)
    for end in range(1, len(row)):  # the place behind an agreement
        length = 0
        while length < min(MOST, end) and row[end - 1 - length] == row[len(row) - 1 - length]:
            length += 1
        best = max(best, (length, end))
    return (best[1], best[0]) if best[0] >= LEAST else (-1, 0)


def test_the_longest_agreement_is_found_and_the_latest_of_several():
    tokens, known = text([1, 2, 3, 4, 9, 1, 2, 3], [5, 6, 7, 5, 6, 8, 5, 6], [1, 2, 3, 4])
    place, length = latest_match(tokens, known - 1, tail_of(tokens, known))
    assert place.tolist() == [3, 5, -1]
    assert length.tolist() == [3, 2, 0]


def test_it_finds_what_loops_find():
    random = np.random.default_rng(0)
    rows = [random.integers(0, 3, random.integers(1, 16)).tolist() for _ in range(300)]
    tokens, known = text(*rows)
    place, length = latest_match(tokens, known - 1, tail_of(tokens, known))
    expected = [plain(row) for row in rows]
    assert [*zip(place.tolist(), length.tolist(), strict=True)] == expected
    assert sum(where >= 0 for where, _ in expected) > 100


def test_what_lies_behind_the_text_is_not_searched():
    tokens, known = text([1, 2, 7, 7, 1, 2])
    tokens = tokens.at[0, 8:11].set(jnp.asarray([1, 2, 5]))
    place, _ = latest_match(tokens, known - 1, tail_of(tokens, known))
    assert place.tolist() == [2]


def test_a_text_goes_on_as_it_has_since_there():
    tokens, known = text([4, 1, 2, 3, 1, 2, 3])
    assert following(tokens, known, jnp.asarray([4]), 7).tolist() == [[1, 2, 3, 1, 2, 3, 1]]
    assert following(tokens, known, jnp.asarray([1]), 4).tolist() == [[1, 2, 3, 1]]


def test_agreement_ends_at_the_first_difference():
    one, other = jnp.asarray([[1, 2, 3, 4], [1, 9, 3, 4]]), jnp.asarray([[1, 2, 3, 9], [1, 2, 3, 4]])
    assert agreeing(one, other, jnp.asarray([4, 4])).tolist() == [3, 1]
    assert agreeing(one, other, jnp.asarray([2, 0])).tolist() == [2, 0]
