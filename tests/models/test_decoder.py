"""The decoder against transformers, and its passes against each other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.cache import write
from jaxserve.models.family import decoder_family, family_of
from jaxserve.models.layers import Norm
from tests.models import tiny_checkpoints as tiny

TOLERANCE = 1e-4  # the issue's; transformers' own float32 noise is below 2e-5


def whole(family, params, tokens) -> np.ndarray:
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return np.asarray(jitted.logits(family.graphdef(jnp.float32), params, tokens))[0]


@pytest.mark.reference
@pytest.mark.parametrize("case", tiny.CASES)
def test_logits_are_those_of_transformers(case):
    family, params = tiny.load(case)
    golden = tiny.goldens(case)
    logits = whole(family, params, golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() <= TOLERANCE
    assert (logits.argmax(-1) == golden["logits"].argmax(-1)).all()
    if "short_logits" in golden:
        count = len(golden["short_logits"])
        assert np.abs(whole(family, params, golden["prompt"][:count]) - golden["short_logits"]).max() <= TOLERANCE


def attention(config, **changes):
    """With other attention in every layer; a tuple has one value for each layer."""
    layers = []
    for index, layer in enumerate(config.layers):
        own = {name: value[index] if isinstance(value, tuple) else value for name, value in changes.items()}
        layers.append(dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **own)))
    return dataclasses.replace(config, layers=tuple(layers))


def feed_forward(config, **changes):
    layers = (dataclasses.replace(one, ffn=dataclasses.replace(one.ffn, **changes)) for one in config.layers)
    return dataclasses.replace(config, layers=tuple(layers))


def norms(config, norm):
    layers = (dataclasses.replace(one, norm=norm) for one in config.layers)
    return dataclasses.replace(config, layers=tuple(layers), norm=norm)


MISTAKES = {
    "qwen3": lambda config: attention(config, head_norm=None),
    "qwen2": lambda config: attention(config, bias=False),
    "llama_bias": lambda config: feed_forward(config, bias=False),
    "mistral": lambda config: attention(config, window=23),
    "qwen2_window": lambda config: attention(config, window=(None, 17, 17)),
    "llama31": lambda config: attention(config, rope=family_of(tiny.config("llama")).config.layers[0].mixer.rope),
    "llama": lambda config: norms(config, Norm(1e-2)),
}


@pytest.mark.reference
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_would_show(case):
    family, _ = tiny.load(case)
    wrong = decoder_family(MISTAKES[case](family.config))
    golden = tiny.goldens(case)
    logits = whole(wrong, tiny.params(wrong, tiny.tensors(case)), golden["prompt"])
    assert np.abs(logits - golden["logits"]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("key_block", [16, 96])
def test_cached_passes_give_the_whole_pass(key_block):
    """Chunks of any size, then one token at a time, over a cache: the same hidden states."""
    family, params = tiny.load("mistral")
    family = decoder_family(dataclasses.replace(family.config, key_block=key_block))
    model_def, tokens = family.graphdef(jnp.float32), tiny.goldens("mistral")["prompt"]
    expected = whole(family, params, tokens)

    @jax.jit
    def passed(params, cache, part, start):
        from flax import nnx

        model, t = nnx.merge(model_def, params), part.shape[0]
        at = start[None]
        hidden, fresh = model(part[None], at, jnp.tril(jnp.ones((1, t, t), bool)), cache)
        return model.logits(hidden)[0], write(cache, fresh, 0, at, jnp.asarray([t], jnp.int32))

    for sizes in ((64, 16, 8, 1, 1), (1, 1, 8, 16, 64), (8, 1, 64, 1, 16)):
        cache, start = family.empty_cache(1, 96, jnp.float32), 0
        for size in sizes:
            logits, cache = passed(params, cache, jnp.asarray(tokens[start : start + size]), jnp.int32(start))
            np.testing.assert_allclose(logits, expected[start : start + size], atol=2e-5)
            start += size


def test_every_tensor_of_the_file_is_used():
    for case in tiny.CASES:
        family, _ = tiny.load(case)
        names = set(tiny.tensors(case))
        used = {piece.source for rule in family.rules for piece in rule.pieces(names)}
        assert used | set(family.ignored) >= names
        assert len({rule.param for rule in family.rules}) == len(family.rules)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "3 key heads"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_wrong_configuration_is_named(change, named):
    config = {key: value for key, value in (tiny.config("llama") | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=named):
        family_of(config)
