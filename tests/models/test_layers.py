from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models import layers
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.layers import Linear, Norm, RMSNorm


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_linear_contracts_the_axes_it_names():
    layer = Linear((3, 4), (5,), bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.asarray(array(5))
    x = array(2, 7, 3, 4, seed=1)
    expected = np.einsum("btnh,dnh->btd", x, np.asarray(layer.kernel[...])) + array(5)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-5)


def test_rms_norm_casts_before_it_scales():
    norm = RMSNorm(64, Norm(1e-5), dtype=jnp.bfloat16)
    norm.scale[...] = jnp.full(64, 1.01, jnp.bfloat16)
    x = jnp.asarray(array(1, 1, 64), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    rounded = jnp.asarray(normal, jnp.bfloat16) * norm.scale[...]
    np.testing.assert_array_equal(norm(x), rounded)
    assert (np.asarray(rounded) != np.asarray(jnp.asarray(normal * 1.0078125, jnp.bfloat16))).any()  # the other order


def test_a_wide_norm_scales_before_it_casts_and_adds_its_offset():
    x, scale = jnp.asarray(array(1, 1, 64), jnp.bfloat16), jnp.full(64, 0.01, jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    expected = jnp.asarray(normal * (1 + np.float32(scale[0])), jnp.bfloat16)
    np.testing.assert_array_equal(Norm(1e-5, offset=1.0, wide=True)(x, scale), expected)
    assert float(RMSNorm(4, Norm(1e-5, offset=1.0, wide=True), dtype=jnp.float32).scale[...].sum()) == 0


def test_gated_mlp():
    mlp = MLPConfig(8).build(6, dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = array(1, 2, 6)
    (gate, up), down = (np.asarray(part.kernel[...]) for part in (mlp.gate_up, mlp.down))
    hidden = (x @ gate.T) / (1 + np.exp(-(x @ gate.T))) * (x @ up.T)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ down.T, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, layers.FEW_ROWS, layers.FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_the_same_on_both_sides_of_the_switch(rows, dtype):
    x, weights = jnp.asarray(array(rows, 96), dtype), jnp.asarray(array(80, 96, seed=1), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    found = layers.product(x, weights, jnp.float32)
    assert (found.dtype, found.shape) == (jnp.float32, (rows, 80))
    np.testing.assert_allclose(found, exact, atol=1e-3 if dtype == jnp.float32 else 0.2, rtol=1e-2)
    assert layers.product(x, weights, dtype).dtype == dtype
