"""The engine's promises where layers keep the last positions only: prompts are far longer than the windows.

What a ring holds depends on how a text was read (in chunks, token by token, again after a fault) and on who had the
slot before; what comes out must not.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.decode import jitted
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.models.cache import KV, Ring
from jaxserve.models.family import family_of
from jaxserve.testing import tiny_engine
from tests.engine.test_engine import Faults, mixed, same

WINDOW = 16
HF = {
    "model_type": "gemma3_text",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 47, 64, 65, 95)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(hf=HF)


def requests(count: int = 12) -> list[Request]:
    return [mixed(seed, LENGTHS) for seed in range(count)]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, object]:
    """What each is answered when nobody else is there."""
    return {request.id: engine.generate([request])[0] for request in requests()}


def test_the_windowed_layers_keep_a_ring(engine: Engine):
    layers = engine.device._states[0].cache.layers
    assert [type(layer) for layer in layers] == [Ring, KV, Ring]
    assert [layer.k.shape[2] for layer in layers] == [WINDOW, 128, WINDOW]
    assert engine.plan.model.cache[0].most == WINDOW


def test_alone_is_together_bit_for_bit(engine: Engine, alone, supports):
    assert len({one.tokens for one in alone.values()}) > 9
    compiled = engine.recompiles
    for order in range(3):
        company = requests()
        random.Random(order).shuffle(company)
        assert all(same(one, alone[one.request.id]) for one in engine.generate(company))
    assert engine.recompiles == compiled
    supports(HF["model_type"], "engine")


# Every part at once: heads of two sizes, experts beside dense blocks, layers that use an earlier one's ring.
SHARED_RINGS = {
    "model_type": "gemma4_text",
    "vocab_size": 259,
    "vocab_size_per_layer_input": 259,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 4,
    "num_kv_shared_layers": 2,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_experts_and_shared_rings_do_not_tell_of_company(supports):
    engine = tiny_engine(hf=SHARED_RINGS, prefill_buckets=(32,))
    layers = engine.device._states[0].cache.layers
    assert [type(layer) for layer in layers] == [Ring, KV, type(None), type(None)]
    company = requests(8)
    alone = {request.id: engine.generate([request])[0] for request in company}
    assert len({one.tokens for one in alone.values()}) > 6
    for order in range(2):
        random.Random(order).shuffle(company)
        assert all(same(one, alone[one.request.id]) for one in engine.generate(company))
    supports(SHARED_RINGS["model_type"], "engine")


def whole(engine: Engine, tokens: tuple[int, ...], **changes) -> np.ndarray:
    """Log-probabilities at every position, of one pass over the whole text without a cache."""
    family = family_of(HF | changes)
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = jitted.logits(family.graphdef(jnp.float32), engine.device.programs._params, jnp.asarray(padded))
    return np.asarray(jax.nn.log_softmax(logits))[0]


def greedy(engine: Engine, length: int) -> tuple[tuple[int, ...], list[float], int]:
    """A text, prompt and answer, and the log-probability that the engine gives each token of the answer."""
    prompt = tuple(random.Random(length).randrange(256) for _ in range(length))
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=0)
    (answer,) = engine.generate([Request("greedy", prompt, sampling)])
    return prompt + answer.tokens, [one.logprob for one in answer.logprobs], length


@pytest.mark.parametrize("length", [2, 16, 40, 90])
def test_greedy_tokens_are_those_of_the_whole_pass(engine: Engine, length: int):
    tokens, scores, start = greedy(engine, length)
    rows = whole(engine, tokens)[start - 1 : len(tokens) - 1]
    assert rows.argmax(-1).tolist() == list(tokens[start:])
    np.testing.assert_allclose(rows.max(-1), scores, atol=1e-4)


def test_a_window_of_another_size_would_show(engine: Engine):
    tokens, scores, start = greedy(engine, 40)
    rows = whole(engine, tokens, sliding_window=WINDOW + 1)[start - 1 : len(tokens) - 1]
    assert np.abs(rows[np.arange(len(scores)), tokens[start:]] - scores).max() > 1e-2


@pytest.mark.parametrize(("kind", "at"), [("run", 2), ("run", 9), ("prefill", 7)])
def test_a_step_that_fails_once_loses_nothing(engine: Engine, alone, monkeypatch, kind: str, at: int):
    failures, compiled = engine.metrics.step_failures._value.get(), engine.recompiles
    faults = Faults(engine, monkeypatch, kind=kind)
    faults.at = at
    answers = engine.generate(requests())
    assert faults.fired == 1
    assert all(same(one, alone[one.request.id]) for one in answers)
    assert engine.metrics.step_failures._value.get() == failures + 1
    assert engine.recompiles == compiled


def test_a_slot_tells_nothing_of_who_had_it_before(engine: Engine):
    """A fresh cache and one whose rings others have filled many times over give the same bits."""
    short, long = (dataclasses.replace(mixed(7), prompt=tuple(range(5, 5 + length))) for length in (3, 61))
    engine.device.reset()
    first = [engine.generate([request])[0] for request in (short, long)]
    engine.generate([mixed(seed, (80, 95)) for seed in range(20, 32)])
    again = [engine.generate([request])[0] for request in (short, long)]
    assert all(map(same, first, again))
