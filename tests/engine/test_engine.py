"""The engine's promises on a tiny model: the same numbers in any company, nothing compiled, nobody lost by a fault."""

from __future__ import annotations

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import Pool
from jaxserve.decode import jitted
from jaxserve.engine.canary import Canary
from jaxserve.engine.completion import Completion
from jaxserve.engine.engine import Engine
from jaxserve.engine.jax_device import JaxLog
from jaxserve.engine.request import FinishReason, Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.errors import DeviceFault, EngineError, InvalidRequest, NumericalError, Quarantined
from jaxserve.plan import PoolPlan
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


def test_alone_is_together_bit_for_bit(tiny: Engine, supports):
    requests = [mixed(seed) for seed in range(16)]
    alone = {request.id: tiny.generate([request])[0] for request in requests}
    assert len({one.tokens for one in alone.values()}) > 12
    for order in range(3):
        random.Random(order).shuffle(requests)
        assert all(same(one, alone[one.request.id]) for one in tiny.generate(requests))
    supports("llama", "engine")


def test_the_log_probabilities_are_those_of_the_whole_pass(tiny: Engine):
    programs = tiny.device.programs
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


class Faults:
    """Makes the device's calls fail: one of them, or each that carries a marked text."""

    def __init__(self, engine: Engine, monkeypatch, *, kind: str = "run") -> None:
        self.calls = self.fired = 0
        self.at: int | None = None
        self.marked: int | None = None
        self.broken = False
        device, call = engine.device, getattr(engine.device, kind)

        def failing(pool, *arguments):
            self.calls += 1
            held = engine._scheduler._pools[pool].running.values()
            poisoned = any(self.marked in one.request.prompt and one.decoding for one in held)
            if kind == "prefill":
                poisoned = self.marked in arguments[2][: arguments[1].start + arguments[1].count]
            trial = kind == "run" and self.marked is not None and self.marked in self.trial
            if self.calls == self.at or poisoned or trial or self.broken:
                self.fired += 1
                raise RuntimeError("INTERNAL: the device is gone")
            return call(pool, *arguments)

        monkeypatch.setattr(device, kind, failing)
        admit = device.admit
        self.trial: set[int] = set()

        def noted(pool, slot, admission):
            self.trial = self.trial | set(admission.request.prompt) if self.fired else set()
            admit(pool, slot, admission)

        reset = device.reset
        monkeypatch.setattr(device, "admit", noted)
        monkeypatch.setattr(device, "reset", lambda: (self.trial.clear(), reset()))


def company(count: int = 10) -> list[Request]:
    return [
        dataclasses.replace(mixed(seed), prompt=tuple(token % 200 for token in mixed(seed).prompt))
        for seed in range(count)
    ]


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13])
def test_a_step_that_fails_once_loses_nothing(monkeypatch, at):
    engine = tiny_engine()
    expected = engine.generate(company())
    faults = Faults(engine, monkeypatch)
    faults.at = at
    answers = engine.generate(company())
    assert faults.fired == 1
    assert all(map(same, answers, expected))
    assert engine.metrics.step_failures._value.get() == 1
    assert engine.recompiles == 0


def test_a_restart_that_forgets_would_be_seen(monkeypatch):
    engine = tiny_engine()
    expected = engine.generate(company())
    faults = Faults(engine, monkeypatch)
    faults.at = 13
    monkeypatch.setattr(PoolPlan, "chunks_again", lambda self, prompt, known: self.chunks(prompt - 1))
    assert not all(map(same, engine.generate(company()), expected))


@pytest.mark.parametrize("kind", ["run", "prefill"])
def test_a_poisoned_request_ends_alone(monkeypatch, kind):
    engine = tiny_engine()
    expected = engine.generate(company())
    faults = Faults(engine, monkeypatch, kind=kind)
    faults.marked = 222
    bad = Request("bad", (5, 222, 6, 7), SamplingParams(max_tokens=9, ignore_eos=True))
    answers = engine.generate([*company()[:3], bad, *company()[3:]])
    assert isinstance(answers.pop(3).error, EngineError)
    assert all(map(same, answers, expected))
    with pytest.raises(Quarantined):
        engine.submit(dataclasses.replace(bad, id="again"))
    assert not engine.has_work


def test_a_device_that_always_fails_is_given_up(monkeypatch):
    engine = tiny_engine()
    faults = Faults(engine, monkeypatch)
    faults.broken = True
    with pytest.raises(DeviceFault, match="whoever is in them"):
        engine.generate(company(2))


def test_who_ended_in_the_same_tick_hears_of_it(monkeypatch):
    engine = tiny_engine()
    engine.submit(Request("runs", (1, 2), SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.tick()
    Faults(engine, monkeypatch).at = 1
    engine.submit(Request("nothing", (1, 2), SamplingParams(max_tokens=0)))
    said = dict(engine.tick())
    assert said["nothing"].finish_reason is FinishReason.LENGTH
    assert "runs" not in said
    engine.cancel("runs")
    assert len(engine.generate([Request("next", (3,), SamplingParams(max_tokens=5, ignore_eos=True))])[0].tokens) == 5


@pytest.mark.parametrize("where", ["admit", "of"])
def test_a_fault_on_the_host_is_its_own_requests(monkeypatch, where):
    engine = tiny_engine()
    expected = engine.generate(company(5))
    owner = engine.device if where == "admit" else JaxLog
    call, calls = getattr(owner, where), []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("a mistake of ours")
        return call(*arguments)

    monkeypatch.setattr(owner, where, failing)
    answers = engine.generate(company(5))
    assert [answer.error is not None for answer in answers].count(True) == 1
    assert all(same(*pair) for pair in zip(answers, expected, strict=True) if pair[0].error is None)
    assert engine.metrics.step_failures._value.get() == 0


def test_numbers_that_fail_too_often_make_it_ask(monkeypatch):
    """A known request is asked; as long as its answer is right the device is trusted."""
    engine = tiny_engine((Pool(3, 64),))
    known = Request("known", (5, 6, 7), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    (answer,) = engine.generate([known])
    params = engine.device.programs._params
    params["embedding"] = params["embedding"].at[200].set(jnp.nan)
    rest = Request("rest", (9, 8, 7), SamplingParams(max_tokens=20, ignore_eos=True))
    for expected in (answer.tokens, (1, 2)):
        engine.canary = Canary(known, expected)
        for name in "abc":
            engine.generate([Request(name, (200, 1), SamplingParams(max_tokens=3))])
        params["embedding"] = params["embedding"].at[200].set(0.1)
        engine.generate([rest])
        assert engine.degraded is (expected != answer.tokens)
        params["embedding"] = params["embedding"].at[200].set(jnp.nan)


def test_no_row_with_a_number_is_the_devices_fault():
    engine = tiny_engine()
    params = engine.device.programs._params
    params["embedding"] = params["embedding"] * jnp.nan
    with pytest.raises(DeviceFault):
        engine.generate(company(3))


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
    params = engine.device.programs._params
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
