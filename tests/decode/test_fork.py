"""A copied slot is the other one, and nothing else is touched or moved."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import fork as forking
from jaxserve.decode import jitted
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.decode.step import empty_state
from jaxserve.models.family import family_of
from jaxserve.testing import TINY, TINY_BLOCKS
from tests.engine.test_engine_rings import HF as RINGS
from tests.models.test_deepseek_v3 import HF as LATENT
from tests.models.tiny_recurrent import HF as RECURRENT

FAMILIES = {"full": TINY, "rings": RINGS, "recurrent": RECURRENT, "latent": LATENT, "blocks": TINY_BLOCKS}
SLOTS, POSITIONS = 4, 128


def filled(hf):
    """A state in which no two numbers of a leaf are the same."""
    state = empty_state(family_of(hf).empty_cache(SLOTS, POSITIONS, jnp.float32), Autoregressive(0))
    return jax.tree.map(lambda leaf: jnp.arange(1, leaf.size + 1).reshape(leaf.shape).astype(leaf.dtype), state)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_target_is_the_source_and_the_others_are_as_they_were(kind):
    before = jax.tree.map(np.asarray, filled(FAMILIES[kind]))
    after = jax.tree.map(np.asarray, jitted.fork(filled(FAMILIES[kind]), jnp.int32(1), jnp.int32(3)))
    assert not after.active[3]
    assert after.active[:3].all()
    leaves = [(old, new) for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert len(leaves) > 6
    for old, new in leaves:
        assert (new[:3] == old[:3]).all()
        if old.dtype != bool:
            assert (new[3] == old[1]).all()


def test_a_piece_that_is_left_out_would_show(monkeypatch):
    monkeypatch.setattr(forking, "PIECES", 1)
    whole = jax.tree.map(np.asarray, forking.fork(filled(TINY), jnp.int32(1), jnp.int32(3)))
    monkeypatch.setattr(forking, "_copied_piece", lambda leaf, *_: leaf)
    none = jax.tree.map(np.asarray, forking.fork(filled(TINY), jnp.int32(1), jnp.int32(3)))
    assert (whole.cache.layers[0].k[3] == whole.cache.layers[0].k[1]).all()
    assert (none.cache.layers[0].k[3] != whole.cache.layers[0].k[1]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_it_copies_no_more_than_a_piece(kind, dtype):
    """What a fork needs beside its arguments is a small part of a slot, on any jax."""
    family = family_of(FAMILIES[kind])
    empty = partial(family.empty_cache, SLOTS, POSITIONS, jnp.dtype(dtype))
    cache, state = jax.eval_shape(empty), jax.eval_shape(lambda: empty_state(empty(), Autoregressive(0)))
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    analysis = jitted.fork.lower(state, slot, slot).compile().memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert analysis.temp_size_in_bytes < size / SLOTS / 2
    assert analysis.alias_size_in_bytes >= size
