"""Prefill and step over a tiny model against the whole-sequence pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.step import Control, empty_state
from jaxserve.models.family import family_of
from jaxserve.testing import TINY, random_params
from tests.decode.rows import sampling_rows

FAMILY = family_of(TINY)
PARAMS = random_params(FAMILY)
GRAPH = FAMILY.graphdef(jnp.float32)
STRATEGY = Autoregressive(alternatives=4)
SLOTS, LENGTH, STEPS = 3, 64, 4
PROMPTS = ((5, 9, 2), (7, 7, 1, 30, 4, 100, 200, 3, 9), (11,))


def start(prompts=PROMPTS):
    """The prompts prefilled, and the control that admits them."""
    state = empty_state(FAMILY.empty_cache(SLOTS, LENGTH, jnp.float32), STRATEGY)
    for slot, prompt in enumerate(prompts):
        if len(prompt) > 1:
            chunk = np.zeros(16, np.int32)
            chunk[: len(prompt) - 1] = prompt[:-1]
            at = (jnp.int32(slot), jnp.asarray(chunk), jnp.int32(0), jnp.int32(len(prompt) - 1))
            state = jitted.prefill(GRAPH, PARAMS, state, *at)
    control = Control(
        keep=jnp.zeros(SLOTS, bool),
        admit=jnp.ones(SLOTS, bool),
        length=jnp.asarray([len(prompt) - 1 for prompt in prompts], jnp.int32),
        pending=jnp.asarray([[prompt[-1]] for prompt in prompts], jnp.int32),
        pending_count=jnp.ones(SLOTS, jnp.int32),
    )
    return state, control


def go_on() -> Control:
    return Control(
        keep=jnp.ones(SLOTS, bool),
        admit=jnp.zeros(SLOTS, bool),
        length=jnp.zeros(SLOTS, jnp.int32),
        pending=jnp.zeros((SLOTS, 1), jnp.int32),
        pending_count=jnp.ones(SLOTS, jnp.int32),
    )


def decode(rows, count: int, steps: int = STEPS, control=None, state=None):
    """Tokens of each row, at least ``count`` if it does not stop."""
    if state is None:
        state, control = start()
    out: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(-(-count // steps)):
        state, log = jitted.run(
            GRAPH, PARAMS, state, control, rows, jnp.int32(steps), strategy=STRATEGY, max_steps=STEPS
        )
        control = go_on()
        for step in range(STEPS):
            for row in range(SLOTS):
                out[row] += np.asarray(log.tokens)[step, row, : int(log.count[step, row])].tolist()
    return out, state


def greedy(prompt, count: int) -> list[int]:
    """The reference: no cache, the whole sequence in one pass for every token."""
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.asarray(jitted.logits(GRAPH, PARAMS, jnp.asarray(padded)))[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


EXPECTED = [greedy(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_cached_greedy_is_the_whole_pass(steps):
    out, _ = decode(sampling_rows(SLOTS), 12, steps)
    assert [row[:12] for row in out] == EXPECTED


def test_the_test_above_can_fail():
    state, control = start()
    spoilt = jax.tree.map(lambda leaf: leaf.at[1, :, 2].add(1.0), state.cache)
    state = type(state)(
        spoilt,
        *(getattr(state, name) for name in ("tokens", "length", "known", "active", "memory")),
    )
    out, _ = decode(sampling_rows(SLOTS), 12, control=control, state=state)
    assert out[0][:12] == EXPECTED[0]
    assert out[1][:12] != EXPECTED[1]
    assert out[2][:12] == EXPECTED[2]


def test_rows_stop_at_their_stop_token_and_at_their_limit():
    stop = EXPECTED[0][5]
    stop_ids = [[stop, -1, -1], [-1] * 3, [-1] * 3]
    rows = sampling_rows(SLOTS, stop_ids=stop_ids, limit=[99, len(PROMPTS[1]) + 3, 99])
    out, state = decode(rows, 12)
    assert out[0] == EXPECTED[0][: EXPECTED[0].index(stop) + 1]
    assert out[1] == EXPECTED[1][:3]
    assert out[2] == EXPECTED[2]
    assert state.active.tolist() == [False, False, True]
    assert state.length.tolist() == [len(p) + len(o) - 1 for p, o in zip(PROMPTS, out, strict=True)]
    for row, (prompt, written) in enumerate(zip(PROMPTS, out, strict=True)):
        known = int(state.known[row])
        assert state.tokens[row, :known].tolist() == [*prompt, *written]


def test_a_row_that_is_not_kept_stops_and_writes_nothing():
    _, state = decode(sampling_rows(SLOTS), 4)
    before = jax.tree.map(lambda leaf: np.asarray(leaf[1]).copy(), state.cache)
    idle = go_on()
    control = Control(jnp.asarray([True, False, True]), idle.admit, idle.length, idle.pending, idle.pending_count)
    state, log = jitted.run(
        GRAPH, PARAMS, state, control, sampling_rows(SLOTS), jnp.int32(4), strategy=STRATEGY, max_steps=STEPS
    )
    assert np.asarray(log.count).sum(0).tolist() == [4, 0, 4]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.cache), strict=True):
        np.testing.assert_array_equal(old, new[1])


def test_prefill_of_one_slot_does_not_disturb_the_others():
    """Also not while its neighbour is in the middle of decoding, nor when a decode step falls between its chunks."""
    state, control = start()
    rows = sampling_rows(SLOTS)
    idle = go_on()
    control = Control(
        control.keep, jnp.asarray([True, False, True]), control.length, control.pending, control.pending_count
    )
    long = np.random.default_rng(0).integers(0, 256, 33)
    out: list[list[int]] = [[], [], []]
    for start_at in (0, 16):
        chunk = jnp.asarray(long[start_at : start_at + 16], jnp.int32)
        state = jitted.prefill(GRAPH, PARAMS, state, jnp.int32(1), chunk, jnp.int32(start_at), jnp.int32(16))
        state, log = jitted.run(GRAPH, PARAMS, state, control, rows, jnp.int32(4), strategy=STRATEGY, max_steps=STEPS)
        control = Control(jnp.asarray([True, False, True]), idle.admit, idle.length, idle.pending, idle.pending_count)
        for row in range(SLOTS):
            out[row] += np.asarray(log.tokens)[:, row, 0][np.asarray(log.count)[:, row] > 0].tolist()
    admit = Control(
        jnp.asarray([True, False, True]),
        jnp.asarray([False, True, False]),
        jnp.asarray([0, 32, 0]),
        jnp.asarray([[0], [int(long[32])], [0]], jnp.int32),
        jnp.ones(SLOTS, jnp.int32),
    )
    _, log = jitted.run(GRAPH, PARAMS, state, admit, rows, jnp.int32(4), strategy=STRATEGY, max_steps=STEPS)
    assert (out[0], out[2]) == (EXPECTED[0][:8], EXPECTED[2][:8])
    assert out[1] == []
    reference = []
    for _ in range(4):
        ids = np.zeros((1, 48), np.int32)
        ids[0, : 33 + len(reference)] = [*long, *reference]
        logits = np.asarray(jitted.logits(GRAPH, PARAMS, jnp.asarray(ids)))
        reference.append(int(logits[0, 32 + len(reference)].argmax()))
    assert np.asarray(log.tokens)[:, 1, 0].tolist() == reference


def test_a_number_that_is_none_stops_its_row_alone():
    """Everybody reads the same weights: the embedding of one token is spoilt, and only its reader suffers."""
    broken = dict(PARAMS)
    broken["head"] = broken["embedding"]  # untied, so that the spoilt row is read but never scored
    broken["embedding"] = broken["embedding"].at[PROMPTS[2][0]].set(jnp.nan)
    family = family_of(TINY | {"tie_word_embeddings": False})
    state, control = start()
    _, log = jitted.run(
        family.graphdef(jnp.float32),
        broken,
        state,
        control,
        sampling_rows(SLOTS),
        jnp.int32(4),
        strategy=STRATEGY,
        max_steps=STEPS,
    )
    assert np.asarray(log.finite).all(0).tolist() == [True, True, False]
    assert np.asarray(log.count).sum(0).tolist() == [4, 4, 0]
    assert [np.asarray(log.tokens)[:, row, 0].tolist() for row in (0, 1)] == [row[:4] for row in EXPECTED[:2]]


def test_one_step_by_hand_is_a_run_of_one():
    state, control = start()
    _, log = jitted.run(
        GRAPH, PARAMS, state, control, sampling_rows(SLOTS), jnp.int32(1), strategy=STRATEGY, max_steps=STEPS
    )
    state, control = start()
    state, _ = jitted.run(
        GRAPH, PARAMS, state, control, sampling_rows(SLOTS), jnp.int32(0), strategy=STRATEGY, max_steps=STEPS
    )
    _, emission = jitted.step(GRAPH, PARAMS, state, sampling_rows(SLOTS), strategy=STRATEGY)
    np.testing.assert_array_equal(emission.tokens, log.tokens[0])
    np.testing.assert_allclose(emission.scores.chosen, log.scores.chosen[0], atol=1e-5)


def test_every_program_is_traced_once():
    decode(sampling_rows(SLOTS), 8)
    before = jitted.run._cache_size(), jitted.prefill._cache_size()
    decode(sampling_rows(SLOTS, temperature=0.7, top_k=3), 8, steps=2)
    assert (jitted.run._cache_size(), jitted.prefill._cache_size()) == before


def test_a_scrubbed_slot_is_empty_and_the_others_are_not():
    state, _ = start()
    before = jax.tree.map(np.asarray, jitted.prefill(GRAPH, PARAMS, state, *chunk_of(1)))
    state = jax.tree.map(jnp.asarray, before)
    after = jax.tree.map(np.asarray, jitted.scrub(state, jnp.int32(1)))
    rest = np.asarray([0, 2])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert not new[1].any()
        assert (old[rest] == new[rest]).all()
    assert before.cache.layers[0].k[1].any()


def chunk_of(slot: int):
    chunk = np.arange(1, 17, dtype=np.int32)
    return jnp.int32(slot), jnp.asarray(chunk), jnp.int32(0), jnp.int32(16)
