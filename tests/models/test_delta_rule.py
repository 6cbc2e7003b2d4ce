"""The block form against the recurrence, token by token in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.delta_rule import after, delta_rule, since_start
from tests.models.tiny_recurrent import recurrence

ROWS, HEADS, GROUP, KEY, VALUE = 3, 2, 2, 8, 12


def inputs(t: int, seed: int = 0, decay: float = 0.1, alike: float = 0.0):
    """Random ones; the closer ``alike`` is to 1, the more the keys are one key, written whole and never forgotten."""
    random = np.random.default_rng(seed)
    q, k = random.normal(size=(2, ROWS, HEADS, t, KEY))
    k = (1 - alike) * k + alike * k[:, :, :1]
    q, k = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (q, k))
    v = random.normal(size=(ROWS, HEADS, GROUP, t, VALUE))
    gates = random.uniform(size=(2, ROWS, HEADS, GROUP, t))
    state = random.normal(size=(ROWS, HEADS * GROUP, KEY, VALUE))
    beta = alike + (1 - alike) * gates[1]
    return tuple(jnp.asarray(one, jnp.float32) for one in (q, k, v, -decay * gates[0], beta, state))


RULE = jax.jit(delta_rule)
START = jnp.asarray([0, 7, 1], jnp.int32)


@pytest.mark.parametrize("t", [1, 3, 4, 63, 64, 65, 130])
def test_blocks_are_the_recurrence(t):
    *given, state = inputs(t)
    before = np.asarray(state) * (np.asarray(START) > 0)[:, None, None, None]
    out, added = RULE(*given, state, START)
    for row in range(ROWS):
        wanted, lacked, _ = recurrence(*(one[row] for one in given), before[row])
        np.testing.assert_allclose(out[row], wanted, atol=2e-6)
        np.testing.assert_allclose(added[row], lacked, atol=2e-6)


@pytest.mark.parametrize("t", [3, 65])
def test_without_a_cache_there_is_no_memory(t):
    *given, state = inputs(t)
    for own, cached in zip(RULE(*given, None, START), RULE(*given, state, jnp.zeros_like(START)), strict=True):
        np.testing.assert_allclose(own, cached, atol=1e-6)


@pytest.mark.parametrize("alike", [0.9, 1.0])
def test_keys_that_repeat_lose_nothing(alike):
    """A token repeated: the system's powers grow beyond 10^17, its inverse does not."""
    *given, state = inputs(64, decay=0.0, alike=alike)
    out, _ = RULE(*given, state, jnp.ones_like(START))
    for row in range(ROWS):
        np.testing.assert_allclose(out[row], recurrence(*(one[row] for one in given), state[row])[0], atol=5e-5)


@pytest.mark.parametrize("decay", [1e-9, 30.0, 1e4])
@pytest.mark.parametrize("t", [1, 64, 130])
def test_memories_that_fade_at_once_or_never_stay_numbers(t, decay):
    *given, state = inputs(t, decay=decay)
    out, _ = RULE(*given, state, jnp.ones_like(START))
    np.testing.assert_allclose(out[1], recurrence(*(one[1] for one in given), state[1])[0], atol=2e-6)


@pytest.mark.parametrize("t", [1, 4, 130])
def test_the_memory_behind_a_block(t):
    q, k, v, decay, beta, state = inputs(t, decay=3.0)
    _, added = RULE(q, k, v, decay, beta, state, jnp.ones_like(START))
    flat = (ROWS, HEADS * GROUP, t)
    behind = after(state, k, added.reshape(*flat, VALUE), decay.reshape(flat))
    for row in range(ROWS):
        wanted = recurrence(*(one[row] for one in (q, k, v, decay, beta)), state[row])[2][-1]
        np.testing.assert_allclose(behind[row], wanted, atol=2e-6)


@pytest.mark.parametrize("t", [1, 5, 65])
def test_a_row_does_not_depend_on_its_company(t):
    given, others = inputs(t), inputs(t, seed=1, decay=9.0)
    mixed = tuple(other.at[1].set(own[1]) for own, other in zip(given, others, strict=True))
    for own, other in zip(RULE(*given, START), RULE(*mixed, START), strict=True):
        assert (own[1] == other[1]).all()


def test_what_a_slot_kept_is_gone_where_a_row_begins_even_if_it_is_no_number():
    *given, state = inputs(3)
    clean, _ = RULE(*given, state, START)
    dirty, _ = RULE(*given, state.at[0].set(jnp.nan), START)
    np.testing.assert_array_equal(clean, dirty)
    assert since_start(jnp.full((2, 3), jnp.inf), jnp.asarray([0, 1])).tolist() == [[0.0] * 3, [jnp.inf] * 3]
