"""The engine's promises on a model whose layers keep a memory instead of positions: nothing of it may leak.

A position that is written twice is no harm, a memory that is written twice is another one. So whatever is replayed,
padded, left behind in a slot or computed for nobody would show here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import Pool
from jaxserve.decode import jitted
from jaxserve.decode.autoregressive import Autoregressive
from jaxserve.engine.engine import Engine
from jaxserve.engine.programs import Programs
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.models.family import family_of
from jaxserve.models.recurrent import Recurrent
from jaxserve.plan import Program
from jaxserve.testing import random_params, tiny_engine, tiny_plan
from tests.engine.test_engine import Faults, company, mixed, same
from tests.engine.test_jax_device import write
from tests.models import tiny_recurrent

ONE_LAYER = tiny_recurrent.HF | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
LENGTHS = (1, 2, 31, 32, 33, 64, 65)


def remembering(hf: dict[str, Any] = tiny_recurrent.HF, slots: int = 4, **settings: Any) -> Engine:
    """Memories that last, so that what is left in one shows for many tokens."""
    engine = tiny_engine((Pool(slots, 128),), hf=hf, **settings)
    for layer in engine.device.programs._params["layers"].values():
        if "rate" in layer["mixer"]:
            layer["mixer"]["rate"] = jax.device_put(np.asarray(layer["mixer"]["rate"]) - 3)
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return remembering()


def of_length(length: int, name: str = "own") -> Request:
    prompt = tuple(7 * at % 251 for at in range(1, length + 1))
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True, logprobs=2)
    return Request(name, prompt, sampling)


def test_alone_is_together_bit_for_bit(engine: Engine, supports):
    requests = [mixed(seed, lengths=LENGTHS) for seed in range(16)]
    alone = {request.id: engine.generate([request])[0] for request in requests}
    assert len({one.tokens for one in alone.values()}) > 12
    for order in (requests, requests[::-1]):
        assert all(same(one, alone[one.request.id]) for one in engine.generate(order))
    assert engine.recompiles == 0
    supports(tiny_recurrent.HF["model_type"], "engine")


@pytest.mark.parametrize("length", LENGTHS)
def test_a_used_slot_is_as_good_as_a_new_one(engine: Engine, length: int):
    engine.device.reset()
    (new,) = engine.generate([of_length(length)])
    for others in (3, 31, 66):
        engine.generate([of_length(others + slot, f"other-{slot}") for slot in range(4)])
        (used,) = engine.generate([of_length(length)])
        assert same(new, used)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_log_probabilities_are_those_of_the_whole_pass(engine: Engine, length: int):
    programs, request = engine.device.programs, of_length(length)
    (answer,) = engine.generate([request])
    ids = np.zeros((1, 128), np.int32)
    ids[0, : length + len(answer.tokens)] = request.prompt + answer.tokens
    scores = jitted.score(programs._graphdef, programs._params, jnp.asarray(ids), 2)
    for offset, entry in enumerate(answer.logprobs):
        assert entry.logprob == pytest.approx(float(scores.chosen[0, length - 1 + offset]), abs=1e-4)


@pytest.mark.parametrize("at", [1, 3, 8, 13])
def test_a_step_that_fails_once_loses_nothing(engine: Engine, monkeypatch, at):
    expected = engine.generate(company())
    faults = Faults(engine, monkeypatch)
    faults.at = at
    answers = engine.generate(company())
    assert faults.fired == 1
    assert all(map(same, answers, expected))


@pytest.mark.parametrize("length", [1, 2, 20, 33, 50])
def test_known_tokens_are_read_again_bit_for_bit(engine: Engine, length: int):
    prompt = tuple(range(7, 7 + length))
    whole, scores = write(engine, prompt, 30)
    for known in (1, 2, 13, 29):
        rest, rest_scores = write(engine, prompt, 30, known=whole[:known])
        assert rest == whole[known:]
        assert rest_scores == scores[known:]


def test_a_scrubbed_slot_holds_nothing_and_its_neighbours_everything(engine: Engine):
    device = engine.device
    write(engine, tuple(range(20)), 4, slot=1)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(device._states[0].cache)]
    device.scrub(0, 1)
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(device._states[0].cache)]
    assert all(leaf[1].any() for leaf in before)
    assert not any(leaf[1].any() for leaf in after)
    assert all((old[[0, 2, 3]] == new[[0, 2, 3]]).all() for old, new in zip(before, after, strict=True))


def test_a_step_copies_no_memory():
    """What a run needs beside its arguments is a small part of the memories that it changes."""
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    sizes |= {f"linear_{kind}_head_dim": 128 for kind in ("key", "value")}
    family = family_of(ONE_LAYER | sizes)
    plan = tiny_plan(family, (Pool(16, 128),))
    params = jax.eval_shape(lambda: random_params(family))
    programs = Programs(plan, family, family.graphdef(jnp.float32), params, Autoregressive(0))
    needs = programs._trace(Program("run", 0)).lower().compile().memory_analysis().temp_size_in_bytes
    assert needs < plan.cache_bytes(plan.pools[0]) / 4


def leaking(self, fresh, row, start, count, put_all=Recurrent.put_all):
    return put_all(self, fresh, row, jnp.maximum(start, 1), count)


def padding(self, fresh, row, start, count, put_all=Recurrent.put_all):
    return put_all(self, fresh, row, start, jnp.where(count > 0, fresh.keys.shape[2], 0))


def test_a_mistake_would_show(monkeypatch):
    """Each with a number of slots of its own: what JAX has traced before would be used again."""
    written = []
    for slots, put_all in ((3, Recurrent.put_all), (5, leaking), (6, padding)):
        monkeypatch.setattr(Recurrent, "put_all", put_all)
        engine = remembering(ONE_LAYER, slots, prefill_buckets=(32,))
        engine.generate([of_length(33 + slot, f"other-{slot}") for slot in range(slots)])
        written.append(engine.generate([of_length(34)])[0].tokens)
    right, *wrong = written
    assert right not in wrong
