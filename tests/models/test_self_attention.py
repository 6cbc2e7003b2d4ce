"""The switches of self-attention that no other test isolates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.passes import Pass
from jaxserve.models.self_attention import AttentionConfig
from jaxserve.models.weights import nest, params_of

WIDTH, HEADS, KEY_HEADS, SIZE, T = 6, 4, 2, 3, 5


def config(**changes) -> AttentionConfig:
    return AttentionConfig(heads=HEADS, kv_heads=KEY_HEADS, head_size=SIZE, rope=None, scale=SIZE**-0.5, **changes)


def tensors(gate: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    rows = {"q": HEADS * SIZE * (2 if gate else 1), "k": KEY_HEADS * SIZE, "v": KEY_HEADS * SIZE}
    made = {f"self_attn.{name}_proj.weight": random.normal(size=(count, WIDTH)) for name, count in rows.items()}
    return made | {"self_attn.o_proj.weight": random.normal(size=(WIDTH, HEADS * SIZE))}


def mixed(own: AttentionConfig, weights: dict[str, np.ndarray]) -> np.ndarray:
    leaves = {rule.param.removeprefix("mixer."): rule.make(weights, np.float32) for rule in own.rules(WIDTH, "", "")}
    module = own.build(WIDTH, dtype=jnp.float32, rngs=nnx.Rngs(0))
    nnx.update(module, params_of(nest({name: jnp.asarray(leaf) for name, leaf in leaves.items()})))
    run = Pass(jnp.zeros(1, jnp.int32), jnp.tril(jnp.ones((1, T, T), bool)), None, 0, None, None, 16)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, T, WIDTH)), jnp.float32)
    return np.asarray(jax.jit(lambda x: module(x, run, 0)[0])(x))


def test_a_gate_is_a_second_part_of_each_heads_query():
    """Gates of weight zero let a half of everything through; in the query's place they would not."""
    gated, plain = tensors(gate=True), tensors(gate=False)
    query = plain["self_attn.q_proj.weight"].reshape(HEADS, 1, SIZE, WIDTH)
    for name in ("k", "v", "o"):
        gated[f"self_attn.{name}_proj.weight"] = plain[f"self_attn.{name}_proj.weight"]
    gated["self_attn.q_proj.weight"] = np.concatenate([query, 0 * query], axis=1).reshape(-1, WIDTH)
    np.testing.assert_allclose(2 * mixed(config(gate=True), gated), mixed(config(), plain), rtol=1e-5)
    gated["self_attn.q_proj.weight"] = np.concatenate([0 * query, query], axis=1).reshape(-1, WIDTH)
    assert np.abs(2 * mixed(config(gate=True), gated) - mixed(config(), plain)).max() > 0.1


def test_each_head_has_its_own_gate():
    weights, head = tensors(gate=True), 2
    rows = weights["self_attn.q_proj.weight"].reshape(HEADS, 2, SIZE, WIDTH).copy()
    rows[head, 1] = 0
    changed = weights | {"self_attn.q_proj.weight": rows.reshape(-1, WIDTH)}
    assert np.abs(mixed(config(gate=True), changed) - mixed(config(gate=True), weights)).max() > 1e-3
    others = weights["self_attn.o_proj.weight"].reshape(WIDTH, HEADS, SIZE).copy()
    others[:, head] = 0
    without = {"self_attn.o_proj.weight": others.reshape(WIDTH, -1)}
    kept = (mixed(config(gate=True), one | without) for one in (changed, weights))
    np.testing.assert_allclose(*kept, atol=1e-6)


def test_parts_of_the_joined_product():
    assert config().parts == (2, 0, 1, 1)
    assert config(gate=True).parts == (2, 2, 1, 1)
    assert config(keys_are_values=True).parts == (2, 0, 1, 0)
    assert config(shares=0).parts == (2, 0, 0, 0)
