"""Teacher-forced scores against a plain log-softmax of the same pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted, score
from jaxserve.models.family import family_of
from jaxserve.testing import TINY, random_params

FAMILY = family_of(TINY)
PARAMS = random_params(FAMILY)
GRAPH = FAMILY.graphdef(jnp.float32)


@pytest.mark.parametrize("length", [2, 65, 66, 100])
def test_scores_are_log_softmax(length):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, length)), jnp.int32)
    scores = jitted.score(GRAPH, PARAMS, tokens, 3)
    expected = np.asarray(jax.nn.log_softmax(jitted.logits(GRAPH, PARAMS, tokens), -1))[:, :-1]
    assert scores.chosen.shape == (2, length - 1)
    assert scores.top.shape == (2, length - 1, 3)
    chosen = np.take_along_axis(expected, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(scores.chosen, chosen, atol=1e-4)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-expected, -1)[..., :3])


def test_what_comes_behind_changes_nothing():
    from flax import nnx

    model = nnx.merge(GRAPH, PARAMS)
    tokens = np.random.default_rng(1).integers(0, 256, (1, 40)).astype(np.int32)
    other = tokens.copy()
    other[0, 20:] = 5
    first, second = (score.hidden_states(model, jnp.asarray(ids)) for ids in (tokens, other))
    np.testing.assert_array_equal(first[:, :20], second[:, :20])
    assert np.abs(np.asarray(first[:, 20:] - second[:, 20:])).max() > 1e-2
