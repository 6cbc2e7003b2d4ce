"""Drafts by looking up: what followed the last time that the text read as it does now.

Prompt lookup (Saxena 2023): code that is edited, documents that are quoted and lists that go on repeat what is there
already. Found on the device by comparing shifted copies of the text; no host, no second model.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Tokens that have to agree, and beyond how many it does not matter that more do.
LEAST, MOST = 2, 4


def latest_match(
    text: Int[Array, "b s"], searched: Int[Array, " b"], tail: Int[Array, "b m"]
) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """Where a text reads like its tail.

    Args:
        text: tokens by position, of which the first ``searched`` count.
        tail: the last tokens of what is to be continued, latest last; -1 agrees with nothing.

    Returns:
        The place behind the longest agreement, the latest of several, and how many tokens agree there (at most as many
        as the tail has); -1 and 0 where fewer than ``LEAST`` do.
    """
    m, positions = tail.shape[1], jnp.arange(text.shape[1])
    agreed = jnp.zeros(text.shape, jnp.int32)
    going = positions < searched[:, None]
    shifted = text
    for back in range(m):
        going = going & (shifted == tail[:, m - 1 - back, None]) & (positions >= back)
        agreed = agreed + going
        shifted = jnp.roll(shifted, 1, axis=1)
    best = jnp.argmax(agreed * text.shape[1] + positions, axis=1).astype(jnp.int32)
    length = jnp.take_along_axis(agreed, best[:, None], axis=1)[:, 0]
    found = length >= LEAST
    return jnp.where(found, best + 1, -1), jnp.where(found, length, 0)


def tail_of(text: Int[Array, "b s"], known: Int[Array, " b"]) -> Int[Array, "b m"]:
    """The last ``MOST`` of the first ``known`` tokens; -1 where there are fewer."""
    at = known[:, None] - MOST + jnp.arange(MOST)
    return jnp.where(at >= 0, jnp.take_along_axis(text, jnp.maximum(at, 0), axis=1), -1)


def following(
    text: Int[Array, "b s"], known: Int[Array, " b"], place: Int[Array, " b"], count: int
) -> Int[Array, "b c"]:
    """``count`` tokens from ``place`` on; behind the end of the text it goes on as it has since there."""
    period = jnp.maximum(known - place, 1)[:, None]
    at = place[:, None] + jnp.arange(count) % period
    return jnp.take_along_axis(text, jnp.clip(at, 0, text.shape[1] - 1), axis=1)


def agreeing(one: Int[Array, "b c"], other: Int[Array, "b c"], within: Int[Array, " b"]) -> Int[Array, " b"]:
    """How many of the first ``within`` tokens agree before the first that does not."""
    same: Bool[Array, "b c"] = (one == other) & (jnp.arange(one.shape[1]) < within[:, None])
    return jnp.sum(jnp.cumprod(same, axis=1), axis=1).astype(jnp.int32)
