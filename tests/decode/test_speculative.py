"""Drafts leave no trace in the text: with and without, alone and in company, greedy and sampled."""

from __future__ import annotations

import dataclasses
import random

import jax.numpy as jnp
import pytest

from jaxserve.decode import speculative
from jaxserve.decode.speculative import Speculative
from jaxserve.decode.step import Strategy
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.testing import tiny_engine

SOMETIMES = {"temperature": 0.7, "top_p": 0.9}
KINDS = (
    {"temperature": 0.0},
    SOMETIMES,
    {"temperature": 1.2, "top_k": 20, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.6, "min_tokens": 20, "logprobs": 3},
)


# As if wide passes cost nothing: on a toy they cost whatever the machine is up to.
FREE = (("price_3", 1.0), ("price_5", 1.0), ("price_6", 1.0))


def requests(count: int = 15, *, vocabulary: int = 250) -> list[Request]:
    """Prompts that repeat themselves, so that there are drafts."""
    dice, made = random.Random(3), []
    for index in range(count):
        phrase = [dice.randrange(2, vocabulary) for _ in range(dice.randrange(2, 9))]
        prompt = (phrase * 6)[: dice.randrange(3, 40)]
        sampling = SamplingParams(**{"max_tokens": 40, "seed": index} | KINDS[index % len(KINDS)])
        draft = tuple(phrase * 3) if index % 3 == 0 else ()
        made.append(Request(f"{index}", tuple(prompt), sampling, draft=draft, settings=FREE))
    return made


def texts(engine: Engine, asked: list[Request]) -> dict[str, object]:
    return {one.request.id: (one.tokens, one.logprobs, one.finish_reason) for one in engine.generate(asked)}


@pytest.fixture(scope="module")
def plain() -> dict[str, object]:
    return texts(tiny_engine(), requests())


@pytest.fixture(scope="module")
def drafting() -> Engine:
    return tiny_engine(draft_tokens=(2, 5))


def account(engine: Engine, asked: list[Request]):
    """What the requests took, by their last deltas."""
    last = {}
    for one in asked:
        engine.submit(one)
    while engine.has_work:
        for name, delta in engine.tick():
            last[name] = delta.account
    return last


def test_it_is_a_strategy():
    strategy = Speculative((2, 5))
    assert isinstance(strategy, Strategy)
    assert hash(strategy) == hash(Speculative((2, 5)))
    assert strategy.widths == (1, 3, 6)


def test_the_text_is_the_same_bit_for_bit(plain, drafting):
    compiled = drafting.recompiles
    assert texts(drafting, requests()) == plain
    for order in range(2):
        asked = requests()
        random.Random(order).shuffle(asked)
        assert texts(drafting, asked) == plain
    assert [texts(drafting, [one]) for one in requests(3)] == [{f"{index}": plain[f"{index}"]} for index in range(3)]
    assert drafting.recompiles == compiled


def test_drafts_are_made_and_kept_and_the_account_adds_up(drafting):
    accounts = account(drafting, requests())
    assert all(one.drafted == one.accepted + one.rejected for one in accounts.values())
    assert sum(one.accepted for one in accounts.values()) > 10
    assert sum(one.rejected for one in accounts.values()) > 5
    assert sum(one.predicted_accepted + one.predicted_rejected for one in accounts.values()) > 5
    for one in requests():
        taken = accounts[one.id]
        assert taken.passes + taken.accepted - taken.wasted <= 40 + 1
        assert taken.passes <= 40


def test_a_right_prediction_takes_few_passes(drafting, plain):
    known = plain["0"][0]
    asked = dataclasses.replace(requests(1)[0], draft=known)
    taken = account(drafting, [asked])["0"]
    assert taken.predicted_accepted > 25
    assert taken.passes < 15
    assert texts(drafting, [asked])["0"] == plain["0"]


def test_a_request_may_do_without(drafting, plain):
    asked = [dataclasses.replace(one, settings=(("drafts", 0.0),)) for one in requests(5)]
    assert all(one.drafted == 0 for one in account(drafting, asked).values())
    assert texts(drafting, asked) == {f"{index}": plain[f"{index}"] for index in range(5)}


def test_a_trace_would_be_seen(monkeypatch, plain):
    """A strategy that keeps one draft too many."""
    right = speculative.agreeing
    monkeypatch.setattr(
        speculative, "agreeing", lambda one, other, within: jnp.minimum(right(one, other, within) + 1, within)
    )
    assert texts(tiny_engine(draft_tokens=(2, 4)), requests()) != plain


def test_drafts_that_never_agree_are_given_up():
    strategy = Speculative((3,))
    memory = strategy.memory(2, 8)
    active, count = jnp.asarray([True, False]), jnp.asarray([3, 3])
    dear = dataclasses.replace(memory, price=jnp.full((2, 1), 1.4))
    assert strategy._worthwhile(dear, active, count).tolist() == [3, 3]
    tired = dataclasses.replace(dear, tried=jnp.asarray([9.0, 0.0]))
    assert strategy._worthwhile(tired, active, count).tolist() == [0, 0]
    cheap = dataclasses.replace(tired, price=jnp.full((2, 1), 1.001))
    assert strategy._worthwhile(cheap, active, count).tolist() == [3, 3]
