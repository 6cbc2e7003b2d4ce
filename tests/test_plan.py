"""The plan's arithmetic: chunks that never pass the end, bytes that add up, refusals with numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, Pool
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.step import empty_state
from jaxserve.engine.rows import RowTable
from jaxserve.errors import PlanError
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract
from jaxserve.plan import CacheShape, ModelShape, WeightShape, make_plan
from jaxserve.testing import TINY, tiny_plan

SHAPE = ModelShape(
    1000, (WeightShape("all", (1000, 1000), (None, None)),), (CacheShape(per_position=64),), 1 << 20, 64, 4, 128
)


def plan(*pools: Pool, shape: ModelShape = SHAPE, memory: int = 2**34, **settings):
    config = EngineConfig(pools=pools or (Pool(2, 2048),), **settings)
    return make_plan(shape, config, dtype="bfloat16", dtype_bytes=2, memory_limit=memory)


@given(length=st.integers(2, 5000), data=st.data(), buckets=st.sampled_from(["auto", (16, 64), (8,), (32, 64, 1024)]))
def test_chunks_cover_the_prompt_and_stay_inside_the_slot(length, data, buckets):
    pool = plan(Pool(1, length), prefill_buckets=buckets).pools[0]
    assert pool.positions >= length
    assert pool.positions % min(SHAPE.key_block, pool.positions) == 0
    count = data.draw(st.integers(0, length - 1))
    at = 0
    for chunk in pool.chunks(count):
        assert chunk.start == at
        assert 1 <= chunk.count <= chunk.bucket
        assert chunk.bucket in pool.buckets
        assert chunk.start + chunk.bucket <= pool.positions
        at += chunk.count
    assert at == count
    padding = sum(chunk.bucket - chunk.count for chunk in pool.chunks(count))
    assert padding < max(count, pool.buckets[0]) + 1


def test_chunks_by_hand():
    pool = plan(Pool(1, 2048)).pools[0]
    sizes = {count: [chunk.bucket for chunk in pool.chunks(count)] for count in (0, 1, 32, 33, 128, 130, 300, 1100)}
    assert sizes == {
        0: [],
        1: [32],
        32: [32],
        33: [32, 32],
        128: [128],
        130: [128, 32],
        300: [512],
        1100: [512, 512, 128],
    }


@given(st.integers(1, 300), st.data())
def test_a_text_that_is_read_again_is_all_there_and_its_prompt_as_before(prompt, data):
    pool = plan(Pool(2, 512)).pools[0]
    known = data.draw(st.integers(prompt, 512))
    chunks, own = pool.chunks_again(prompt, known), pool.chunks(prompt - 1)
    assert chunks[len(chunks) - len(own) :] == own
    assert all(chunk.start + chunk.bucket <= pool.positions for chunk in chunks)
    if known > prompt:
        read = {at for chunk in chunks for at in range(chunk.start, chunk.start + chunk.bucket)}
        assert read >= set(range(known))


def test_the_request_alone_decides_its_pool():
    pools = plan(Pool(4, 1024), Pool(1, 64), Pool(2, 256))
    assert [pools.pool_for(length) for length in (1, 64, 65, 256, 257, 1024, 1025)] == [1, 1, 2, 2, 0, 0, None]


def test_a_program_has_two_rows_at_least():
    assert [pool.rows for pool in plan(Pool(1, 64), Pool(3, 64)).pools] == [2, 3]


def test_the_bytes_are_those_of_the_arrays():
    family = family_of(TINY)
    planned = tiny_plan(family, (Pool(4, 128), Pool(1, 256)))
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract(family.rules, jnp.float32)))
    assert planned.weight_bytes == weights
    for pool in planned.pools:
        cache = jax.eval_shape(lambda pool=pool: family.empty_cache(pool.rows, pool.positions, jnp.dtype("float32")))
        assert planned.cache_bytes(pool) == sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))
        rest = jax.eval_shape(lambda pool=pool: empty_state(family.empty_cache(1, 32, jnp.float32), Autoregressive()))
        rows = RowTable(planned, pool).snapshot()
        exact = sum(leaf.nbytes for leaf in jax.tree.leaves(rows)) + pool.rows * (pool.positions + 3) * 4
        assert exact <= planned.state_bytes(pool) <= 3 * exact
        assert rest.tokens.dtype == jnp.int32


def test_it_lists_every_program():
    programs = plan(Pool(2, 64), Pool(1, 2048)).programs()
    assert [str(program) for program in programs] == [
        "prefill pool 0 bucket 32",
        "run pool 0",
        "scrub pool 0",
        "prefill pool 1 bucket 32",
        "prefill pool 1 bucket 128",
        "prefill pool 1 bucket 512",
        "run pool 1",
        "scrub pool 1",
    ]


def test_what_does_not_fit_is_refused_with_the_numbers():
    shape = dataclasses.replace(SHAPE, cache=(CacheShape(per_position=4096),))
    small = plan(Pool(8, 2048), shape=shape).total_bytes
    with pytest.raises(PlanError, match=r"needs .* GiB \(weights .* but .* 10% headroom .*: \d+ slots fewer would fit"):
        plan(Pool(8, 2048), shape=shape, memory=small)
    with pytest.raises(PlanError, match="no number of slots fits"):
        plan(Pool(1, 2048), memory=10_000)
    assert plan(Pool(8, 2048), shape=shape, memory=int(small / 0.89)).total_bytes == small


def test_wrong_shapes_are_named():
    with pytest.raises(PlanError, match="longer than the 1048576 positions"):
        plan(Pool(1, 2**20 + 1))
    with pytest.raises(PlanError, match="at least one"):
        plan(prefill_buckets=())
    with pytest.raises(PlanError, match="48 and 100"):
        plan(prefill_buckets=(48, 100))


def test_the_table_tells_everything():
    text = plan(Pool(2, 64)).describe()
    assert "cache, pool 2x64" in text
    assert "2 rows x 64 positions" in text
    assert "programs: 3" in text
