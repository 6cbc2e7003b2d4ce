"""Every byte of a device, and which of them are there more than once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.axes import MeshShape
from jaxserve.config import Pool
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.step import empty_state
from jaxserve.engine.rows import RowTable
from jaxserve.models.family import family_of
from jaxserve.plan import memory
from jaxserve.testing import TINY, tiny_plan
from tests.plan.toys import MIXED, planned


def test_kinds_add_up_the_largest_first():
    kinds = memory.weights_by_kind(MIXED, 2, MeshShape())
    assert sum(kinds.values()) == sum(weight.bytes(2) for weight in MIXED.weights)
    assert list(kinds.values()) == sorted(kinds.values(), reverse=True)
    assert next(iter(kinds)) == "embedding"


def test_a_device_holds_its_share_and_what_is_named():
    mesh = MeshShape(2, 2)
    each = sum(memory.weights_by_kind(MIXED, 2, mesh).values())
    unsplit = memory.unsplit_by_kind(MIXED, 2, mesh)
    whole = sum(weight.bytes(2) for weight in MIXED.weights)
    assert each == whole // 4 + sum(unsplit.values())
    assert set(unsplit) == {"side", "routers", "norms", "shared experts"}
    assert memory.unsplit_by_kind(MIXED, 2, MeshShape()) == {}


def test_rows_and_history_are_counted():
    family = family_of(TINY)
    plan = tiny_plan(family, (Pool(4, 128), Pool(1, 256)))
    for pool in plan.pools:
        rest = jax.eval_shape(lambda: empty_state(family.empty_cache(1, 32, jnp.float32), Autoregressive()))
        rows = RowTable(plan, pool).snapshot()
        exact = sum(leaf.nbytes for leaf in jax.tree.leaves(rows)) + pool.rows * (pool.positions + 3) * 4
        assert exact <= plan.state_bytes(pool) <= 3 * exact
        assert rest.tokens.dtype == jnp.int32


def test_the_workspace_holds_what_a_pass_adds_to_every_layer():
    pools = planned(Pool(2, 256)).pools
    plain = memory.workspace_bytes(MIXED, pools)
    layers = tuple(dataclasses.replace(layer, added=10_000) for layer in MIXED.cache)
    more = memory.workspace_bytes(dataclasses.replace(MIXED, cache=layers), pools)
    before = sum(layer.per_position for layer in MIXED.cache)
    assert more - plain == pools[0].buckets[-1] * (10_000 * len(layers) - before) * 4


def test_the_workspace_grows_with_what_a_program_reads():
    small, large = planned(Pool(2, 256)), planned(Pool(64, 4096))
    assert memory.workspace_bytes(MIXED, small.pools) < memory.workspace_bytes(MIXED, large.pools)
    plain, wide = (memory.workspace_bytes(MIXED, small.pools, width) for width in (1, 256))
    assert wide - plain >= 6 * small.pools[0].rows * 255 * MIXED.vocab_size * 4
