"""The compiled device keeps the promise that the hashing one keeps."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.engine.device import Admission
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.testing import tiny_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def write(engine: Engine, prompt: tuple[int, ...], count: int, *, known: tuple[int, ...] = (), slot: int = 1):
    """Reads a text into an empty device and decodes; what is ``known`` of the output is not sampled anew."""
    device, tokens = engine.device, prompt + known
    device.reset()
    pool = engine.plan.pools[0]
    for chunk in pool.chunks_again(len(prompt), len(tokens)):
        device.prefill(0, slot, chunk, tokens)
    request = Request("a", prompt, SamplingParams(max_tokens=count, temperature=0.9, seed=5, logprobs=2))
    device.admit(0, slot, Admission(request, tokens, (), 5, len(prompt) - 1))
    given, scores = [], []
    for _ in range(count):
        log = device.run(0, [slot], 4).read()
        emitted = log.of(slot, 2)
        given += emitted.tokens
        scores += emitted.logprobs
    device.clear(0, slot)
    return tuple(given), tuple(scores)


@pytest.mark.parametrize("length", [1, 2, 20, 33, 50])
def test_known_tokens_are_read_again_bit_for_bit(engine: Engine, length: int):
    prompt = tuple(range(7, 7 + length))
    whole, scores = write(engine, prompt, 30)
    assert len(whole) == 30
    for known in (1, 2, 13, 29):
        rest, rest_scores = write(engine, prompt, 30, known=whole[:known])
        assert rest == whole[known:]
        assert rest_scores == scores[known:]


def test_tokens_that_are_put_back_wrongly_show(engine: Engine):
    prompt = tuple(range(7, 27))
    whole, _ = write(engine, prompt, 30)
    wrong, _ = write(engine, prompt, 30, known=(*whole[:12], (whole[12] + 1) % 250))
    assert wrong != whole[13:]


def test_a_scrubbed_slot_holds_nothing_and_its_neighbour_everything(engine: Engine):
    device = engine.device
    write(engine, tuple(range(20)), 4, slot=1)
    write_both = [np.asarray(leaf) for leaf in jax.tree.leaves(device._states[0].cache)]
    device.scrub(0, 1)
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(device._states[0].cache)]
    assert any(leaf[1].any() for leaf in write_both)
    assert not any(leaf[1].any() for leaf in after)
    assert all((old[[0, 2, 3]] == new[[0, 2, 3]]).all() for old, new in zip(write_both, after, strict=True))


def test_the_warm_up_leaves_nothing_and_times_a_real_step(engine: Engine):
    fresh = tiny_engine()
    assert fresh.step_limit >= 0.75
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(fresh.device._states[0].cache))
    assert fresh.recompiles == 0
    assert not np.asarray(fresh.device._states[0].active).any()
