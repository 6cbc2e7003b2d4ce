"""Attention against a plain numpy softmax, and the independence of rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import attention
from jaxserve.models.attention import Prefix, attend

B, T, N, K, H, S = 2, 5, 4, 2, 8, 32


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain(q, k, v, start, mask, cached_k, cached_v, window):
    """One row, one query and one head at a time."""
    out = np.zeros_like(q)
    for b in range(q.shape[0]):
        keys = np.concatenate([cached_k[b, :, : start[b]], k[b]], 1)
        values = np.concatenate([cached_v[b, :, : start[b]], v[b]], 1)
        for t in range(q.shape[1]):
            seen = np.concatenate([np.ones(start[b], bool), mask[b, t]])
            if window is not None:
                seen &= start[b] + t - np.arange(len(seen)) < window
            for n in range(q.shape[2]):
                head = n // (q.shape[2] // k.shape[1])
                scores = keys[head][seen] @ q[b, t, n] * 0.3
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values[head][seen] / weights.sum()
    return out


def arguments(start: list[int], tokens: int = T):
    q, k, v = draw(B, tokens, N, H, seed=1), draw(B, K, tokens, H, seed=2), draw(B, K, tokens, H, seed=3)
    cached = draw(B, K, S, H, seed=4), draw(B, K, S, H, seed=5)
    mask = np.broadcast_to(np.tril(np.ones((tokens, tokens), bool)), (B, tokens, tokens))
    prefix = Prefix(*map(jnp.asarray, cached), 0, jnp.asarray(start), jnp.int32(max(start)))
    return q, k, v, mask, cached, prefix


def run(q, k, v, mask, prefix, window=None, key_block=8):
    out = attend(*map(jnp.asarray, (q, k, v, mask)), prefix, scale=0.3, window=window, key_block=key_block)
    return np.asarray(out)


@pytest.mark.parametrize("window", [None, 3, 7, 40])
@pytest.mark.parametrize("start", [[0, 0], [8, 8], [3, 17], [25, 1]])
def test_it_is_softmax_attention(start, window):
    q, k, v, mask, cached, prefix = arguments(start)
    expected = plain(q, k, v, start, mask, *cached, window)
    np.testing.assert_allclose(run(q, k, v, mask, prefix, window), expected, atol=1e-5)


def test_the_window_test_can_fail():
    q, k, v, mask, cached, prefix = arguments([3, 17])
    off_by_one = plain(q, k, v, [3, 17], mask, *cached, 6)
    assert np.abs(run(q, k, v, mask, prefix, 7) - off_by_one).max() > 1e-2


@pytest.mark.parametrize("start", [[0, 5], [9, 17]])
def test_windows_may_count_from_another_place_than_the_query_s(start):
    """The first row's queries see what its first one does, and of the block what the mask says; windows are shorter."""
    q, k, v, _, cached, prefix = arguments(start)
    mask = np.ones((B, T, T), bool)
    mask[1] = np.tril(mask[1])
    reach = jnp.stack([jnp.zeros(T, jnp.int32), jnp.arange(T)])
    found = attend(*map(jnp.asarray, (q, k, v, mask)), prefix, scale=0.3, window=3, key_block=8, reach=reach)
    last = max(start[0] - 2, 0)
    own = plain(q, k, v, [start[0] - last, start[1]], mask, cached[0][:, :, last:], cached[1][:, :, last:], None)
    np.testing.assert_allclose(found[0], own[0], atol=1e-5)
    np.testing.assert_allclose(found[1], plain(q, k, v, start, mask, *cached, 3)[1], atol=1e-5)
    assert np.abs(found[0] - plain(q, k, v, start, mask, *cached, 3)[0]).max() > 1e-2


def test_an_arbitrary_mask_inside_the_block():
    q, k, v, _, cached, prefix = arguments([4, 9])
    mask = np.random.default_rng(0).random((B, T, T)) < 0.5
    mask |= np.eye(T, dtype=bool)
    np.testing.assert_allclose(run(q, k, v, mask, prefix), plain(q, k, v, [4, 9], mask, *cached, None), atol=1e-5)


def test_long_blocks_are_read_in_parts(monkeypatch):
    q, k, v, mask, _, _ = arguments([0, 0])
    whole = run(q, k, v, mask, None)
    monkeypatch.setattr(attention, "OWN_KEYS", 2)
    np.testing.assert_allclose(run(q, k, v, mask, None), whole, atol=1e-6)


def test_what_lies_beyond_a_row_cannot_reach_it():
    """Not even NaN: 0 x NaN is NaN, and a freed slot may hold one."""
    q, k, v, mask, cached, prefix = arguments([3, 17])
    clean = run(q, k, v, mask, prefix)
    dirty_k, dirty_v = (part.copy() for part in cached)
    dirty_k[0, :, 3:], dirty_v[0, :, 3:] = np.nan, np.nan
    dirty = Prefix(jnp.asarray(dirty_k), jnp.asarray(dirty_v), 0, prefix.start, prefix.span)
    np.testing.assert_array_equal(run(q, k, v, mask, dirty), clean)


def test_a_row_does_not_depend_on_the_longest_one():
    q, k, v, mask, _, prefix = arguments([3, 17])
    short = Prefix(prefix.k, prefix.v, 0, jnp.asarray([3, 2]), jnp.int32(3))
    np.testing.assert_array_equal(run(q, k, v, mask, prefix)[0], run(q, k, v, mask, short)[0])


def test_a_row_is_read_from_its_slot():
    q, k, v, mask, cached, _ = arguments([3, 17])
    prefix = Prefix(*map(jnp.asarray, cached), jnp.int32(1), jnp.asarray([17]), jnp.int32(17))
    got = run(q[1:], k[1:], v[1:], mask[1:], prefix)
    np.testing.assert_allclose(got, plain(q, k, v, [3, 17], mask, *cached, None)[1:], atol=1e-5)
