"""The cache: static shapes, one pytree, written only after every read of a pass.

Knows how entries lie in memory and how a pass's new ones get there. A layer keeps what its mixer needs: keys and values
of every position (``KV``), of the last few (``Ring``), or nothing but a state that stands for all of them (in
``recurrent.py``). Layout of entries is ``[b, k, s, h]``: positions of one head lie side by side, so that attention over
a row is one contiguous product on every backend.

A pass gives each layer's fresh entries back instead of writing them, and whoever ran it says how many of its positions
to keep. So padding behind a prompt, a rejected draft and a row that stands still are one case: a smaller count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Shaped

from jaxserve.pytree import pytree, static
from jaxserve.sharding import held

# Up to this many positions are put into a ring one by one; of more, the whole ring is rewritten.
FEW_POSITIONS = 16


class LayerCache(Protocol):
    """What one layer keeps; a pytree whose leaves have the slots as their first axis, key heads as their second."""

    def put(
        self, fresh: Any, r: Int[Array, ""], row: Int[Array, ""] | int, start: Int[Array, " b"], count: Int[Array, " b"]
    ) -> Any:
        """With the first ``count[r]`` fresh entries of row ``r``, in place; they belong to slot ``row + r``."""

    def put_all(self, fresh: Any, row: Int[Array, ""] | int, start: Int[Array, " b"], count: Int[Array, " b"]) -> Any:
        """The same for all rows at once."""


@pytree
class Cache:
    """What the layers of a model keep of every slot; ``None`` where a layer keeps nothing.

    Attributes:
        length: positions that a slot can hold.
        slots: rows of the cache.
    """

    layers: tuple[Any, ...]
    length: int = static()
    slots: int = static()


@pytree
class KV:
    """Keys and values of every position. As fresh entries: of the pass's positions.

    ``v`` is ``None`` where values are the first numbers of the keys (``latent.py``).
    """

    k: Shaped[Array, "b k s h"]
    v: Shaped[Array, "b k s h"] | None

    def put(
        self, fresh: KV, r: Int[Array, ""], row: Int[Array, ""] | int, start: Int[Array, " b"], count: Int[Array, " b"]
    ) -> KV:
        """See ``LayerCache``. What lies behind the count is written too: nothing reads beyond a row's length."""
        return jax.tree.map(lambda old, new: _put_run(old, new, r, row, start, count), self, fresh)

    def put_all(self, fresh: KV, row: Int[Array, ""] | int, start: Int[Array, " b"], count: Int[Array, " b"]) -> KV:
        """See ``LayerCache``."""
        return jax.tree.map(lambda old, new: _scatter(old, new, row, *_places(new, start, count)), self, fresh)


@pytree
class Ring:
    """Keys and values of the last positions: position ``p`` lies at ``p mod`` the ring's size."""

    k: Shaped[Array, "b k r h"]
    v: Shaped[Array, "b k r h"]

    def put(
        self,
        fresh: Ring,
        r: Int[Array, ""],
        row: Int[Array, ""] | int,
        start: Int[Array, " b"],
        count: Int[Array, " b"],
    ) -> Ring:
        """See ``LayerCache``."""
        put = _put_few if fresh.k.shape[2] <= FEW_POSITIONS else _put_turn
        return jax.tree.map(lambda old, new: put(old, new, r, row, start, count), self, fresh)

    def put_all(self, fresh: Ring, row: Int[Array, ""] | int, start: Int[Array, " b"], count: Int[Array, " b"]) -> Ring:
        """See ``LayerCache``."""
        size = self.k.shape[2]
        at, kept = _places(fresh.k, start, count)
        last = start + count
        kept = kept & (at >= last[:, None] - size)
        return jax.tree.map(lambda old, new: _scatter(old, new, row, at % size, kept), self, fresh)


