"""What a model is made of, by kind and in bytes; the bytes are those of the arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.axes import MeshShape
from jaxserve.config import Pool
from jaxserve.models.family import family_of
from jaxserve.models.weights import abstract
from jaxserve.plan import CacheShape
from jaxserve.testing import TINY, tiny_plan
from tests.plan.toys import MIXED


def test_the_bytes_are_those_of_the_arrays():
    family = family_of(TINY)
    plan = tiny_plan(family, (Pool(4, 128), Pool(1, 256)))
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(abstract(family.rules, jnp.float32)))
    assert plan.weight_bytes == weights
    for pool in plan.pools:
        cache = jax.eval_shape(lambda pool=pool: family.empty_cache(pool.rows, pool.positions, jnp.dtype("float32")))
        assert plan.cache_bytes(pool) == sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))


def test_each_weight_is_of_a_kind():
    assert {weight.param: MIXED.kind(weight) for weight in MIXED.weights} == {
        "embedding": "embedding",
        "norm.scale": "norms",
        "head": "head",
        "side.table": "side",
        "layers.0.mixer_norm.scale": "norms",
        "layers.0.mixer.qkv.kernel": "attention",
        "layers.0.mixer.q_norm.scale": "norms",
        "layers.0.ffn.gate_up.kernel": "feed-forward",
        "layers.1.mixer.in.kernel": "recurrent",
        "layers.1.mixer.decay": "recurrent",
        "layers.1.ffn.gate_up": "experts",
        "layers.1.ffn.down": "experts",
        "layers.1.ffn.router.kernel": "routers",
        "layers.1.ffn.shared.down.kernel": "shared experts",
        "layers.1.ffn.shared_gate.kernel": "shared experts",
    }


@pytest.mark.parametrize(("mesh", "parts"), [(MeshShape(), 1), (MeshShape(1, 2), 2), (MeshShape(2, 1), 2)])
def test_a_device_holds_its_part(mesh, parts):
    embedding = MIXED.weights[0]
    assert embedding.bytes(2, mesh) == 1000 * 64 * 2 // parts
    router = MIXED.weights[12]
    assert router.bytes(2, mesh) == 8 * 64 * 4  # float32 whatever the model's dtype, and whole


def test_what_a_layer_keeps():
    assert CacheShape(per_position=8, most=100).bytes(1000, 2) == 1600
    assert CacheShape(per_position=8, most=100).bytes(10, 2) == 160
    assert CacheShape(fixed=10, fixed_float32=20).bytes(1000, 2) == 100
    assert CacheShape(per_position=8, heads=4).bytes(10, 2, MeshShape(2, 2)) == 40
    assert CacheShape(per_position=8, heads=3).bytes(10, 2, MeshShape(2, 2)) == 160
