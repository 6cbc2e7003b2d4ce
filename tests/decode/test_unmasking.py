"""The rules against loops over positions, on thousands of random blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import unmasking
from jaxserve.decode.sampling import REMOVED
from jaxserve.decode.unmasking import BlockRows
from jaxserve.models.decoding import DYNAMIC, ENTROPY, PREFIX, RULES, SEQUENTIAL, STATIC

W = 8


def block_rows(count: int, **changes) -> BlockRows:
    neutral = {
        "rule": (DYNAMIC, np.int32),
        "threshold": (0.5, np.float32),
        "edit_threshold": (1.0, np.float32),
        "max_post_steps": (16, np.int32),
        "denoising_steps": (W, np.int32),
        "penalty": (0.0, np.float32),
        "entropy_bound": (0.35, np.float32),
    }
    fields = {name: np.broadcast_to(np.asarray(changes.pop(name, value), dtype), (count,)).copy()
              for name, (value, dtype) in neutral.items()}  # fmt: skip
    assert not changes
    return BlockRows(**{name: jnp.asarray(value) for name, value in fields.items()})


def by_hand(rule, masked, confidence, entropy, count, threshold, bound) -> set[int]:
    """The same rules, one position after the other."""
    masks = [at for at in range(len(masked)) if masked[at]]
    surest = sorted(masks, key=lambda at: (-confidence[at], at))[:count]
    above = [at for at in masks if confidence[at] > threshold]
    if rule == STATIC:
        return set(surest)
    if rule == DYNAMIC:
        return set(above if len(above) >= count else surest)
    if rule == SEQUENTIAL:
        return set(masks[:count])
    if rule == PREFIX:
        taken = list(masks[:count])
        for at in masks[count:]:
            if confidence[at] <= threshold:
                break
            taken.append(at)
        return set(taken)
    taken, spent = [], np.float32(0)
    for at in sorted(masks, key=lambda at: (entropy[at], at)):
        spent += entropy[at]
        if taken and spent > bound:
            break
        taken.append(at)
    return set(taken)


CASES = 4000


@pytest.fixture(scope="module")
def blocks():
    draw = np.random.default_rng(0)
    confidence = draw.choice(np.linspace(0.05, 0.95, 12), (CASES, W)).astype(np.float32)  # ties are frequent
    return {
        "rule": draw.integers(0, len(RULES) - 1, CASES),
        "masked": draw.random((CASES, W)) < draw.random((CASES, 1)),
        "confidence": confidence,
        "entropy": (draw.integers(0, 9, (CASES, W)) / 16).astype(np.float32),
        "count": draw.integers(1, 5, CASES),
        "threshold": draw.choice([0.3, 0.52, 0.7, 1.0], CASES).astype(np.float32),
        "bound": draw.choice([0.0, 0.3, 1.1], CASES).astype(np.float32),
    }


def found(blocks, **changes) -> np.ndarray:
    blocks = blocks | changes
    rows = block_rows(CASES, rule=blocks["rule"], threshold=blocks["threshold"], entropy_bound=blocks["bound"])
    return np.asarray(
        jax.jit(unmasking.filled)(
            rows,
            *(jnp.asarray(blocks[name]) for name in ("masked", "confidence", "entropy")),
            jnp.asarray(blocks["count"], jnp.int32),
        )
    )


def test_every_rule_is_the_one_by_hand(blocks):
    chosen = found(blocks)
    names = ("rule", "masked", "confidence", "entropy", "count", "threshold", "bound")
    for case, row in enumerate(zip(*(blocks[name] for name in names), strict=True)):
        assert set(np.flatnonzero(chosen[case])) == by_hand(*row), (case, RULES[row[0]])


def test_there_is_always_progress_and_only_masks_are_filled(blocks):
    chosen = found(blocks, threshold=np.ones(CASES, np.float32), bound=np.zeros(CASES, np.float32))
    assert (chosen.any(1) == blocks["masked"].any(1)).all()
    assert not (chosen & ~blocks["masked"]).any()


def test_the_rules_differ(blocks):
    every = [found(blocks, rule=np.full(CASES, rule)) for rule in (STATIC, DYNAMIC, SEQUENTIAL, PREFIX, ENTROPY)]
    for at, one in enumerate(every):
        for other in every[at + 1 :]:
            assert (one != other).any()


@pytest.mark.parametrize(("steps", "expected"), [(8, [1] * 8), (3, [3, 3, 2]), (1, [8]), (99, [1] * 9), (0, [8])])
def test_a_block_is_spread_evenly_over_its_passes(steps, expected):
    rows = block_rows(2, denoising_steps=steps)
    counts = [int(unmasking.due(rows, jnp.full(2, step, jnp.int32), W)[0]) for step in range(len(expected))]
    assert counts == expected


def test_decided_tokens_give_way_to_surer_ones():
    rows = block_rows(4, edit_threshold=[0.5, 0.0, 1.0, 0.5], max_post_steps=[1, 1, 1, 0])
    canvas, token = jnp.full((4, 3), 7), jnp.asarray([[8, 8, 7]] * 4)
    confidence = jnp.asarray([[0.6, 0.5, 0.9]] * 4)
    decided = jnp.asarray([[True, True, True]] * 4)
    over = unmasking.overwritten(rows, canvas, decided, token, confidence)
    assert over.tolist() == [[True, False, False], [True, True, False], [False] * 3, [False] * 3]
    assert not unmasking.overwritten(rows, canvas, ~decided, token, confidence).any()


def test_what_candidates_are_chosen_from():
    logits = jnp.ones((2, 3, 5))
    rows = block_rows(2, penalty=[0.25, 0.0])
    where = jnp.asarray([[True, False, False]] * 2)
    out = unmasking.admissible(logits, rows, jnp.asarray([[3, 4, 0]] * 2), jnp.asarray([2, -1]), ((0, where),))
    expected = np.ones((2, 3, 5), np.float32)
    expected[:, 0, 0] = REMOVED
    for position, stutter in enumerate((2, 3, 4)):
        expected[0, position, stutter] -= 0.25
    np.testing.assert_array_equal(out, expected)
