from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.models import gemma4_text
from jaxserve.models.cache import write
from jaxserve.models.diffusion_gemma import family
from jaxserve.models.family import family_of
from jaxserve.models.passes import Canvas, Pass
from tests.models import tiny_checkpoints as tiny
from tests.models.test_gemma4_text import HF as GEMMA4

TEXT = {
    name: value for name, value in GEMMA4.items() if name not in ("attention_k_eq_v", "hidden_size_per_layer_input")
}
TEXT |= {"model_type": "diffusion_gemma_text", "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 8}
HF = {"model_type": "diffusion_gemma", "text_config": TEXT, "vision_config": {}, "tie_word_embeddings": True}
# DiffusionGemma-26B-A4B without its eyes (google-deepmind/gemma, ``Gemma4_26B_A4B``).
PUBLISHED = {
    "model_type": "diffusion_gemma",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "sliding_window": 1024,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}
TOLERANCE = 1e-4
CASE, SIZE, PREFIX = "diffusion_gemma", 20, 53


def test_it_is_gemma4_that_refines_canvases():
    found = family_of(HF)
    text = GEMMA4 | TEXT | {"model_type": "gemma4_text", "enable_moe_block": True, "final_logit_softcapping": 30.0}
    plain = gemma4_text.family(text).config
    assert [layer.mixer for layer in found.config.layers] == [layer.mixer for layer in plain.layers]
    assert {layer.refines for layer in found.config.layers} == {True}
    assert found.config.layers[5].mixer.keys_are_values
    assert (found.config.softcap, found.config.tied, found.config.side) == (30.0, True, None)
    assert found.config.conditioning.block.ffn == 40
    assert (found.decoding.kind, found.decoding.block, found.decoding.read) == ("canvas", 256, 1)
    assert family(HF | {"canvas_length": 64}).decoding.block == 64


def test_the_published_size():
    shape = family_of(PUBLISHED).shape
    assert shape.parameters == pytest.approx(25.2e9, rel=5e-3)
    experts = (weight.numbers for weight in shape.weights if weight.param.endswith(("experts.gate_up", "experts.down")))
    idle = sum(experts) * 120 // 128
    assert shape.parameters - idle == pytest.approx(3.8e9, rel=0.02)
    assert sum(layer.most is None for layer in shape.cache) == 5


def test_weights_are_stored_with_the_decoder():
    found = family(HF)
    sources = {rule.param: rule.ways[0][0].source for rule in found.rules}
    assert sources["layers.3.scale"] == "model.encoder.language_model.layers.3.layer_scalar"
    assert sources["layers.3.canvas_scale"] == "model.decoder.layers.3.layer_scalar"
    assert sources["embedding"] == "model.decoder.embed_tokens.weight"
    assert sources["conditioning.norm.scale"] == "model.decoder.self_conditioning.pre_norm.weight"
    for other in ("encoder.vision_tower.a", "encoder.embed_vision.b", "encoder.language_model.layers.0.mlp.c"):
        assert f"model.{other}".startswith(found.ignored)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"canvas_length": 0}, "canvas_length"),
        ({"canvas_length": True}, "canvas_length"),
        ({"canvas_length": 1 << 20}, "canvas_length"),
        ({"tie_word_embeddings": False}, "weights of their own"),
        ({"text_config": TEXT | {"use_bidirectional_attention": "all"}}, "later tokens"),
        ({"text_config": TEXT | {"num_experts": None}}, "num_experts"),
        ({"text_config": None}, "TypeError"),
    ],
)
def test_what_the_family_does_not_have_is_refused(wrong, named):
    with pytest.raises(CheckpointError, match=named):
        family_of(HF | wrong)


# --- the canvas's own passes, against transformers --------------------------------------------------------------------


@cache
def model():
    own, params = tiny.load(CASE)
    return own.graphdef(jnp.float32), params, own.empty_cache(2, 128, jnp.float32)


@partial(jax.jit, static_argnames="graphdef")
def _read(graphdef, params, cache, tokens, count):
    """The prompts in the cache, padded."""
    t, start = tokens.shape[1], jnp.zeros(len(tokens), jnp.int32)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (len(tokens), t, t))
    return write(cache, nnx.merge(graphdef, params)(tokens, start, mask, cache)[1], 0, start, count)


