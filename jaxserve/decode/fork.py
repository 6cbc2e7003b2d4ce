"""A slot's prompt copied into another one, so that several texts that begin alike read it once.

Knows which parts of a state belong to a slot, and nothing of what they mean. Knows no strategy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.decode.step import DecodeState
from jaxserve.models.cache import Cache

PIECES = 8


def fork(state: DecodeState, source: Int[Array, ""], target: Int[Array, ""]) -> DecodeState:
    """Copies a slot: cache, tokens, and how far both go. The target does not decode yet.

    It is right wherever the source stands, but only the source's own place is copied with it: what a ring or a
    recurrent layer keeps is that of the source's last token, and of none before it. So a prompt is copied when all of
    it is read and nothing behind it. A strategy's memory is not copied: it is handed over like to anybody who starts.

    In pieces, one after the other: what lies between reading and writing is then a small part of a slot. They are cut
    along the third axis, which no mesh splits.
    """

    def next_piece(index: Int[Array, ""], cache: Cache) -> Cache:
        return jax.tree.map(lambda leaf: _copied_piece(leaf, source, target, index), cache)

    return DecodeState(
        cache=jax.lax.fori_loop(0, PIECES, next_piece, state.cache),
        tokens=_copied(state.tokens, source, target),
        length=_copied(state.length, source, target),
        known=_copied(state.known, source, target),
        active=state.active.at[target].set(False),
        memory=state.memory,
    )


def _copied(leaf: Array, source: Int[Array, ""], target: Int[Array, ""]) -> Array:
    row = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=0)
    return jax.lax.dynamic_update_slice_in_dim(leaf, row, target, axis=0)


def _copied_piece(leaf: Array, source: Int[Array, ""], target: Int[Array, ""], index: Int[Array, ""]) -> Array:
    """A last piece that would pass the end overlaps the one before it."""
    size = -(-leaf.shape[2] // PIECES)
    at = jnp.minimum(index * size, leaf.shape[2] - size)
    row = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=0)
    piece = jax.lax.dynamic_slice_in_dim(row, at, size, axis=2)
    zero = jnp.zeros_like(at)
    return jax.lax.dynamic_update_slice(leaf, piece, (target, zero, at, *(zero,) * (leaf.ndim - 3)))
