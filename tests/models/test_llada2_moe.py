"""transformers has no LLaDA2, so its body is compared with one that is written out in numpy, name by name."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.decoding import Decoding
from jaxserve.models.llada2_moe import family
from tests.models import tiny_checkpoints as tiny

V, D, H, N, K, E, C, F = 61, 32, 8, 4, 2, 8, 3, 12
HF = {
    "model_type": "llada2_moe",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600_000,
    "partial_rotary_factor": 0.5,
    "use_qkv_bias": True,
    "use_bias": False,
    "num_experts": E,
    "num_experts_per_tok": C,
    "num_shared_experts": 1,
    "moe_intermediate_size": F,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}


def shapes():
    yield "model.word_embeddings.weight", (V, D)
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)
    for layer in range(2):
        of = f"model.layers.{layer}."
        yield f"{of}input_layernorm.weight", (D,)
        yield f"{of}post_attention_layernorm.weight", (D,)
        yield f"{of}attention.query_key_value.weight", ((N + 2 * K) * H, D)
        yield f"{of}attention.query_key_value.bias", ((N + 2 * K) * H,)
        yield f"{of}attention.dense.weight", (D, N * H)
        yield f"{of}attention.query_layernorm.weight", (H,)
        yield f"{of}attention.key_layernorm.weight", (H,)
        blocks = {"mlp.": 40} if layer == 0 else {"mlp.shared_experts.": F} | {f"mlp.experts.{e}.": F for e in range(E)}
        for block, inner in blocks.items():
            yield f"{of}{block}gate_proj.weight", (inner, D)
            yield f"{of}{block}up_proj.weight", (inner, D)
            yield f"{of}{block}down_proj.weight", (D, inner)
        if layer:
            yield f"{of}mlp.gate.weight", (E, D)
            yield f"{of}mlp.gate.expert_bias", (E,)


def checkpoint():
    draw = np.random.default_rng(0)
    norm = {name: name.endswith("norm.weight") for name, _ in shapes()}
    return {
        name: (norm[name] + draw.standard_normal(shape) * (0.2 if norm[name] else 0.4)).astype(np.float32)
        for name, shape in shapes()
    }


def written_out(w, tokens):
    """Logits, in float64."""
    w = {name: leaf.astype(np.float64) for name, leaf in w.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[name]

    def gated(x, of):
        gate = x @ w[f"{of}gate_proj.weight"].T
        return (gate / (1 + np.exp(-gate)) * (x @ w[f"{of}up_proj.weight"].T)) @ w[f"{of}down_proj.weight"].T

    t, r = len(tokens), H // 2
    angles = np.arange(t)[:, None] * 600_000.0 ** (-np.arange(0, r, 2) / r)
    cosine, sine = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def rotated(x):
        turned = np.concatenate([-x[..., r // 2 : r], x[..., : r // 2]], -1)
        return np.concatenate([x[..., :r] * cosine + turned * sine, x[..., r:]], -1)

    def attention(x, of):
        both = x @ w[f"{of}query_key_value.weight"].T + w[f"{of}query_key_value.bias"]
        q, k, v = np.split(both.reshape(t, -1, H), [N, N + K], axis=1)
        q, k = rotated(norm(q, f"{of}query_layernorm.weight")), rotated(norm(k, f"{of}key_layernorm.weight"))
        k, v = (np.repeat(part, N // K, axis=1) for part in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H) + np.triu(np.full((t, t), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", shares / shares.sum(-1, keepdims=True), v)
        return out.reshape(t, -1) @ w[f"{of}dense.weight"].T

    def experts(x, of):
        shares = 1 / (1 + np.exp(-x @ w[f"{of}gate.weight"].T))
        rank = (shares + w[f"{of}gate.expert_bias"]).reshape(t, 4, -1)
        best = np.argsort(-np.sort(rank, -1)[..., -2:].sum(-1), axis=-1)[:, :2]
        y = gated(x, f"{of}shared_experts.")
        for token in range(t):
            allowed = [group * 2 + at for group in best[token] for at in range(2)]
            taken = sorted(allowed, key=lambda e: -rank[token].reshape(-1)[e])[:C]
            total = shares[token, taken].sum()
            for e in taken:
                y[token] += 2.5 * shares[token, e] / total * gated(x[token], f"{of}experts.{e}.")
        return y

    x = w["model.word_embeddings.weight"][tokens]
    for layer in range(2):
        of = f"model.layers.{layer}."
        x = x + attention(norm(x, f"{of}input_layernorm.weight"), f"{of}attention.")
        inner = norm(x, f"{of}post_attention_layernorm.weight")
        x = x + (experts(inner, f"{of}mlp.") if layer else gated(inner, f"{of}mlp."))
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def logits(fields, tensors, tokens):
    own = family(HF | fields)
    given = jnp.asarray(tokens, jnp.int32)[None]
    return np.asarray(jitted.logits(own.graphdef(jnp.float32), tiny.params(own, tensors), given))[0]


def test_its_body_is_the_one_written_out():
    tensors, tokens = checkpoint(), np.random.default_rng(1).integers(0, V, 24)
    expected = written_out(tensors, tokens)
    assert np.abs(logits({}, tensors, tokens) - expected).max() < 1e-4
    for wrong in ({"n_group": 1, "topk_group": 1}, {"partial_rotary_factor": 1.0}):
        assert np.abs(logits(wrong, tensors, tokens) - expected).max() > 1e-2, wrong


def test_every_tensor_is_used():
    own = family(HF)
    sources = {piece.source for rule in own.rules for piece in rule.pieces(dict(shapes()))}
    assert sources == {name for name, _ in shapes()}


def test_defaults_and_refusals():
    bare = {name: value for name, value in HF.items() if not name.startswith(("use_", "n_group", "topk", "routed"))}
    config = family(bare).config
    assert config.layers[0].mixer.output_bias
    assert not config.layers[0].mixer.bias
    assert (config.layers[1].ffn.router.groups, config.layers[1].ffn.router.scale) == (8, 2.5)
    assert not family(HF | {"num_experts_per_tok": 1}).config.layers[1].ffn.router.renormalise
    with pytest.raises(CheckpointError, match="score_function"):
        family(HF | {"score_function": "softmax"})


def test_how_each_version_decodes():
    whole = HF | {"vocab_size": 157_184, "max_position_embeddings": 16_384}
    assert family(HF).decoding is None  # a vocabulary without the mask
    assert family(whole).decoding == Decoding("block", 32, 156_895, threshold=0.95, denoising_steps=32)
    later = family(whole | {"max_position_embeddings": 32_768}).decoding
    assert (later.threshold, later.edit_threshold, later.post_steps) == (0.7, 0.5, 16)
    fields = {"delete_token_id": 156_930, "split_token_id": 156_931, "block_size": 32, "expert_capacity": 6}
    last = family(whole | fields)
    assert (last.decoding.rule, last.decoding.delete_id, last.decoding.insert_id) == ("levenshtein", 156_930, 156_931)
    router = last.config.layers[1].ffn.router
    assert (router.pool, router.block, router.groups) == (6, 32, 1)


def test_a_pool_of_experts_goes_through_the_whole_body():
    """Of a block's tokens each has a say in the others' experts, and no token of another block has."""
    tensors, tokens = checkpoint(), np.random.default_rng(1).integers(0, V, 16)
    other = tokens.copy()
    other[12:] = (tokens[12:] + 7) % V  # behind the positions compared, and unseen by them
    pool = {"expert_capacity": 3, "block_size": 8}
    tensors["model.layers.1.mlp.gate.expert_bias"] *= 0  # so that tokens have a say
    first, second = (logits(pool, tensors, text) for text in (tokens, other))
    np.testing.assert_array_equal(first[:8], second[:8])
    assert np.abs(first[8:12] - second[8:12]).max() > 1e-2
    plain = logits({"n_group": 1, "topk_group": 1}, tensors, tokens)
    assert np.abs(first - plain).max() > 1e-2
