"""Gated DeltaNet layers: their arithmetic, what they keep, and that no pass leaves more or less than it should."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.decode import jitted
from jaxserve.models import recurrent
from jaxserve.models.cache import Cache, write
from jaxserve.models.family import family_of
from jaxserve.models.layers import Norm
from jaxserve.models.passes import Pass
from jaxserve.models.recurrent import DeltaConfig, Recurrent, Updates
from jaxserve.models.weights import nest, params_of
from jaxserve.testing import random_leaves
from tests.models import tiny_recurrent as tiny

TOLERANCE = 1e-4
CONFIG = DeltaConfig(key_heads=2, value_heads=4, key_size=8, value_size=12, kernel=4, norm=Norm(1e-6))
FAMILY = family_of(tiny.HF)
ONE_LAYER = family_of(tiny.HF | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]})


def weights(family):
    """Random ones, but for norms around one and memories that last: what is left in one shows for many tokens."""
    leaves = random_leaves(family)
    for name, leaf in leaves.items():
        if name.endswith("scale") and not name.endswith("mixer.norm.scale"):
            leaves[name] = leaf - 1
        if name.endswith("rate"):
            leaves[name] = leaf - 3
    return params_of(nest(leaves))


PARAMS = weights(FAMILY)
TOKENS = np.random.default_rng(3).integers(0, 256, 140)


def ints(*values: int):
    return jnp.asarray(values, jnp.int32)


# --- a layer against its arithmetic -----------------------------------------------------------------------------------


def file_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "in_proj_qkv.weight": (80, 32),
        "in_proj_z.weight": (48, 32),
        "in_proj_a.weight": (4, 32),
        "in_proj_b.weight": (4, 32),
        "conv1d.weight": (80, 1, 4),
        "A_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (12,),
        "out_proj.weight": (32, 48),
    }
    return {f"linear_attn.{name}": 0.4 * random.normal(size=shape) for name, shape in shapes.items()}


def distance(t: int = 70) -> float:
    """Of a layer's output from what the file's tensors mean."""
    tensors, x = file_tensors(), np.random.default_rng(1).normal(size=(t, 32))
    rules = CONFIG.rules(32, "", "")
    leaves = {rule.param.removeprefix("mixer."): jnp.asarray(rule.make(tensors, np.float32)) for rule in rules}
    module = CONFIG.build(32, dtype=jnp.float32, rngs=nnx.Rngs(0))
    nnx.update(module, params_of(nest(leaves)))
    run = Pass(jnp.zeros(1, jnp.int32), jnp.tril(jnp.ones((1, t, t), bool)), None, 0, None, None, 16)
    out, _ = jax.jit(lambda x: module(x, run, 0))(jnp.asarray(x, jnp.float32)[None])
    return float(np.abs(out[0] - tiny.layer(tensors, "linear_attn.", x, tiny.HF)).max())


def test_a_layer_computes_what_its_tensors_mean():
    assert distance() < TOLERANCE


def test_keys_that_are_not_unit_would_show(monkeypatch):
    monkeypatch.setattr(recurrent, "_unit", lambda x: x)
    assert distance() > 10 * TOLERANCE


def test_gates_in_the_wrong_order_would_show(monkeypatch):
    rules = DeltaConfig.rules

    def wrong(self, width, to, of):
        flipped = {"a": "b", "b": "a"}

        def other(piece):
            name = piece.source.removesuffix(".weight")
            return dataclasses.replace(piece, source=f"{name[:-1]}{flipped[name[-1]]}.weight")

        return tuple(
            dataclasses.replace(one, ways=(tuple(map(other, one.ways[0])),)) if "ba" in one.param else one
            for one in rules(self, width, to, of)
        )

    monkeypatch.setattr(DeltaConfig, "rules", wrong)
    assert distance() > 10 * TOLERANCE


# --- what is kept -----------------------------------------------------------------------------------------------------


def made(b: int, t: int, slots: int = 3, seed: int = 0, dtype=jnp.float32) -> tuple[Recurrent, Updates]:
    random = np.random.default_rng(seed)

    def draw(*shape, dtype=jnp.float32):
        return jnp.asarray(random.normal(size=shape), dtype)

    kept = CONFIG.empty(slots, 64, dtype, 16)
    kept = Recurrent(draw(*kept.state.shape), jnp.asarray(random.integers(0, 9, kept.inputs.shape), kept.inputs.dtype))
    fresh = Updates(draw(b, 2, t, 8), draw(b, 4, t, 12), -abs(draw(b, 4, t)), draw(b, 2, t, 40, dtype=dtype))
    return kept, fresh


def in_one(kept: Recurrent, fresh: Updates, row, start, count) -> Recurrent:
    return kept.put_all(fresh, row, start, count)


def by_rows(kept: Recurrent, fresh: Updates, row, start, count) -> Recurrent:
    return write(Cache((kept,), 64, len(kept.state)), (fresh,), row, start, count).layers[0]


BOTH = pytest.mark.parametrize("put", [by_rows, in_one])


@BOTH
@pytest.mark.parametrize("t", [1, 6, 70])
def test_the_first_of_the_new_are_kept_and_a_start_begins_anew(put, t):
    kept, fresh = made(3, t)
    start, count = ints(0, 9, 4), ints(min(t, 3), t, 0)
    after = jax.jit(put)(kept, fresh, 0, start, count)
    for row in range(3):
        n = int(count[row])
        state = np.asarray(kept.state[row], np.float64) * (int(start[row]) > 0 or n == 0)
        inputs = np.asarray(kept.inputs[row]) * (int(start[row]) > 0 or n == 0)
        for i in range(n):
            keys = np.repeat(np.asarray(fresh.keys[row, :, i]), 2, axis=0)
            state = state * np.exp(np.asarray(fresh.decay[row, :, i], np.float64))[:, None, None]
            state = state + keys[:, :, None] * np.asarray(fresh.values[row, :, i])[:, None]
        inputs = np.concatenate([inputs, fresh.inputs[row, :, :n]], axis=1)[:, -3:]
        np.testing.assert_allclose(after.state[row], state, atol=5e-6)
        np.testing.assert_array_equal(after.inputs[row], inputs)


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("t", [1, 6])
def test_rows_of_which_nothing_is_kept_stay_bit_for_bit(put, dtype, t):
    kept, fresh = made(3, t, dtype=dtype)
    fresh = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), fresh)
    after = jax.jit(put)(kept, fresh, 0, ints(5, 0, 0), ints(0, t, 0))
    for old, new in zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[jnp.asarray([0, 2])], new[jnp.asarray([0, 2])])
        assert (old[1] != new[1]).any()


@BOTH
def test_what_is_not_kept_may_be_no_number(put):
    kept, fresh = made(1, 6, slots=2)
    cut = jax.tree.map(lambda leaf: leaf[:, :, :4], fresh)
    bad = jax.tree.map(lambda leaf: leaf.at[:, :, 4:].set(jnp.nan), fresh)
    whole, part = (jax.jit(put)(kept, one, 1, ints(3), ints(4)) for one in (bad, cut))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    begun = jax.jit(put)(jax.tree.map(lambda leaf: leaf * jnp.nan, kept), bad, 1, ints(0), ints(4))
    assert all(np.isfinite(np.asarray(leaf)[1]).all() for leaf in jax.tree.leaves(begun))


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_write_is_in_place(t, dtype):
    """The temporary memory of a donated write is that of a row and of what is new, and no copy of what is kept."""
    slots, config = 32, dataclasses.replace(CONFIG, key_size=128, value_size=128)

    def everything():
        kept = config.empty(slots, 64, dtype, 16)
        sizes = (2, t, 128), (4, t, 128), (4, t)
        new = Updates(*(jnp.zeros((slots, *size)) for size in sizes), jnp.zeros((slots, 2, t, config.channels), dtype))
        return Cache((kept, kept), 64, slots), (new, new), 0, jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)

    given = jax.eval_shape(everything)
    compiled = jax.jit(write, donate_argnums=0).lower(*given).compile()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given[0]))
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 8


def test_what_is_kept_is_what_is_planned():
    for dtype in (jnp.float32, jnp.bfloat16):
        kept = jax.eval_shape(lambda: CONFIG.empty(3, 64, dtype, 16))  # noqa: B023 - called at once
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
        assert size == 3 * CONFIG.cache_shape(16).bytes(64, jnp.dtype(dtype).itemsize)
        assert kept.state.dtype == jnp.float32


# --- passes -----------------------------------------------------------------------------------------------------------

LENGTHS = (1, 8, 64, 130)  # of the compiled passes


def passes_of(family, params):
    """A function of a cache, tokens and their place: logits, and the cache with the first ``count`` of them kept."""
    graph = family.graphdef(jnp.float32)

    @jax.jit
    def run(params, cache, tokens, row, start, count):
        model, t = nnx.merge(graph, params), tokens.shape[0]
        at = start[None]
        hidden, fresh = model(tokens[None], at, jnp.tril(jnp.ones((1, t, t), bool)), cache, row=row)
        return model.logits(hidden)[0], write(cache, fresh, row, at, count[None])

    def passed(cache, tokens, start, count):
        """Padded to the next length with tokens that are nobody's."""
        padded = np.full(next(length for length in LENGTHS if length >= len(tokens)), 13)
        padded[: len(tokens)] = tokens
        scores, cache = run(params, cache, jnp.asarray(padded), jnp.int32(1), jnp.int32(start), jnp.int32(count))
        return scores[:count], cache

    return passed


