"""The key-value cache: static shapes, one pytree, written only after every read of a pass.

Knows how entries lie in memory and how a pass's new ones get there. Layout per layer is ``[b, k, s, h]``: positions of
one head lie side by side, so that attention over a row is one contiguous product on every backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.pytree import pytree


@pytree
class KVCache:
    """Keys and values of all slots: a tuple of layers each."""

    k: tuple[Float[Array, "b k s h"], ...]
    v: tuple[Float[Array, "b k s h"], ...]

    @property
    def length(self) -> int:
        """Positions a slot can hold."""
        return self.k[0].shape[2]

    @property
    def slots(self) -> int:
        """Rows of the cache."""
        return self.k[0].shape[0]


def empty_cache(layers: int, slots: int, kv_heads: int, length: int, head_size: int, dtype: DTypeLike) -> KVCache:
    """A cache of zeros. Zeros, not ``empty``: an uninitialised cache would hold other tenants' memory."""
    shape = (slots, kv_heads, length, head_size)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
    )


def write(
    cache: KVCache, fresh: KVCache, row: Int[Array, ""] | int, start: Int[Array, " b"], keep: Bool[Array, " b"]
) -> KVCache:
    """Puts the entries ``fresh`` (``[b, k, t, h]`` a layer) of rows ``row .. row+b-1`` at positions ``start .. start+t-1``.

    Rows that are not kept stay as they are. The caller guarantees ``start + t <= cache.length`` for kept rows: an
    update that would pass the end is moved back silently by XLA.

    A loop over rows of in-place updates: a scatter, a ``where`` over the cache and an unrolled loop all copy the whole
    cache on XLA:CPU.
    """

    def put(r: Int[Array, ""] | int, old: Array, new: Array) -> Array:
        window = jax.lax.dynamic_slice_in_dim(new, r, 1, axis=0)
        at = (row + r, 0, start[r], 0)
        before = jax.lax.dynamic_slice(old, at, window.shape)
        return jax.lax.dynamic_update_slice(old, jnp.where(keep[r], window, before), at)

    def put_row(r: Int[Array, ""] | int, whole: KVCache) -> KVCache:
        return jax.tree.map(lambda old, new: put(r, old, new), whole, fresh)

    rows = start.shape[0]
    return put_row(0, cache) if rows == 1 else jax.lax.fori_loop(0, rows, put_row, cache)


def scrub(cache: KVCache, rows: Bool[Array, " b"]) -> KVCache:
    """Zeroes whole rows. Needed where a row holds a non-finite number, since later passes read, then mask, what is there."""
    return jax.tree.map(lambda entries: jnp.where(rows[:, None, None, None], jnp.zeros_like(entries), entries), cache)
