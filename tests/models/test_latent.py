"""Latent attention in its absorbed form against the expanded one, written out in numpy on the tensors of a file."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models.cache import Cache, write
from jaxserve.models.latent import LatentConfig, latent_from_hf
from jaxserve.models.passes import Pass
from jaxserve.models.weights import nest, params_of

D, T, B = 32, 21, 2
HF = {
    "num_attention_heads": 3,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "rms_norm_eps": 0.5,  # of the layers' norms, not of the latents'
}


def tensors(hf: dict[str, object], seed: int = 0) -> dict[str, np.ndarray]:
    """A layer as a file holds it."""
    config, rng = latent_from_hf(hf), np.random.default_rng(seed)
    n, both = config.heads, config.plain + config.rotary
    shapes = {
        "kv_a_proj_with_mqa": (config.latent + config.rotary, D),
        "kv_a_layernorm": (config.latent,),
        "kv_b_proj": (n * (config.plain + config.value), config.latent),
        "o_proj": (D, n * config.value),
    }
    if config.query_latent is None:
        shapes["q_proj"] = (n * both, D)
    else:
        shapes |= {
            "q_a_proj": (config.query_latent, D),
            "q_a_layernorm": (config.query_latent,),
            "q_b_proj": (n * both, config.query_latent),
        }
    drawn = {name: rng.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    return {f"x.self_attn.{name}.weight": 1 + leaf if name.endswith("norm") else leaf for name, leaf in drawn.items()}


def params(config: LatentConfig, files: dict[str, np.ndarray]) -> dict[object, object]:
    made = {rule.param: jnp.asarray(rule.make(files, np.float32)) for rule in config.rules(D, "", "x.")}
    return params_of(nest({name.removeprefix("mixer."): leaf for name, leaf in made.items()}))


def causal(t: int, b: int = B) -> jax.Array:
    return jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))


def run(config: LatentConfig, files: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The whole-sequence pass."""
    model = config.build(D, dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph = nnx.split(model)[0]
    start = jnp.zeros(len(x), jnp.int32)
    return np.asarray(
        jax.jit(
            lambda params, x: nnx.merge(graph, params)(
                x, Pass(start, causal(x.shape[1], len(x)), None, 0, None, None, 16), 0
            )[0]
        )(params(config, files), x)
    )


def plain(config: LatentConfig, files: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Keys and values of every head made out; the pairs (2i, 2i + 1) turn as complex numbers."""
    weights = {name.split(".")[2]: leaf.astype(np.float64) for name, leaf in files.items()}

    def norm(y: np.ndarray, name: str) -> np.ndarray:
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weights[name]

    def turned(y: np.ndarray) -> np.ndarray:
        pairs = y[..., ::2] + 1j * y[..., 1::2]
        angles = np.arange(T)[:, None] * np.asarray(config.rope.frequencies)
        pairs = pairs * np.exp(1j * angles)[:, None] * config.rope.scale
        return np.stack([pairs.real, pairs.imag], -1).reshape(y.shape)

    out = []
    for row in x.astype(np.float64):
        narrow = row if config.query_latent is None else norm(row @ weights["q_a_proj"].T, "q_a_layernorm")
        q = narrow @ weights["q_proj" if config.query_latent is None else "q_b_proj"].T
        q = q.reshape(T, config.heads, -1)
        both = row @ weights["kv_a_proj_with_mqa"].T
        kv = norm(both[:, : config.latent], "kv_a_layernorm") @ weights["kv_b_proj"].T
        kv = kv.reshape(T, config.heads, -1)
        key = np.broadcast_to(turned(both[:, None, config.latent :]), (T, config.heads, config.rotary))
        k = np.concatenate([kv[..., : config.plain], key], -1)
        q = np.concatenate([q[..., : config.plain], turned(q[..., config.plain :])], -1)
        scores = np.einsum("tnh,snh->nts", q, k) * config.scale
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("nts,snv->tnv", shares, kv[..., config.plain :])
        out.append(mixed.reshape(T, -1) @ weights["o_proj"].T)
    return np.stack(out)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(B, T, D)).astype(np.float32)


@pytest.mark.parametrize("rank", [14, None])
def test_absorbed_is_expanded(x, rank):
    config, files = latent_from_hf(HF | {"q_lora_rank": rank}), tensors(HF | {"q_lora_rank": rank})
    expected = plain(config, files, x)
    np.testing.assert_allclose(run(config, files, x), expected, atol=2e-5)
    mistakes = {
        "halves turn": dataclasses.replace(config, interleaved=False),
        "no mscale": dataclasses.replace(config, scale=18**-0.5),
        "mscale once": dataclasses.replace(config, scale=(18**-0.5 * config.scale) ** 0.5),
        "another rope": dataclasses.replace(config, rope=latent_from_hf(HF | {"rope_scaling": None}).rope),
    }
    for name, wrong in mistakes.items():
        assert np.abs(run(wrong, files, x) - expected).max() > 1e-3, name


def test_where_halves_turn_rows_stay_in_order():
    """The same numbers, if a file holds the rows in the order in which they are put here."""
    files, config = tensors(HF), latent_from_hf(HF)
    order = np.r_[0:8:2, 1:8:2]
    halves = dict(files)
    q = files["x.self_attn.q_b_proj.weight"].reshape(3, 18, -1).copy()
    q[:, 10:] = q[:, 10:][:, order]
    kv = files["x.self_attn.kv_a_proj_with_mqa.weight"].copy()
    kv[20:] = kv[20:][order]
    halves["x.self_attn.q_b_proj.weight"], halves["x.self_attn.kv_a_proj_with_mqa.weight"] = q.reshape(54, -1), kv
    other = latent_from_hf(HF | {"rope_interleave": False})
    one, two = params(config, files), params(other, halves)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_cached_passes_give_the_whole_pass(x):
    """Chunks of any size and single tokens, rows at different places: the latents of the prefix are enough."""
    config, files = latent_from_hf(HF), tensors(HF)
    expected = run(config, files, x)
    graph, leaves = nnx.split(config.build(D, dtype=jnp.float32, rngs=nnx.Rngs(0)))[0], params(config, files)

    @jax.jit
    def passed(cache, part, start):
        at = jnp.full(B, start)
        run = Pass(at, causal(part.shape[1]), cache, 0, None, None, 16)
        y, fresh = nnx.merge(graph, leaves)(part, run, 0)
        return y, write(cache, (fresh,), 0, at, jnp.full(B, part.shape[1]))

    for sizes in ((16, 4, 1), (1, 4, 16), (4, 1, 16)):
        cache, start = Cache((config.empty(B, 32, jnp.float32, 16),), 32, B), 0
        assert cache.layers[0].k.shape == (B, 1, 32, 28)
        assert config.cache_shape(16).bytes(32, 4) == cache.layers[0].k.nbytes // B
        for size in sizes:
            y, cache = passed(cache, x[:, start : start + size], jnp.int32(start))
            np.testing.assert_allclose(y, expected[:, start : start + size], atol=2e-5)
            start += size


def test_the_scale_is_stretched_twice():
    """``(0.1 m ln(factor) + 1)²``, m = mscale_all_dim; cosine and sine have a factor of their own."""
    stretch = 0.1 * 0.7 * math.log(8.0) + 1
    config = latent_from_hf(HF)
    assert config.scale == pytest.approx(18**-0.5 * stretch**2)
    assert config.rope.scale == pytest.approx((0.1 * math.log(8.0) + 1) / stretch)
    assert latent_from_hf(HF | {"rope_scaling": None}).scale == pytest.approx(18**-0.5)
    new = HF | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mscale_all_dim": 1.0, "factor": 4}}
    assert latent_from_hf(new).scale == pytest.approx(18**-0.5)


def test_biases_are_refused():
    with pytest.raises(CheckpointError, match="biases of latent attention"):
        latent_from_hf(HF | {"attention_bias": True})
