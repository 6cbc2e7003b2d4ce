"""Sampling against transformers' processors, against distributions, and against the company a row keeps."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import sampling
from jaxserve.decode.sampling import REMOVED, adjusted_each, choose, choose_each, scores_each
from tests.decode.rows import sampling_rows

GOLDEN = dict(np.load(Path(__file__).parents[1] / "reference" / "sampling.npz"))


def histories() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt and output side by side as the state holds them, with garbage behind what is known."""
    tokens = np.full((96, 64), 7, np.int32)
    prompts, known = np.zeros(96, np.int32), np.zeros(96, np.int32)
    for row, (prompt, output) in enumerate(zip(GOLDEN["prompt"], GOLDEN["output"], strict=True)):
        history = np.concatenate([prompt[prompt >= 0], output[output >= 0]])
        tokens[row, : len(history)] = history
        prompts[row], known[row] = (prompt >= 0).sum(), len(history)
    return tokens, prompts, known


def golden_rows(prompts: np.ndarray):
    return sampling_rows(
        96,
        temperature=GOLDEN["temperature"],
        top_k=GOLDEN["top_k"],
        top_p=GOLDEN["top_p"],
        min_p=GOLDEN["min_p"],
        repetition_penalty=GOLDEN["repetition"],
        presence_penalty=GOLDEN["presence"],
        frequency_penalty=GOLDEN["frequency"],
        prompt_length=prompts,
    )


@pytest.mark.reference
def test_processed_logits_are_those_of_transformers():
    tokens, prompts, known = histories()

    @jax.jit
    def process(logits, rows, tokens, known):
        return sampling._filter(sampling._adjust(logits, rows, tokens, known), rows)

    found = np.asarray(
        process(jnp.asarray(GOLDEN["logits"]), golden_rows(prompts), jnp.asarray(tokens), jnp.asarray(known))
    )
    kept = np.isfinite(GOLDEN["processed"])
    np.testing.assert_array_equal(found > REMOVED / 2, kept)
    np.testing.assert_allclose(found[kept], GOLDEN["processed"][kept], rtol=1e-4, atol=1e-4)


@pytest.mark.reference
def test_a_history_that_is_not_known_would_show():
    tokens, prompts, known = histories()
    logits, rows = jnp.asarray(GOLDEN["logits"]), golden_rows(prompts)
    right = sampling._adjust(logits, rows, jnp.asarray(tokens), jnp.asarray(known))
    wrong = sampling._adjust(logits, rows, jnp.asarray(tokens), jnp.asarray(known) + 1)
    assert np.abs(np.asarray(right) - np.asarray(wrong)).max() > 0.1


def draw_many(logits: np.ndarray, count: int, **parameters) -> np.ndarray:
    """``count`` draws from the same logits, each with a seed of its own."""
    seeds = np.stack([np.zeros(count), np.arange(count)], 1).astype(np.uint32)
    rows = sampling_rows(count, seed=seeds, temperature=1.0, **parameters)
    wide = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    return np.asarray(jax.jit(choose)(wide, rows, jnp.zeros((count, 4), jnp.int32), jnp.zeros(count, jnp.int32)))


def test_draws_follow_the_distribution():
    logits = np.random.default_rng(0).normal(size=700) * 2
    drawn = np.bincount(draw_many(logits, 20_000), minlength=700)
    expected = np.exp(logits) / np.exp(logits).sum() * 20_000
    chi = ((drawn - expected) ** 2 / expected).sum()
    assert chi < 700 + 5 * np.sqrt(2 * 700)  # five standard deviations of a chi-square of 699 degrees


def test_no_draw_leaves_the_filter():
    logits = np.random.default_rng(1).normal(size=700)
    best = set(np.argsort(logits)[-5:])
    assert set(draw_many(logits, 2000, top_k=5)) == best
    assert set(draw_many(logits, 500, min_p=0.999)) == {logits.argmax()}
    assert set(draw_many(logits, 500, top_p=1e-6)) == {logits.argmax()}


def test_rounding_never_draws_what_has_no_mass():
    """A goal below the first sum, or behind the last one, as rounding makes them."""
    parts = jnp.asarray([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]] * 4)
    sums = jnp.cumsum(parts, axis=-1)
    goals = jnp.asarray([-1e-7, 0.25, 0.99, 1.0 + 1e-6])
    assert sampling._first_beyond(sums, parts, goals).tolist() == [1, 3, 4, 4]


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 0.01])
def test_the_coldest_draw_is_the_best_token(temperature):
    logits = np.random.default_rng(5).normal(size=700) * 30
    rows = sampling_rows(2, temperature=temperature, top_p=[1.0, 0.9])
    wide = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (2, 700))
    assert choose(wide, rows, jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)).tolist() == [logits.argmax()] * 2


def test_a_draw_depends_on_seed_and_position_alone():
    random = np.random.default_rng(2)
    logits = jnp.asarray(random.normal(size=(3, 300)), jnp.float32)
    tokens, known = jnp.zeros((3, 8), jnp.int32), jnp.asarray([3, 4, 5])
    seed = np.asarray([[0, 1], [0, 2], [0, 3]])
    mixed = sampling_rows(3, temperature=[1.0, 0.0, 0.5], seed=seed, top_k=[0, 0, 9], repetition_penalty=[1, 1.3, 1])
    plain = sampling_rows(3, temperature=[1.0, 0.0, 0.0], seed=seed)
    run = jax.jit(choose)
    together, others = run(logits, mixed, tokens, known), run(logits, plain, tokens, known)
    assert together[0] == others[0]
    assert len({int(run(logits, mixed, tokens, known + step)[0]) for step in range(8)}) > 1