def read(passed, cache, sizes):
    """Logits of the text read in pieces."""
    start, scores = 0, []
    for size in sizes:
        part, cache = passed(cache, TOKENS[start : start + size], start, size)
        scores.append(part)
        start += size
    return np.concatenate(scores), cache


def used(family):
    """A cache whose every slot holds what somebody left."""
    random = np.random.default_rng(9)
    empty = family.empty_cache(2, 256, jnp.float32)
    return jax.tree.map(lambda leaf: jnp.asarray(3 * random.normal(size=leaf.shape), leaf.dtype), empty)


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    tokens = jnp.asarray(TOKENS, jnp.int32)[None]
    return np.asarray(jitted.logits(FAMILY.graphdef(jnp.float32), PARAMS, tokens))[0]


@pytest.fixture(scope="module")
def passed():
    return passes_of(FAMILY, PARAMS)


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1, 64, 1, 65), (1, 1, 1, 1, 1, 60, 75), (64, 64, 12), (3, 64, 2, 64, 7), (130, 5, 5)], ids=str
)
def test_passes_of_any_length_and_padding_give_the_whole_pass(whole, passed, sizes):
    before = used(FAMILY)
    scores, after = read(passed, before, sizes)
    np.testing.assert_allclose(scores, whole[: len(scores)], atol=2e-5)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])