def write(
    cache: Cache,
    fresh: tuple[Any, ...],
    row: Int[Array, ""] | int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> Cache:
    """Keeps the first ``count`` fresh entries of rows ``row .. row+b-1``, which follow ``start`` positions.

    Rows with a count of 0 stay as they are. The caller guarantees ``start + count <= cache.length`` for all others.

    On CPU a loop over rows, as many as the last kept one needs: XLA:CPU copies the whole cache for a scatter, for a
    ``where``, for an unrolled loop, and for an update that it may schedule before the last read. A loop whose length
    it does not know comes after every read and works in place. Elsewhere a scatter, all rows at once.
    """

    heads = heads_of(cache.layers)
    fresh = tuple(map(in_place, fresh, heads))

    def one_by_one(layers: tuple[Any, ...]) -> tuple[Any, ...]:
        def put_row(r: Int[Array, ""], layers: tuple[Any, ...]) -> tuple[Any, ...]:
            return _each(lambda layer, new: layer.put(new, r, row, start, count), layers, fresh)

        rows = jnp.max(jnp.where(count > 0, jnp.arange(1, len(count) + 1), 0))
        return jax.lax.fori_loop(0, rows, put_row, layers)

    def at_once(layers: tuple[Any, ...]) -> tuple[Any, ...]:
        return _each(lambda layer, new: layer.put_all(new, row, start, count), layers, fresh)

    layers = jax.lax.platform_dependent(cache.layers, cpu=one_by_one, default=at_once)
    return Cache(tuple(map(in_place, layers, heads)), cache.length, cache.slots)


def in_place(layer: Any, heads: int) -> Any:
    """A layer's cache or fresh entries, which a program for a mesh may move nowhere.

    XLA would split a cache in a loop the way it splits queries and new entries, and gather all of it behind the loop.
    """
    return jax.tree.map(lambda leaf: held(leaf, *entry_split(leaf, heads)), layer)


def _each(put: Callable[[Any, Any], Any], layers: tuple[Any, ...], fresh: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if layer is None else put(layer, new) for layer, new in zip(layers, fresh, strict=True))


def entries(slots: int, heads: int, positions: int, size: int, dtype: DTypeLike) -> Shaped[Array, "b k s h"]:
    """Zeros. Zeros, not ``empty``: an uninitialised cache would hold other tenants' memory.

    bfloat16 is stored as its bits: XLA:CPU of jax 0.10 updates a bfloat16 array in place only after it has converted
    the whole of it to float32, and back.
    """
    return jnp.zeros((slots, heads, positions, size), jnp.uint16 if dtype == jnp.bfloat16 else dtype)


def heads_of(layers: tuple[Any, ...]) -> tuple[int, ...]:
    """Of each layer the number of key heads among which its cache is split over a mesh, if it can be.

    A leaf of a layer may have a multiple of them.
    """
    return tuple(min((leaf.shape[1] for leaf in jax.tree.leaves(layer)), default=1) for layer in layers)


def entry_split(leaf: Any, heads: int) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """Logical axes of a leaf of a layer's cache, and the sizes that decide how it is split."""
    return (None, "kv_heads", *(None for _ in leaf.shape[2:])), (leaf.shape[0], heads, *leaf.shape[2:])


def ring_size(window: int, positions: int, key_block: int) -> int | None:
    """Positions of a ring for a window, in whole key blocks; ``None`` where it would save nothing."""
    block = min(key_block, window)
    size = -(-window // block) * block
    return size if size < positions else None


def as_stored(entries: Shaped[Array, "..."], like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Entries in the form in which ``like`` holds them: numbers to bits, or bits to numbers."""
    return entries if entries.dtype == like.dtype else jax.lax.bitcast_convert_type(entries, like.dtype)


def _put_run(
    old: Shaped[Array, "slots k s h"],
    new: Shaped[Array, "b k t h"],
    r: Int[Array, ""],
    row: Int[Array, ""] | int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> Shaped[Array, "slots k s h"]:
    t, stored = new.shape[2], old.shape[2]
    window = as_stored(jax.lax.dynamic_slice_in_dim(new, r, 1, axis=0), old)
    first = jnp.minimum(start[r], stored - t)  # what does not fit is not kept, but XLA would move all of it back
    if t > 1:
        window = jnp.roll(window, start[r] - first, axis=2)
    at = (row + r, 0, first, 0)
    before = jax.lax.dynamic_slice(old, at, window.shape)
    kept = (count[r] > 0) & (jnp.arange(t) >= start[r] - first)
    return jax.lax.dynamic_update_slice(old, jnp.where(kept[:, None], window, before), at)


def _put_few(
    old: Shaped[Array, "slots k r h"],
    new: Shaped[Array, "b k t h"],
    r: Int[Array, ""],
    row: Int[Array, ""] | int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> Shaped[Array, "slots k r h"]:
    _, heads, size, h = old.shape

    def put(i: Int[Array, ""], ring: Shaped[Array, "slots k r h"]) -> Shaped[Array, "slots k r h"]:
        one = as_stored(jax.lax.dynamic_slice(new, (r, 0, i, 0), (1, heads, 1, h)), ring)
        return jax.lax.dynamic_update_slice(ring, one, (row + r, 0, (start[r] + i) % size, 0))

    return jax.lax.fori_loop(0, count[r], put, old)


def _put_turn(
    old: Shaped[Array, "slots k r h"],
    new: Shaped[Array, "b k t h"],
    r: Int[Array, ""],
    row: Int[Array, ""] | int,
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> Shaped[Array, "slots k r h"]:
    size = old.shape[2]
    last = start[r] + count[r] - 1
    newest = last - (last - jnp.arange(size)) % size  # the newest position that belongs to each place
    fresh = as_stored(jax.lax.dynamic_slice_in_dim(new, r, 1, axis=0), old)
    picked = jnp.take(fresh, jnp.clip(newest - start[r], 0, new.shape[2] - 1), axis=2)
    before = jax.lax.dynamic_slice_in_dim(old, row + r, 1, axis=0)
    after = jnp.where((newest >= start[r])[None, None, :, None], picked, before)
    return jax.lax.dynamic_update_slice_in_dim(old, after, row + r, axis=0)


def _places(
    new: Shaped[Array, "b k t h"], start: Int[Array, " b"], count: Int[Array, " b"]
) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
    offsets = jnp.arange(new.shape[2])
    return start[:, None] + offsets, offsets < count[:, None]


def _scatter(
    old: Shaped[Array, "slots k s h"],
    new: Shaped[Array, "b k t h"],
    row: Int[Array, ""] | int,
    at: Int[Array, "b t"],
    kept: Bool[Array, "b t"],
) -> Shaped[Array, "slots k s h"]:
    """Puts what is kept at its place; what is not goes outside of the array, where XLA drops it."""
    b, _, t, _ = new.shape
    rows = jnp.broadcast_to(row + jnp.arange(b)[:, None], (b, t))
    at = jnp.where(kept, at, old.shape[2])
    return old.at[rows, :, at].set(as_stored(new, old).transpose(0, 2, 1, 3), mode="drop")
