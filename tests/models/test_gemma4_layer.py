from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.gemma4_layer import ConditioningConfig, LayerInputsConfig, ScaledExpertsConfig
from jaxserve.models.layers import Norm
from jaxserve.testing import random_leaves
from tests.models import tiny_checkpoints as tiny
from tests.models.every_pass import whole

NORM = Norm(1e-6, wide=True)
EXPERTS = ScaledExpertsConfig(experts=6, chosen=2, ffn=12, activation="gelu_tanh", norm=NORM)


def normal(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def test_the_router_weighs_by_scales_of_inputs_and_of_experts():
    module = EXPERTS.build(16, dtype=jnp.float32, rngs=nnx.Rngs(0)).router
    rng = np.random.default_rng(0)
    x, scale, own = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 16), 16, 6))
    module.scale[...], module.expert_scale[...] = jnp.asarray(scale), jnp.asarray(own)
    chosen, weights = module(jnp.asarray(x))
    scores = normal(x) * scale / 4 @ np.asarray(module.kernel[...]).T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    for row, (experts, found) in enumerate(zip(np.asarray(chosen), np.asarray(weights), strict=True)):
        assert experts.tolist() == np.argsort(-shares[row])[:2].tolist()
        picked = shares[row, experts]
        np.testing.assert_allclose(found, picked / picked.sum() * own[experts], rtol=1e-5)


def test_layers_inputs_are_made_of_the_token_and_of_its_embedding():
    config = LayerInputsConfig(rows=11, layers=3, size=4, norm=NORM)
    module = config.build(16, dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = jnp.asarray([[3, 7], [10, 0]])
    x = jax.random.normal(jax.random.key(1), (2, 2, 16))
    found = module(tokens, x)
    assert found.shape == (2, 2, 3, 4)
    own = np.asarray(module.table[...])[np.asarray(tokens)].reshape(2, 2, 3, 4) * 2
    projected = normal((np.asarray(x) @ np.asarray(module.project.kernel[...]).T / 4).reshape(2, 2, 3, 4))
    np.testing.assert_allclose(found, (own + projected) / np.sqrt(2), atol=1e-5)


def test_a_canvas_is_told_what_the_pass_before_made_of_it():
    config = ConditioningConfig(MLPConfig(12, "gelu_tanh", name="self_conditioning"), NORM)
    module = config.build(16, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x, soft = (jax.random.normal(jax.random.key(seed), (2, 3, 16)) for seed in (1, 2))
    np.testing.assert_allclose(module(x, jnp.zeros_like(x)), normal(np.asarray(x)), atol=1e-5)
    module.norm.scale[...] = jnp.full(16, 2.0)
    gate, up = (normal(np.asarray(soft)) * 2 @ np.asarray(half).T for half in module.ffn.gate_up.kernel[...])
    added = np.asarray(jax.nn.gelu(gate)) * up @ np.asarray(module.ffn.down.kernel[...]).T
    np.testing.assert_allclose(module(x, soft), normal(np.asarray(x) + added), atol=1e-5)
    sources = {rule.param: rule.pieces(())[0].source for rule in config.rules(16, "conditioning.", "model.")}
    assert sources["conditioning.norm.scale"] == "model.self_conditioning.pre_norm.weight"
    assert sources["conditioning.ffn.down.kernel"] == "model.self_conditioning.down_proj.weight"


# What each part is for, seen by what happens without it; the goldens are another engine's.
MISTAKES = {
    "norm of the dense part": ("gemma4_moe", "post_feedforward_layernorm_1.weight", np.ones_like),
    "norm before the experts": ("gemma4_moe", "pre_feedforward_layernorm_2.weight", np.ones_like),
    "norm behind the experts": ("gemma4_moe", "post_feedforward_layernorm_2.weight", np.ones_like),
    "gate of layers' embeddings": ("gemma4_ple", "per_layer_input_gate.weight", np.zeros_like),
    "norm behind layers' embeddings": ("gemma4_ple", "post_per_layer_input_norm.weight", np.ones_like),
}


@pytest.mark.reference
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_show(mistake):
    case, name, change = MISTAKES[mistake]
    family, _ = tiny.load(case)
    tensors, golden = tiny.tensors(case), tiny.goldens(case)
    changed = {key: change(tensor) if key.endswith(name) else tensor for key, tensor in tensors.items()}
    assert any(key.endswith(name) for key in tensors)
    logits = whole(family, tiny.params(family, changed), golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() > 1e-3


def test_rows_that_do_not_matter_change_nothing_in_the_others():
    """Bit for bit, whatever stands in them: the cost of experts is spent on real tokens."""
    from jaxserve.models.passes import Pass
    from jaxserve.models.weights import nest, params_of

    class Owner:
        rules = EXPERTS.rules(16, "", "")

    module = EXPERTS.build(16, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, _ = nnx.split(module)
    params = params_of(nest(random_leaves(Owner)))["experts"]
    x = jax.random.normal(jax.random.key(0), (1, 12, 16))
    real = jnp.arange(12) < 5
    mask = jnp.ones((1, 12, 12), bool)

    def out(x, real):
        return nnx.merge(graphdef, params)(x, Pass(jnp.zeros(1, jnp.int32), mask, None, 0, None, real, 16))

    first = out(x, real[None])[0, :5]
    other = jnp.where(real[None, :, None], x, 1e3)
    assert (np.asarray(first) == np.asarray(out(other, real[None])[0, :5])).all()
    np.testing.assert_allclose(first, out(x, None)[0, :5], atol=1e-5)
