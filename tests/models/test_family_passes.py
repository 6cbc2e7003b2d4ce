"""Every family against transformers: the whole pass, prompts in chunks, every cached step, greedy continuations."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import every_pass
from tests.models import tiny_checkpoints as tiny

TOLERANCE = 1e-4  # transformers' own float32 noise is below 3e-5

pytestmark = pytest.mark.reference


# Of cases that differ in what is done to weights or frequencies alone, one goes through the cache.
SAME_CACHE = {"llama_tied", "llama_bias", "llama_linear", "llama_yarn", "llama_yarn_exact", "qwen3_yarn"}
# Bodies of families above; what they are for goes through the cache in decode/test_block_diffusion.py.
SAME_CACHE |= {"sdar", "sdar_moe"}
CACHED = [case for case in tiny.CASES if case not in SAME_CACHE]


@dataclasses.dataclass(frozen=True)
class Cached:
    """What a case's passes over a cache gave."""

    chunked: tuple[np.ndarray, ...]
    stepped: np.ndarray
    greedy: np.ndarray


@cache
def cached(case: str) -> Cached:
    family, params = tiny.load(case)
    golden = tiny.goldens(case)
    prompt, new = golden["prompt"], len(golden["greedy"])
    (*chunked, stepped), greedy = every_pass.cached(
        family, params, prompt, new, every_pass.SIZES[CACHED.index(case) % 3]
    )
    return Cached(tuple(chunked), stepped, greedy)


def agrees(logits: np.ndarray, golden: np.ndarray) -> None:
    assert np.abs(logits - golden).max() <= TOLERANCE
    assert (logits.argmax(-1) == golden.argmax(-1)).all()


@pytest.mark.parametrize("case", tiny.CASES)
def test_whole_pass(case, supports):
    family, params = tiny.load(case)
    golden = tiny.goldens(case)
    agrees(every_pass.whole(family, params, golden["prompt"]), golden["logits"])
    supports(tiny.config(case)["model_type"], "whole pass")


@pytest.mark.parametrize("case", CACHED)
def test_prompts_in_chunks(case, supports):
    golden = tiny.goldens(case)["logits"]
    assert len(cached(case).chunked) >= 3
    for logits in cached(case).chunked:
        assert len(logits) < len(golden)
        agrees(logits, golden[-len(logits) :])
    supports(tiny.config(case)["model_type"], "chunks")


@pytest.mark.parametrize("case", CACHED)
def test_every_step(case, supports):
    golden = tiny.goldens(case)
    agrees(cached(case).stepped, golden["logits"])
    assert (cached(case).greedy == golden["greedy"]).all()
    supports(tiny.config(case)["model_type"], "steps")


@pytest.mark.parametrize("case", [case for case in tiny.CASES if "short_logits" in tiny.goldens(case)])
def test_frequencies_that_depend_on_the_length(case):
    family, params = tiny.load(case)
    golden = tiny.goldens(case)
    short = golden["short_logits"]
    agrees(every_pass.whole(family, params, golden["prompt"][: len(short)]), short)


@pytest.mark.parametrize("case", [case for case in tiny.CASES if "block_logits" in tiny.goldens(case)])
def test_blocks_that_see_all_of_themselves(case):
    family, params = tiny.load(case)
    golden = tiny.goldens(case)
    block = np.arange(len(golden["prompt"])) // tiny.config(case).get("block_size", 8)

    @jax.jit
    def passed(params, tokens, mask):
        model = nnx.merge(family.graphdef(jnp.float32), params)
        return model.logits(model(tokens, jnp.zeros(1, jnp.int32), mask)[0])

    tokens = jnp.asarray(golden["prompt"])[None]
    logits = passed(params, tokens, jnp.asarray(block[:, None] >= block[None, :])[None])
    agrees(np.asarray(logits)[0], golden["block_logits"])
