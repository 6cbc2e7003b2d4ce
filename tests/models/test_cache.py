"""Writing into the cache: the right place, nobody else's, and in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.cache import KVCache, as_stored, empty_cache, write

SHAPE = {"layers": 2, "slots": 3, "kv_heads": 2, "length": 16, "head_size": 4}


def fresh(rows: int, tokens: int, dtype=jnp.float32) -> KVCache:
    random = np.random.default_rng(0)
    parts = [jnp.asarray(random.normal(size=(rows, 2, tokens, 4)), dtype) for _ in range(4)]
    return KVCache(tuple(parts[:2]), tuple(parts[2:]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_go_where_they_belong(dtype):
    cache, new = empty_cache(**SHAPE, dtype=dtype), fresh(3, 2, dtype)
    after = write(cache, new, 0, jnp.asarray([0, 5, 14]), jnp.asarray([True, True, True]))
    for old, layer in zip(after.k + after.v, new.k + new.v, strict=True):
        entries = np.array(as_stored(old, layer), np.float32)
        for row, start in enumerate((0, 5, 14)):
            np.testing.assert_array_equal(entries[row, :, start : start + 2], np.asarray(layer, np.float32)[row])
            entries[row, :, start : start + 2] = 0
        assert not entries.any()


def test_rows_that_are_not_kept_stay():
    cache = write(empty_cache(**SHAPE, dtype=jnp.float32), fresh(3, 4), 0, jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
    after = write(cache, fresh(3, 4), 0, jnp.asarray([4, 4, 4]), jnp.asarray([False, True, False]))
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        np.testing.assert_array_equal(old[2], new[2])
        assert (old[1] != new[1]).any()


def test_one_row_lands_in_its_slot():
    after = write(
        empty_cache(**SHAPE, dtype=jnp.float32), fresh(1, 4), jnp.int32(2), jnp.asarray([8]), jnp.ones(1, bool)
    )
    assert not np.asarray(after.k[0])[:2].any()
    np.testing.assert_array_equal(after.k[0][2, :, 8:12], fresh(1, 4).k[0][0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_write_is_in_place(dtype):
    """The temporary memory of a donated write is a small part of the cache: nothing copies it."""
    cache = jax.eval_shape(lambda: empty_cache(2, 8, 2, 4096, 32, dtype))
    new = jax.eval_shape(lambda: KVCache(*((jnp.zeros((8, 2, 1, 32), dtype),) * 2 for _ in range(2))))
    start, keep = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8,), bool)
    compiled = jax.jit(write, donate_argnums=0).lower(cache, new, 0, start, keep).compile()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 20
