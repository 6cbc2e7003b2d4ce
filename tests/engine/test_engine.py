"""The engine's promises on a tiny model: the same numbers in any company, nothing compiled, nobody lost by a fault."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import Pool
from jaxserve.decode import jitted
from jaxserve.engine.engine import Completion, Engine
from jaxserve.engine.request import FinishReason, Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.errors import EngineError, InvalidRequest, NumericalError
from jaxserve.testing import TINY_EOS, tiny_engine


def mixed(seed: int, lengths=(1, 2, 31, 32, 33, 34, 64, 65, 66, 80)) -> Request:
    """A request with a prompt around a bucket's edge and settings of every kind."""
    dice = random.Random(seed)
    sampling = SamplingParams(
        max_tokens=dice.randint(1, 40),
        min_tokens=dice.choice([0, 0, 1]),
        temperature=dice.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=dice.choice([0, 0, 5, 40]),
        top_p=dice.choice([1.0, 0.9, 0.5]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.2]),
        presence_penalty=dice.choice([0.0, 0.5]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.3]),
        logit_bias=((5, 2.0), (9, -3.0)) if dice.random() < 0.3 else (),
        stop_token_ids=(3, 77) if dice.random() < 0.2 else (),
        ignore_eos=dice.random() < 0.2,
        seed=seed,
        logprobs=dice.choice([None, 0, 5]),
    )
    return Request(f"mixed-{seed}", tuple(dice.randrange(256) for _ in range(dice.choice(lengths))), sampling)


def same(one: Completion, other: Completion) -> bool:
    return (one.tokens, one.logprobs, one.finish_reason) == (other.tokens, other.logprobs, other.finish_reason)


def test_alone_is_together_bit_for_bit(tiny: Engine):
    requests = [mixed(seed) for seed in range(16)]
    alone = {request.id: tiny.generate([request])[0] for request in requests}
    assert len({one.tokens for one in alone.values()}) > 12
    for order in range(3):
        random.Random(order).shuffle(requests)
        assert all(same(one, alone[one.request.id]) for one in tiny.generate(requests))


def test_the_log_probabilities_are_those_of_the_whole_pass(tiny: Engine):
    programs = tiny._programs
    for seed in range(6):
        request = mixed(seed)
        request = Request(
            request.id, request.prompt, SamplingParams(max_tokens=20, temperature=1.0, seed=seed, logprobs=3)
        )
        (answer,) = tiny.generate([request])
        ids = np.zeros((1, 128), np.int32)
        start = len(request.prompt)
        ids[0, : start + len(answer.tokens)] = request.prompt + answer.tokens
        scores = jitted.score(programs._graphdef, programs._params, jnp.asarray(ids), 3)
        for offset, entry in enumerate(answer.logprobs):
            assert entry.logprob == pytest.approx(float(scores.chosen[0, start - 1 + offset]), abs=1e-4)
            assert [token for token, _ in entry.top] == scores.top_ids[0, start - 1 + offset].tolist()


def test_seeds_repeat_and_no_seed_varies(tiny: Engine):
    def write(name: str, seed: int | None):
        return tiny.generate([Request(name, (1, 2, 3), SamplingParams(max_tokens=24, seed=seed, ignore_eos=True))])[
            0
        ].tokens

    assert write("a", 7) == write("b", 7) != write("c", 8)
    assert write("d", None) != write("e", None)


def test_nothing_compiles_after_warm_up():
    engine = tiny_engine()
    requests = [mixed(seed, lengths=(1, 2, 30, 31, 32, 33, 34, 62, 63, 64, 65, 66, 80)) for seed in range(200)]
    answers = engine.generate(requests)
    assert len(answers) == 200
    assert engine.recompiles == 0
    assert engine.metrics.recompiles._value.get() == 0


def test_requests_end_for_the_right_reason(tiny: Engine):
    base = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (free,) = tiny.generate([Request("free", (9, 8, 7), base)])
    assert (free.finish_reason, len(free.tokens)) == (FinishReason.LENGTH, 12)
    stop = free.tokens[4]
    first = free.tokens.index(stop)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    (stopped,) = tiny.generate([Request("stopped", (9, 8, 7), sampling)])
    assert (stopped.finish_reason, stopped.tokens) == (FinishReason.STOP, free.tokens[: first + 1])
    biased = SamplingParams(max_tokens=12, temperature=0.0, logit_bias=((TINY_EOS, 100.0),), min_tokens=3)
    (ended,) = tiny.generate([Request("ended", (9, 8, 7), biased)])
    assert (ended.finish_reason, len(ended.tokens), ended.tokens[-1]) == (FinishReason.STOP, 4, TINY_EOS)
    (nothing,) = tiny.generate([Request("nothing", (9,), SamplingParams(max_tokens=0))])
    assert (nothing.finish_reason, nothing.tokens) == (FinishReason.LENGTH, ())


