from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.step import DecodeState, Strategy
from jaxserve.models.cache import Cache
from tests.decode.rows import sampling_rows


class Silent:
    """A model that nobody asks anything."""

    def __call__(self, *arguments):
        raise AssertionError

    def logits(self, hidden):
        raise AssertionError


MODEL = Silent()


def state(known: list[int]) -> DecodeState:
    tokens = np.arange(2 * 8).reshape(2, 8)
    return DecodeState(
        cache=Cache((), 8, 2),
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.asarray(known, jnp.int32) - 1,
        known=jnp.asarray(known, jnp.int32),
        active=jnp.ones(2, bool),
        memory=None,
    )


def test_it_reads_the_last_token_and_keeps_one():
    strategy = Autoregressive(alternatives=2)
    assert isinstance(strategy, Strategy)
    assert hash(strategy) == hash(Autoregressive(alternatives=2))
    proposal = strategy.propose(MODEL, state([3, 5]), sampling_rows(2))
    assert proposal.tokens.tolist() == [[2], [12]]
    logits = jnp.zeros((2, 1, 20)).at[0, 0, 7].set(2.0).at[1, 0, 9].set(2.0)
    verdict = strategy.accept(logits, proposal, state([3, 5]), sampling_rows(2, alternatives=True))
    assert verdict.tokens.tolist() == [[7], [9]]
    assert (verdict.count.tolist(), verdict.advance.tolist()) == ([1, 1], [1, 1])
    assert verdict.scores.top_ids[:, 0, 0].tolist() == [7, 9]


def test_while_known_tokens_are_read_again_it_says_nothing():
    strategy, now = Autoregressive(alternatives=2), state([3, 5])
    again = dataclasses.replace(now, length=jnp.asarray([0, 4], jnp.int32))  # one row has three tokens to read
    proposal = strategy.propose(MODEL, again, sampling_rows(2))
    assert proposal.tokens.tolist() == [[0], [12]]
    verdict = strategy.accept(jnp.zeros((2, 1, 20)), proposal, again, sampling_rows(2))
    assert (verdict.count.tolist(), verdict.advance.tolist()) == ([0, 1], [1, 1])


def test_it_needs_no_memory():
    assert Autoregressive().memory(4, 32) is None
