"""Writing into the cache: the right place, nobody else's, and in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.cache import KV, Cache, Ring, as_stored, entries, ring_size, write


def empty(kind=KV, positions: int = 16, slots: int = 3, layers: int = 2, dtype=jnp.float32) -> Cache:
    made = (kind(*(entries(slots, 2, positions, 4, dtype) for _ in range(2))) for _ in range(layers))
    return Cache((*made, None), 64, slots)


def fresh(rows: int, tokens: int, kind=KV, dtype=jnp.float32, seed: int = 0):
    random = np.random.default_rng(seed)
    parts = [jnp.asarray(random.normal(size=(rows, 2, tokens, 4)), dtype) for _ in range(4)]
    return (kind(*parts[:2]), kind(*parts[2:]), None)


def ints(*values: int):
    return jnp.asarray(values, jnp.int32)


def at_once(cache, new, row, start, count):
    """What accelerators do, whatever this machine is."""
    layers = (
        None if old is None else old.put_all(one, row, start, count) for old, one in zip(cache.layers, new, strict=True)
    )
    return Cache(tuple(layers), cache.length, cache.slots)


BOTH = pytest.mark.parametrize("put", [write, at_once])


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_go_where_they_belong(put, dtype):
    cache, new = empty(dtype=dtype), fresh(3, 2, dtype=dtype)
    after = put(cache, new, 0, ints(0, 5, 14), ints(2, 2, 2))
    for old, layer in zip(jax.tree.leaves(after), jax.tree.leaves(new), strict=True):
        found = np.array(as_stored(old, layer), np.float32)
        for row, start in enumerate((0, 5, 14)):
            np.testing.assert_array_equal(found[row, :, start : start + 2], np.asarray(layer, np.float32)[row])
            found[row, :, start : start + 2] = 0
        assert not found.any()


@BOTH
@pytest.mark.parametrize("kind", [KV, Ring])
def test_rows_that_are_not_kept_stay(put, kind):
    cache = put(empty(kind), fresh(3, 4, kind), 0, ints(0, 0, 0), ints(4, 4, 4))
    after = put(cache, fresh(3, 4, kind, seed=1), 0, ints(4, 4, 4), ints(0, 4, 0))
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        np.testing.assert_array_equal(old[2], new[2])
        assert (old[1] != new[1]).any()


@BOTH
@pytest.mark.parametrize("kind", [KV, Ring])
def test_one_row_lands_in_its_slot(put, kind):
    after = put(empty(kind), fresh(1, 4, kind), jnp.int32(2), ints(8), ints(4)).layers[0]
    assert not np.asarray(after.k)[:2].any()
    np.testing.assert_array_equal(after.k[2, :, 8:12], fresh(1, 4)[0].k[0])


@BOTH
@pytest.mark.parametrize("chunk", [1, 3, 8, 20, 40])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_ring_holds_the_last_positions_however_they_came(put, chunk, padding):
    """Chunks of any size, longer than the ring too, and padded: only what is counted is kept."""
    size, total = 8, 40
    texts = np.random.default_rng(1).normal(size=(2, 2, total, 4)).astype(np.float32)
    cache = empty(Ring, positions=size, slots=2, layers=1)
    for start in range(0, total, chunk):
        part = np.full((2, 2, chunk + padding, 4), 99, np.float32)
        count = min(chunk, total - start)
        part[:, :, :count] = texts[:, :, start : start + count]
        new = (Ring(jnp.asarray(part), jnp.asarray(-part)), None)
        cache = jax.jit(put)(cache, new, 0, ints(start, start), ints(count, count))
    for position in range(total - size, total):
        np.testing.assert_array_equal(cache.layers[0].k[:, :, position % size], texts[:, :, position])
        np.testing.assert_array_equal(cache.layers[0].v[:, :, position % size], -texts[:, :, position])


def test_a_ring_is_made_where_it_saves_something():
    assert ring_size(24, 4096, 16) == 32
    assert ring_size(24, 4096, 128) == 24
    assert ring_size(512, 512, 128) is None
    assert ring_size(500, 513, 128) == 512


@pytest.mark.parametrize("kind", [KV, Ring])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_write_is_in_place(kind, dtype):
    """The temporary memory of a donated write is a small part of the cache: nothing copies it."""
    cache = jax.eval_shape(lambda: empty(kind, 4096, 8, dtype=dtype))
    new = jax.eval_shape(lambda: fresh(8, 1, kind, dtype))
    start, count = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(write, donate_argnums=0).lower(cache, new, 0, start, count).compile()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 20
