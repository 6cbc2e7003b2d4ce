from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.models.cache import KV, Cache, entries
from jaxserve.models.passes import Canvas, Pass
from jaxserve.models.rope import Rope

ROPE = Rope((1.0, 0.1))
MASK = jnp.tril(jnp.ones((2, 3, 3), bool))


def a_pass(start=(0, 5), cache: Cache | None = None, span=None) -> Pass:
    return Pass(jnp.asarray(start, jnp.int32), MASK, cache, 0, span, None, 128)


def test_positions_follow_what_stands_before():
    run = a_pass()
    assert run.positions.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert int(run.span) == 5
    assert int(a_pass(span=jnp.int32(2)).span) == 2


def test_positions_may_be_given():
    given = jnp.asarray([[0, 1, 1], [4, 0, 0]], jnp.int32)
    run = Pass(jnp.zeros(2, jnp.int32), MASK, None, 0, None, None, 128, given)
    np.testing.assert_allclose(run.rotation(ROPE, jnp.float32)[1][1, 0], np.sin([4.0, 0.4]), atol=1e-6)
    np.testing.assert_array_equal(run.rotation(ROPE, jnp.float32)[0][0, 1], run.rotation(ROPE, jnp.float32)[0][0, 2])


def test_a_pass_without_a_cache_is_as_long_as_its_tokens():
    kept = KV(entries(2, 1, 64, 4, jnp.float32), entries(2, 1, 64, 4, jnp.float32))
    alone, cached = a_pass(), a_pass(cache=Cache((kept, None), 64, 2))
    assert (alone.length, alone.key_block, alone.cached(0)) == (3, 3, None)
    assert (cached.length, cached.key_block) == (64, 64)
    np.testing.assert_array_equal(cached.cached(0).k, kept.k)
    assert cached.cached(1) is None


def test_windows_of_a_canvas_count_from_its_first_position():
    run = a_pass()
    assert run.reach is None
    run.canvas = Canvas(jnp.array([False, True]), jnp.zeros((2, 3, 4)))
    assert run.reach.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_rotation_is_made_once_for_each_kind():
    run = a_pass()
    first = run.rotation(ROPE, jnp.float32)
    assert run.rotation(ROPE, jnp.float32) is first
    assert run.rotation(ROPE, jnp.bfloat16)[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(first[1][1, 2], np.sin([7.0, 0.7]), atol=1e-6)


def test_a_layer_may_use_what_an_earlier_one_has_made():
    run, keys = a_pass(), jnp.zeros((2, 1, 3, 4))
    run.keep(3, (keys, keys + 1))
    k, v, cached = run.entries(3)
    assert k is keys
    assert float(v.max()) == 1
    assert cached is None