@partial(jax.jit, static_argnames="graphdef")
def _refine(graphdef, params, cache, start, tokens, mask, canvas):
    """Logits, and what they look like to the next pass."""
    decoder = nnx.merge(graphdef, params)
    logits = decoder.logits(decoder(tokens, start, mask, cache, canvas=canvas)[0])
    return logits, decoder.mixed(jax.nn.softmax(logits))


@cache
def prompts():
    """One prompt shorter than a window, and one longer; and both in the cache."""
    graphdef, params, empty = model()
    counts = jnp.array([7, PREFIX], jnp.int32)
    tokens = jnp.broadcast_to(tiny.goldens(CASE)["prompt"][:PREFIX], (2, PREFIX))
    return counts, _read(graphdef, params, empty, tokens, counts)


def passes(params=None, *, causal=False, refined=True, deaf=False, jit=_refine):
    """Logits of a canvas's first and second pass over both prompts."""
    graphdef, own, _ = model()
    params = own if params is None else params
    counts, cached = prompts()
    tokens = jnp.broadcast_to(tiny.goldens(CASE)["canvas"], (2, SIZE))
    mask = jnp.ones((2, SIZE, SIZE), bool)
    mask = jnp.tril(mask) if causal else mask
    refined, soft = jnp.full(2, refined), jnp.zeros((2, SIZE, 40))
    first, mixed = jit(graphdef, params, cached, counts, tokens, mask, Canvas(refined, soft))
    second, _ = jit(graphdef, params, cached, counts, tokens, mask, Canvas(refined, soft if deaf else mixed))
    return np.asarray(first), np.asarray(second)


def furthest(found):
    """Of the first and of the second passes."""
    golden = tiny.goldens(CASE)
    right = (np.stack([golden[f"{kind}{count}"] for count in (7, PREFIX)]) for kind in ("denoised", "conditioned"))
    return [float(np.abs(one - other).max()) for one, other in zip(found, right, strict=True)]


@pytest.mark.reference
def test_a_canvas_gets_the_scores_that_transformers_gives_it():
    found = passes()
    assert max(furthest(found)) <= TOLERANCE
    golden = tiny.goldens(CASE)
    for row, count in enumerate((7, PREFIX)):
        assert (found[1][row].argmax(-1) == golden[f"conditioned{count}"].argmax(-1)).all()


def with_leaves(change):
    """The parameters, each layer's changed."""
    _, params, _ = model()
    return params | {"layers": {index: layer | change(layer) for index, layer in params["layers"].items()}}


@pytest.mark.reference
def test_a_mistake_would_show():
    assert furthest(passes(deaf=True))[1] > 1
    assert min(furthest(passes(causal=True))) > 1
    assert min(furthest(passes(refined=False))) > 1
    assert min(furthest(passes(with_leaves(lambda layer: {"canvas_scale": layer["scale"]})))) > 0.5


@pytest.mark.reference
def test_a_window_of_each_position_s_own_would_show(monkeypatch):
    monkeypatch.setattr(Pass, "reach", property(lambda run: None))
    found = passes(jit=jax.jit(partial(_refine.__wrapped__), static_argnums=0))  # traced anew
    assert min(furthest(found)) > 1


@pytest.mark.reference
def test_a_row_that_reads_does_not_see_what_the_other_refines():
    """Both in one pass, bit for bit; text is read as in a pass without canvases."""
    graphdef, params, _ = model()
    counts, cached = prompts()
    tokens = jnp.broadcast_to(tiny.goldens(CASE)["prompt"][PREFIX : PREFIX + SIZE], (2, SIZE))
    mask = jnp.stack([jnp.ones((SIZE, SIZE), bool), jnp.tril(jnp.ones((SIZE, SIZE), bool))])
    soft = jax.random.normal(jax.random.key(0), (2, SIZE, 40))
    canvas = Canvas(jnp.array([True, False]), soft)
    first, other = (
        _refine(graphdef, params, cached, counts, tokens.at[0].add(changed), mask, canvas) for changed in (0, 1)
    )
    assert (np.asarray(first[0][1]) == np.asarray(other[0][1])).all()
    assert np.abs(first[0][1] - tiny.goldens(CASE)["logits"][PREFIX : PREFIX + SIZE]).max() <= TOLERANCE
    assert not (np.asarray(first[0][0]) == np.asarray(other[0][0])).all()
