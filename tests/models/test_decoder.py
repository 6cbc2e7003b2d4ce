"""The decoder's passes against each other; against transformers they stand in test_family_passes.py."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.decode import jitted
from jaxserve.errors import CheckpointError
from jaxserve.models.cache import write
from jaxserve.models.family import decoder_family, family_of
from tests.models import tiny_checkpoints as tiny


def whole(family, params, tokens) -> np.ndarray:
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return np.asarray(jitted.logits(family.graphdef(jnp.float32), params, tokens))[0]


@pytest.mark.parametrize("key_block", [16, 96])
def test_cached_passes_give_the_whole_pass(key_block):
    """Chunks of any size, then one token at a time, over a cache: the same hidden states."""
    family, params = tiny.load("mistral")
    family = decoder_family(dataclasses.replace(family.config, key_block=key_block))
    model_def, tokens = family.graphdef(jnp.float32), tiny.goldens("mistral")["prompt"]
    expected = whole(family, params, tokens)

    @jax.jit
    def passed(params, cache, part, start):
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


def test_two_texts_in_one_pass_do_not_meet():
    """Positions and a mask of the caller's own: a text and, behind it, another that starts at 0 again."""
    family, params = tiny.load("llama")
    model = nnx.merge(family.graphdef(jnp.float32), params)
    tokens = jnp.asarray(tiny.goldens("llama")["prompt"][:32], jnp.int32)[None]
    of = jnp.arange(32) // 20
    mask = (jnp.tril(jnp.ones((32, 32), bool)) & (of[:, None] == of))[None]
    start, apart = jnp.zeros(1, jnp.int32), (jnp.arange(32) - 20 * of)[None]
    together, _ = model(tokens, start, mask, positions=apart)
    alone, _ = model(tokens[:, 20:], start, jnp.tril(jnp.ones((1, 12, 12), bool)))
    np.testing.assert_allclose(together[:, 20:], alone, atol=2e-5)
    following, _ = model(tokens, start, mask, positions=apart.at[:, 21:].add(1))
    assert np.abs(following[:, 20:] - alone).max() > 1e-2


@pytest.mark.parametrize("case", tiny.CASES)
def test_every_tensor_of_the_file_is_used(case):
    family = family_of(tiny.config(case))
    names = set(tiny.tensors(case))
    used = {piece.source for rule in family.rules for piece in rule.pieces(names)}
    assert used <= names
    assert not [name for name in names - used if not name.startswith(family.ignored)]
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
