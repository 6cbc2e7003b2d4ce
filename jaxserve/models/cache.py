"""The key-value cache: static shapes, one pytree, written only after every read of a pass.

Knows how entries lie in memory and how a pass's new ones get there. Layout per layer is ``[b, k, s, h]``: positions of
one head lie side by side, so that attention over a row is one contiguous product on every backend.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Shaped

from jaxserve.pytree import pytree


@pytree
class KVCache:
    """Keys and values of all slots: a tuple of layers each, as they are stored."""

    k: tuple[Shaped[Array, "b k s h"], ...]
    v: tuple[Shaped[Array, "b k s h"], ...]

    @property
    def length(self) -> int:
        """Positions a slot can hold."""
        return self.k[0].shape[2]

    @property
    def slots(self) -> int:
        """Rows of the cache."""
        return self.k[0].shape[0]


def empty_cache(layers: int, slots: int, kv_heads: int, length: int, head_size: int, dtype: DTypeLike) -> KVCache:
    """A cache of zeros. Zeros, not ``empty``: an uninitialised cache would hold other tenants' memory.

    bfloat16 is stored as its bits: XLA:CPU of jax 0.10 updates a bfloat16 array in place only after it has converted
    the whole of it to float32, and back.
    """
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    shape = (slots, kv_heads, length, head_size)
    return KVCache(
        k=tuple(jnp.zeros(shape, stored) for _ in range(layers)),
        v=tuple(jnp.zeros(shape, stored) for _ in range(layers)),
    )


def as_stored(entries: Shaped[Array, "..."], like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Entries in the form in which ``like`` holds them: numbers to bits, or bits to numbers."""
    return entries if entries.dtype == like.dtype else jax.lax.bitcast_convert_type(entries, like.dtype)


def write(
    cache: KVCache, fresh: KVCache, row: Int[Array, ""] | int, start: Int[Array, " b"], keep: Bool[Array, " b"]
) -> KVCache:
    """Puts entries ``fresh`` (``[b, k, t, h]`` a layer) of rows ``row .. row+b-1`` at ``start .. start+t-1``.

    Rows that are not kept stay as they are. The caller guarantees ``start + t <= cache.length`` for kept rows: an
    update that would pass the end is moved back silently by XLA.

    A loop over rows, as many as the last kept one needs: XLA:CPU copies the whole cache for a scatter, for a
    ``where``, for an unrolled loop, and for an update that it may schedule before the last read. A loop whose length
    it does not know comes after every read and works in place.
    """

    def put(r: Int[Array, ""], old: Array, new: Array) -> Array:
        window = as_stored(jax.lax.dynamic_slice_in_dim(new, r, 1, axis=0), old)
        at = (row + r, 0, start[r], 0)
        before = jax.lax.dynamic_slice(old, at, window.shape)
        return jax.lax.dynamic_update_slice(old, jnp.where(keep[r], window, before), at)

    def put_row(r: Int[Array, ""], whole: KVCache) -> KVCache:
        return jax.tree.map(lambda old, new: put(r, old, new), whole, fresh)

    rows = jnp.max(jnp.where(keep, jnp.arange(1, len(keep) + 1), 0))
    return jax.lax.fori_loop(0, rows, put_row, cache)
