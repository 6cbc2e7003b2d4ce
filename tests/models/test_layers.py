from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.layers import GatedMLP, Linear, RMSNorm


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_linear_contracts_the_axes_it_names():
    layer = Linear((3, 4), (5,), bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.asarray(array(5))
    x = array(2, 7, 3, 4, seed=1)
    expected = np.einsum("btnh,nhd->btd", x, np.asarray(layer.kernel[...])) + array(5)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-5)


def test_rms_norm_casts_before_it_scales():
    norm = RMSNorm(64, eps=1e-5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.full(64, 1.01, jnp.bfloat16)
    x = jnp.asarray(array(1, 1, 64), jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    rounded = jnp.asarray(normal, jnp.bfloat16) * norm.scale[...]
    np.testing.assert_array_equal(norm(x), rounded)
    assert (np.asarray(rounded) != np.asarray(jnp.asarray(normal * 1.0078125, jnp.bfloat16))).any()  # the other order


def test_gated_mlp():
    mlp = GatedMLP(6, 8, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = array(1, 2, 6)
    gate, up, down = (np.asarray(part.kernel[...]) for part in (mlp.gate, mlp.up, mlp.down))
    hidden = (x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden @ down, atol=1e-5)
