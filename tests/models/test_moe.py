"""Routers against their formulas, and a block of experts against the sum that it stands for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models.feed_forward import MLPConfig
from jaxserve.models.moe import (
    SIGMOID,
    SOFTMAX_CHOSEN,
    ExpertFiles,
    ExpertsConfig,
    RouterConfig,
    experts_from_hf,
    grouped_router_from_hf,
    route,
)
from jaxserve.models.passes import Pass
from jaxserve.models.weights import nest, params_of

E, D, F = 8, 16, 12
SCORES = jnp.asarray(np.random.default_rng(0).standard_normal((5, E)), jnp.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def chosen_by(rank, count):
    return np.argsort(-rank, axis=-1, kind="stable")[:, :count]


def test_softmax_over_all_then_the_largest():
    shares = np.exp(SCORES) / np.exp(SCORES).sum(-1, keepdims=True)
    best = np.take_along_axis(shares, chosen_by(shares, 3), -1)
    chosen, kept = route(SCORES, 3, RouterConfig(renormalise=False))
    np.testing.assert_array_equal(chosen, chosen_by(shares, 3))
    np.testing.assert_allclose(kept, best, rtol=1e-5)
    _, renormalised = route(SCORES, 3, RouterConfig(scale=2.0))
    np.testing.assert_allclose(renormalised, 2 * best / best.sum(-1, keepdims=True), rtol=1e-5)


def test_softmax_over_the_chosen_is_the_renormalised_one():
    chosen, kept = route(SCORES, 3, RouterConfig(SOFTMAX_CHOSEN))
    others = route(SCORES, 3, RouterConfig())
    np.testing.assert_array_equal(chosen, others[0])
    np.testing.assert_allclose(kept, others[1], rtol=1e-5)


def test_a_correction_counts_in_the_choice_only():
    router = RouterConfig(SIGMOID, renormalise=False, correction=True)
    correction = jnp.zeros(E).at[2].set(10.0)
    chosen, kept = route(SCORES, 2, router, correction)
    assert (chosen[:, 0] == 2).all()
    np.testing.assert_allclose(kept[:, 0], sigmoid(np.asarray(SCORES))[:, 2], rtol=1e-5)
    assert not (route(SCORES, 2, router)[0][:, 0] == 2).all()


def test_groups_are_ranked_by_their_two_best():
    router = RouterConfig(SIGMOID, scale=2.5, groups=4, chosen_groups=2)
    # Alone the best expert is in the third group; its sum is the smallest.
    scores = jnp.asarray([[0.5, 0.4, 0.3, 0.2, 0.6, -3.0, 0.1, 0.15]], jnp.float32)
    chosen, kept = route(scores, 3, router)
    assert chosen.tolist() == [[0, 1, 2]]
    assert float(kept.sum()) == pytest.approx(2.5)
    ungrouped, _ = route(scores, 3, dataclasses.replace(router, groups=1, chosen_groups=1))
    assert ungrouped.tolist() == [[4, 0, 1]]


def built(config, seed=0):
    module = config.build(D, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    for leaf in jax.tree.leaves(nnx.state(module), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        leaf[...] = jax.random.normal(jax.random.key(leaf[...].size), leaf[...].shape) / 3
    return module


def a_pass(real=None, t=4):
    return Pass(jnp.zeros(2, jnp.int32), jnp.ones((2, t, t), bool), None, 0, None, real, 128)


FULL = ExpertsConfig(E, 2, F, RouterConfig(), shared=MLPConfig(F, name="mlp.shared_expert"), shared_gate=True)


def test_the_shared_expert_is_weighed_by_its_gate():
    module, x = built(FULL), jax.random.normal(jax.random.key(1), (2, 4, D))
    plain = built(dataclasses.replace(FULL, shared=None, shared_gate=False))
    gate = jax.nn.sigmoid(x @ module.shared_gate.kernel[...].T)
    expected = plain(x, a_pass()) + gate * module.shared(x)
    np.testing.assert_allclose(module(x, a_pass()), expected, atol=1e-5)
    assert np.abs(expected - plain(x, a_pass()) - module.shared(x)).max() > 0.01


def test_padding_leaves_real_tokens_alone():
    module, x = built(FULL), jax.random.normal(jax.random.key(1), (2, 4, D))
    real = jnp.asarray([[True, True, True, False], [False] * 4])
    spoilt = jnp.where(real[..., None], x, jnp.nan)
    whole, found = module(x, a_pass()), module(spoilt, a_pass(real))
    np.testing.assert_array_equal(found[0, :3], whole[0, :3])


def as_module(config, tensors):
    leaves = {rule.param: jnp.asarray(rule.make(tensors, np.float32)) for rule in config.rules(D, "", "")}
    module = config.build(D, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, _ = nnx.split(module)
    return nnx.merge(graphdef, params_of(nest(leaves)["ffn"]))


def test_both_layouts_of_files_give_the_same_block():
    draw = np.random.default_rng(0)
    gate_up, down = (draw.standard_normal(shape).astype(np.float32) for shape in ((E, 2 * F, D), (E, D, F)))
    common = {"mlp.gate.weight": draw.standard_normal((E, D)).astype(np.float32)}
    joined = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    apart = {f"mlp.experts.{e}.gate_proj.weight": gate_up[e, :F] for e in range(E)}
    apart |= {f"mlp.experts.{e}.up_proj.weight": gate_up[e, F:] for e in range(E)}
    apart |= {f"mlp.experts.{e}.down_proj.weight": down[e] for e in range(E)}
    config, x = ExpertsConfig(E, 2, F), jnp.ones((2, 4, D))
    found = [as_module(config, common | tensors)(x, a_pass()) for tensors in (joined, apart)]
    np.testing.assert_array_equal(*found)
    apart["mlp.experts.3.up_proj.weight"], apart["mlp.experts.3.gate_proj.weight"] = (gate_up[3, :F], gate_up[3, F:])
    swapped = as_module(config, common | apart)
    assert not np.array_equal(swapped.gate_up[...], as_module(config, common | joined).gate_up[...])


def test_kernels_that_lie_across():
    draw = np.random.default_rng(0)
    gate_up, bias = draw.standard_normal((E, D, 2 * F)), draw.standard_normal((E, 2 * F))
    tensors = {
        "mlp.router.weight": draw.standard_normal((E, D)),
        "mlp.router.bias": draw.standard_normal(E),
        "mlp.experts.gate_up_proj": gate_up,
        "mlp.experts.gate_up_proj_bias": bias,
        "mlp.experts.down_proj": draw.standard_normal((E, F, D)),
        "mlp.experts.down_proj_bias": draw.standard_normal((E, D)),
    }
    router = RouterConfig(SOFTMAX_CHOSEN, bias=True, name="router")
    config = ExpertsConfig(E, 2, F, router, "clamped", bias=True, files=ExpertFiles(across=True))
    module = as_module(config, tensors)
    np.testing.assert_allclose(module.gate_up[3, 0, 5], gate_up[3, :, 10], rtol=1e-6)
    np.testing.assert_allclose(module.gate_up[3, 1, 5], gate_up[3, :, 11], rtol=1e-6)
    np.testing.assert_allclose(module.gate_up_bias[3, 1, 5], bias[3, 11], rtol=1e-6)
    np.testing.assert_allclose(module.down[3, 7, 5], tensors["mlp.experts.down_proj"][3, 5, 7], rtol=1e-6)


def test_an_exact_router_keeps_float32():
    config = ExpertsConfig(E, 2, F, RouterConfig(SIGMOID, correction=True, exact=True))
    module = config.build(D, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert module.router.kernel.dtype == module.router.correction.dtype == jnp.float32
    assert module.gate_up.dtype == jnp.bfloat16
    dtypes = {rule.param: rule.dtype for rule in config.rules(D, "", "")}
    assert dtypes["ffn.router.kernel"] == dtypes["ffn.router.correction"] == "float32"
    assert dtypes["ffn.gate_up"] is None


def test_rules_and_module_hold_the_same_leaves():
    config = dataclasses.replace(
        FULL, router=RouterConfig(SIGMOID, bias=True, correction=True, exact=True), bias=True, files=ExpertFiles()
    )
    state = nnx.state(config.build(D, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    held = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    assert held == {rule.param.removeprefix("ffn."): rule.shape for rule in config.rules(D, "", "")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": 9},
        {"chosen": 0},
        {"router": RouterConfig(groups=3)},
        {"router": RouterConfig(groups=2, chosen_groups=3)},
        {"router": RouterConfig(groups=4, chosen_groups=1), "chosen": 3},
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong):
    with pytest.raises(CheckpointError):
        dataclasses.replace(FULL, **wrong)


def test_the_common_fields():
    hf = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "routed_scaling_factor": 1.8}
    config = experts_from_hf(hf, grouped_router_from_hf(hf))
    assert (config.experts, config.chosen, config.ffn, config.router.scale) == (16, 4, 24, 1.8)
    assert config.router.exact
    with pytest.raises(CheckpointError, match="num_experts'"):
        experts_from_hf({}, RouterConfig())


# --- pools of experts -------------------------------------------------------------------------------------------------


def pooled(scores, correction, real, block, pool, chosen):
    """The experts of each token, one block after the other (LLaDA2.2's block routing)."""
    rank = sigmoid(scores.astype(np.float64)) + correction
    out = np.full((*real.shape, chosen), -1)
    for row in range(real.shape[0]):
        for start in range(0, real.shape[1], block):
            own = [at for at in range(start, min(start + block, real.shape[1])) if real[row, at]]
            best = [max(rank[row, at, expert] for at in own) if own else 0.0 for expert in range(rank.shape[-1])]
            admitted = sorted(range(rank.shape[-1]), key=lambda expert: (-best[expert], expert))[:pool]
            for at in own:
                out[row, at] = sorted(admitted, key=lambda expert: (-rank[row, at, expert], expert))[:chosen]
    return out


@pytest.mark.parametrize("length", [4, 16, 11])
def test_a_block_shares_a_pool_of_experts(length):
    draw = np.random.default_rng(length)
    scores = draw.standard_normal((3, length, 16)).astype(np.float32)
    correction = draw.standard_normal(16).astype(np.float32) * 0.1
    real = draw.random((3, length)) < 0.8
    router = RouterConfig(SIGMOID, correction=True, pool=5, block=4)
    flat = jnp.asarray(scores.reshape(-1, 16))
    chosen, weights = route(flat, 3, router, jnp.asarray(correction), jnp.asarray(real))
    expected = pooled(scores, correction, real, 4, 5, 3)
    found = np.asarray(chosen).reshape(expected.shape)
    np.testing.assert_array_equal(found[real], expected[real])
    shares = np.take_along_axis(sigmoid(scores), found, -1).reshape(-1, 3)
    np.testing.assert_allclose(weights, shares / shares.sum(-1, keepdims=True), rtol=1e-5)
    assert (pooled(scores, correction, real, 4, 16, 3)[real] != expected[real]).any()  # it does restrict
    assert (pooled(scores, correction, real, 3, 5, 3)[real] != expected[real]).any()
    assert (pooled(scores, correction, np.ones_like(real), 4, 5, 3)[real] != expected[real]).any()


def test_pools_that_cannot_be():
    for pool in (1, 9):
        with pytest.raises(CheckpointError, match="no pool"):
            ExpertsConfig(8, 2, F, RouterConfig(SIGMOID, pool=pool))