def test_bias_and_bans():
    logits = jnp.asarray([[0.0, 1.0, 2.0, 3.0]] * 2)
    rows = sampling_rows(
        2,
        bias_ids=[[1, -1, -1, -1], [-1, -1, -1, -1]],
        bias=[[9.0, 50.0, 0, 0], [50.0, 0, 0, 0]],
        stop_ids=[[1, -1, -1], [3, 2, -1]],
        min_length=[0, 8],
    )
    chosen = choose(logits, rows, jnp.zeros((2, 16), jnp.int32), jnp.asarray([4, 7]))
    assert chosen.tolist() == [1, 1]  # biased; both better tokens banned
    assert choose(logits, rows, jnp.zeros((2, 16), jnp.int32), jnp.asarray([4, 8])).tolist() == [1, 3]


def test_scores_are_log_softmax():
    logits = np.random.default_rng(3).normal(size=(2, 50)).astype(np.float32)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    given = jnp.asarray(logits)[:, None], jnp.asarray([[4], [9]])
    scores = scores_each(*given, jnp.asarray([True, False]), 3)
    np.testing.assert_allclose(scores.chosen[:, 0], expected[[0, 1], [4, 9]], atol=1e-5)
    order = np.argsort(-logits, -1)[:, :3]
    np.testing.assert_array_equal(scores.top_ids[:, 0], order)
    np.testing.assert_allclose(scores.top[:, 0], np.take_along_axis(expected, order, 1), atol=1e-5)
    silent = scores_each(*given, jnp.zeros(2, bool), 3)
    np.testing.assert_array_equal(silent.chosen, scores.chosen)
    assert not np.asarray(silent.top).any()


def test_several_positions_are_chosen_as_each_alone():
    """Greedy and sampled rows, filters, penalties over what stands before each position, an early ban."""
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(3, 4, 40)).astype(np.float32)) * 3
    rows = sampling_rows(
        3,
        temperature=[0.0, 0.8, 1.3],
        top_k=[0, 7, 0],
        top_p=[1.0, 1.0, 0.7],
        repetition_penalty=[1.5, 1.0, 1.2],
        frequency_penalty=[0.5, 0.0, 1.0],
        stop_ids=[[3, 5, -1], [-1, -1, -1], [8, -1, -1]],
        min_length=[10, 0, 12],
    )
    tokens, first = jnp.asarray(np.random.default_rng(6).integers(0, 40, (3, 16)), jnp.int32), jnp.asarray([8, 3, 11])
    chosen, confidence, entropy = choose_each(logits, rows, tokens, first)
    for j in range(4):
        assert chosen[:, j].tolist() == choose(logits[:, j], rows, tokens, first + j).tolist()
    assert (confidence > 0).all()
    assert (confidence <= 1).all()
    assert (entropy >= 0).all()
    again, *_ = choose_each(logits, rows, tokens, first, jnp.asarray([1, 1, 1]))
    assert again[0].tolist() == chosen[0].tolist()  # greedy
    assert again[1:].tolist() != chosen[1:].tolist()  # another step draws anew


def test_confidence_is_the_probability_and_entropy_what_is_left_open():
    logits = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25], [0.98, 0.01, 0.01]]]))
    rows = sampling_rows(1, temperature=[0.0])
    _, confidence, entropy = choose_each(logits, rows, jnp.zeros((1, 4), jnp.int32), jnp.asarray([2]))
    np.testing.assert_allclose(confidence, [[0.5, 0.98]], atol=1e-6)
    np.testing.assert_allclose(entropy, [[1.5 * np.log(2), -0.98 * np.log(0.98) - 0.02 * np.log(0.01)]], atol=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1.5, 1e-30, -1e30, np.inf, -np.inf])
def test_bits_compare_like_floats(value):
    others = np.asarray([-1e31, -2.0, -1e-31, 0.0, 1e-31, 2.0, 1e31], np.float32)
    keys = np.asarray(sampling._ordered(jnp.asarray([[value, *others]], jnp.float32)))[0]
    for other, key in zip(others, keys[1:], strict=True):
        if other != value:  # the two zeros differ in their sign bit
            assert (keys[0] > key) == (value > other)


def test_adjusted_scores_are_what_each_position_is_chosen_by():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.standard_normal((2, 4, 30)) * 3, jnp.float32)
    tokens, first = jnp.asarray(rng.integers(0, 30, (2, 12))), jnp.asarray([3, 7])
    rows = sampling_rows(2, frequency_penalty=[2.0, 0.0], bias_ids=[[-1] * 4, [5, 9, -1, -1]], bias=[3.0, 4.0, 0, 0])
    adjusted = adjusted_each(logits, rows, tokens, first)
    assert (np.asarray(adjusted).argmax(-1) == np.asarray(choose_each(logits, rows, tokens, first)[0])).all()
    moved = np.asarray(logits - adjusted)
    for place in range(4):  # tokens before a position count, its own and later ones do not
        counts = np.bincount(np.asarray(tokens)[0, : 3 + place], minlength=30)
        np.testing.assert_allclose(moved[0, place], 2 * counts, atol=1e-5)
    np.testing.assert_allclose(moved[1, :, [5, 9]], [[-3.0] * 4, [-4.0] * 4], atol=1e-5)