def test_a_cancelled_request_frees_its_slot(tiny: Engine):
    (expected,) = tiny.generate([mixed(3)])
    for round_ in range(12):
        tiny.submit(Request(f"victim-{round_}", (1, 2), SamplingParams(max_tokens=100)))
        for _ in range(round_ % 4):
            tiny.tick()
        tiny.cancel(f"victim-{round_}")
        (answer,) = tiny.generate([mixed(3)])
        assert same(answer, expected)
    assert tiny.metrics.running._value.get() == 0


def test_a_failed_step_is_told_to_those_it_hit():
    engine = tiny_engine()
    expected = engine.generate([mixed(4)])[0]
    run, calls = engine._programs.run, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return run(*arguments)

    engine._programs.run = failing
    requests = [Request(f"hit-{index}", (1, 2), SamplingParams(max_tokens=30, ignore_eos=True)) for index in range(6)]
    answers = engine.generate(requests)
    assert [isinstance(answer.error, EngineError) for answer in answers] == [True] * 4 + [False] * 2
    assert all(len(answer.tokens) == 30 for answer in answers[4:])
    assert same(engine.generate([mixed(4)])[0], expected)


def test_a_failed_step_takes_nobody_else_along():
    """Who ended in the same tick hears of it, who left while the step ran is not needed, and the engine goes on."""
    engine = tiny_engine()
    run = engine._programs.run

    def failing(*arguments):
        raise RuntimeError("the device is gone")

    engine.submit(Request("runs", (1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.tick()
    engine._programs.run = failing
    engine.submit(Request("nothing", (1, 2), SamplingParams(max_tokens=0)))
    said = dict(engine.tick())
    assert said["nothing"].finish_reason is FinishReason.LENGTH
    assert isinstance(said["runs"].error, EngineError)
    engine.submit(Request("leaves", (1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine._programs.run = run
    engine.tick()
    engine.cancel("leaves")
    engine._in_flight = [(engine._in_flight[0][0], None)]  # its step gives nothing that could be read
    assert engine.tick() == []
    assert len(engine.generate([Request("next", (3,), SamplingParams(max_tokens=5, ignore_eos=True))])[0].tokens) == 5


def test_generate_leaves_nothing_behind_and_takes_more_than_fit():
    engine = tiny_engine(policy=Policy(2, 1, 60, 600, 0))
    good = [Request(f"g{index}", (5, index), SamplingParams(max_tokens=3, ignore_eos=True)) for index in range(9)]
    with pytest.raises(InvalidRequest):
        engine.generate([good[0], Request("wrong", (5,), SamplingParams(top_p=2.0)), *good[1:]])
    assert not engine._scheduler.has_work
    assert [len(answer.tokens) for answer in engine.generate(good)] == [3] * 9


def test_a_number_that_is_none_ends_its_request_alone():
    engine = tiny_engine((Pool(3, 64),), hf=None)
    good = [Request(f"good-{index}", (5, 6, 7 + index), SamplingParams(max_tokens=9, seed=1)) for index in range(2)]
    clean = engine.generate(good)
    params = engine._programs._params
    params["embedding"] = params["embedding"].at[200].set(jnp.nan)  # tied: its score is no number for anybody
    engine.generate([Request("bad", (200, 1), SamplingParams(max_tokens=3))])
    (bad,) = engine.generate([Request("bad", (200, 1), SamplingParams(max_tokens=3))])
    assert isinstance(bad.error, NumericalError)
    params["embedding"] = params["embedding"].at[200].set(0.1)
    assert [one.finish_reason for one in engine.generate(good)] == [one.finish_reason for one in clean]


def test_the_accounts_add_up():
    engine = tiny_engine()
    answers = engine.generate([mixed(seed) for seed in range(20)])
    metrics = engine.metrics
    assert metrics.generated_tokens._value.get() == sum(len(answer.tokens) for answer in answers)
    assert metrics.prompt_tokens._value.get() == sum(len(answer.request.prompt) for answer in answers)
    finished = {reason.value: metrics.finished.labels(reason.value)._value.get() for reason in FinishReason}
    assert finished["stop"] + finished["length"] == 20
    assert metrics.waiting._value.get() == metrics.running._value.get() == metrics.cache_usage._value.get() == 0