def test_rejected_tokens_leave_nothing(whole, passed):
    """A pass reads more than is kept, as a draft does, and the next one goes on behind what was."""
    cache, start = used(FAMILY), 0
    while start < 60:
        kept = 1 + start % 5
        draft = [*TOKENS[start : start + kept], *[7] * (8 - kept)]
        scores, cache = passed(cache, draft, start, kept)
        np.testing.assert_allclose(scores, whole[start : start + kept], atol=2e-5)
        start += kept


PUT_ALL = Recurrent.put_all


def rounded(self, fresh, row, start, count):
    after = PUT_ALL(self, fresh, row, start, count)
    return Recurrent(after.state.astype(jnp.bfloat16).astype(jnp.float32), after.inputs)


def padded(self, fresh, row, start, count):
    every = jnp.full_like(count, fresh.keys.shape[2])
    return Recurrent(PUT_ALL(self, fresh, row, start, every).state, PUT_ALL(self, fresh, row, start, count).inputs)


def last_positions(self, fresh, row, start, count):
    every = jnp.full_like(count, fresh.keys.shape[2])
    return Recurrent(PUT_ALL(self, fresh, row, start, count).state, PUT_ALL(self, fresh, row, start, every).inputs)


def never_anew(self, fresh, row, start, count):
    return PUT_ALL(self, fresh, row, jnp.maximum(start, 1), count)


@pytest.mark.parametrize("put_all", [PUT_ALL, rounded, padded, last_positions, never_anew])
def test_a_mistake_would_show(monkeypatch, put_all):
    params = weights(ONE_LAYER)
    tokens = jnp.asarray(TOKENS[:24], jnp.int32)[None]
    expected = np.asarray(jitted.logits(ONE_LAYER.graphdef(jnp.float32), params, tokens))[0]
    monkeypatch.setattr(Recurrent, "put_all", put_all)
    scores, _ = read(passes_of(ONE_LAYER, params), used(ONE_LAYER), (3, 8, 2, 7, 4))
    distance = np.abs(scores - expected).max()
    assert distance < TOLERANCE if put_all is PUT_ALL else distance > 10 * TOLERANCE
