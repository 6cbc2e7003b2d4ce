from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.weights import nest, params_of

D, F = 6, 8


def tensors(*, bias: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    found = {f"l.mlp.{name}.weight": random.normal(size=shape) for name, shape in shapes.items()}
    if bias:
        found |= {f"l.mlp.{name}.bias": random.normal(size=shape[0]) for name, shape in shapes.items()}
    return {name: value.astype(np.float32) for name, value in found.items()}


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_what_its_weights_in_files_say(bias):
    config, files = MLPConfig(F, bias=bias), tensors(bias=bias)
    leaves = {one.param: jnp.asarray(one.make(files, np.float32)) for one in config.rules(D, "", "l.")}
    module = config.build(D, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    assert jax.tree.structure(nnx.to_pure_dict(state)) == jax.tree.structure(params_of(nest(leaves))["ffn"])
    module = nnx.merge(graphdef, params_of(nest(leaves))["ffn"])
    x = np.random.default_rng(1).normal(size=(1, 3, D)).astype(np.float32)
    gate, up = (
        x @ files[f"l.mlp.{name}.weight"].T + files.get(f"l.mlp.{name}.bias", 0) for name in ("gate_proj", "up_proj")
    )
    hidden = gate / (1 + np.exp(-gate)) * up
    expected = hidden @ files["l.mlp.down_proj.weight"].T + files.get("l.mlp.down_proj.bias", 0)
    np.testing.assert_allclose(module(jnp.asarray(x)), expected, atol=1e-5)
    swapped = up / (1 + np.exp(-up)) * gate
    assert np.abs(swapped - hidden).max() > 0.1  # the other order would show


def test_its_place_in_files_has_a_name():
    (first, *_) = MLPConfig(F, name="mlp.shared_experts").rules(D, "layers.0.", "model.layers.0.")
    assert first.ways[0][0].source == "model.layers.0.mlp.shared_experts.gate_proj.weight"
    assert first.param == "layers.0.ffn.gate_up.kernel"
