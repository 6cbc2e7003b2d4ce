"""Fragments, the best of several: the rounds once more in plain loops."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from jaxserve.engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from jaxserve.errors import InvalidRequest, NumericalError, Overloaded
from jaxserve.server import candidates
from jaxserve.server.candidates import Candidates
from jaxserve.server.parallel import Asked

FOUR = Asked(candidates=4, fragment_tokens=8)


@pytest.fixture
def engine(engine, monkeypatch):
    """Its tokens differ in how likely they are."""
    monkeypatch.setattr(engine, "_logprob", lambda token, request: TokenLogprob(token, _logprob(token)))
    return engine


def _logprob(token: int) -> float:
    return -(token * 7919 % 101) / 50


def request(seed: int = 5, **sampling) -> Request:
    params = SamplingParams(**{"max_tokens": 50, "seed": seed} | sampling)
    return Request("whole", tuple(b"hello"), params, tenant="ann")


def streamed(model, whole: Request, asked: Asked = FOUR) -> tuple[list[Delta], Candidates]:
    async def run():
        stream = Candidates(whole, model, asked, asyncio.Lock())
        stream.begin()
        return [delta async for delta in stream], stream

    return asyncio.run(run())


def by_hand(engine, whole: Request, count: int = 4, length: int = 8):
    """The text, its end, and the scores of each round."""
    text, rounds = (), []
    while True:
        left = min(length, whole.sampling.max_tokens - len(text))
        given = []
        for place in range(count):
            seed = candidates._derived(whole.sampling.seed, len(rounds), place)
            sampling = dataclasses.replace(whole.sampling, max_tokens=left, seed=seed)
            given.append(engine._tokens(dataclasses.replace(whole, prompt=whole.prompt + text, sampling=sampling)))
        scores = [sum(map(_logprob, tokens)) / len(tokens) for tokens, _ in given]
        best = scores.index(max(scores))
        rounds.append((scores, best))
        text += given[best][0]
        if given[best][1] is FinishReason.STOP or len(text) >= whole.sampling.max_tokens:
            return text, given[best][1], rounds


@pytest.mark.parametrize("seed", range(12))
def test_the_best_fragment_is_gone_on_with(model, engine, seed: int):
    deltas, stream = streamed(model, request(seed))
    text, reason, rounds = by_hand(engine, request(seed))
    assert tuple(token for delta in deltas for token in delta.tokens) == text
    assert [delta.finish_reason for delta in deltas] == [*[None] * (len(deltas) - 1), reason]
    assert [one.chosen for one in stream.rounds] == [best for _, best in rounds]
    for one, (scores, _) in zip(stream.rounds, rounds, strict=True):
        assert one.scores == pytest.approx(scores)
    assert stream.generated == len(text) + sum(one.discarded for one in stream.rounds)
    assert not engine.active
    assert len({len(delta.tokens) for delta in deltas}) > 0


def test_rounds_differ_in_what_they_choose(model, engine):
    chosen = {one.chosen for seed in range(12) for one in streamed(model, request(seed))[1].rounds}
    assert len(chosen) == 4


def test_a_round_is_a_group_that_says_what_was_written(model, engine):
    deltas, _ = streamed(model, request(1, min_tokens=20, ignore_eos=True))
    written = 0
    for index, delta in enumerate(deltas):
        group = engine.submitted[4 * index : 4 * index + 4]
        assert {one.written for one in group} == {written}
        assert {len(one.prompt) for one in group} == {5 + written}
        assert {one.group for one in group} == {f"whole-{index}"}
        assert {one.tenant for one in group} == {"ann"}
        assert {one.sampling.min_tokens for one in group} == {min(max(20 - written, 0), len(delta.tokens))}
        assert len({one.sampling.seed for one in group}) == 4
        written += len(delta.tokens)
    assert len({one.id for one in engine.submitted}) == len(engine.submitted) == 4 * len(deltas)


def test_a_seed_repeats_and_no_seed_varies(model, engine):
    def text(seed):
        deltas, _ = streamed(model, request(seed))
        return tuple(token for delta in deltas for token in delta.tokens)

    assert text(3) == text(3) != text(4)
    assert len({text(None) for _ in range(5)}) > 1


def test_log_probabilities_are_told_to_who_asked(model, engine):
    for logprobs in (None, 2):
        deltas, _ = streamed(model, request(2, logprobs=logprobs))
        assert all(len(delta.logprobs) == (0 if logprobs is None else len(delta.tokens)) for delta in deltas)


def test_an_error_of_one_ends_all(model, engine):
    engine.fail_after = (1, NumericalError("none"))
    (delta,), stream = streamed(model, request(2))
    assert isinstance(delta.error, NumericalError)
    assert stream.rounds == []
    assert len(engine.submitted) == 4


def test_no_room_is_an_error_at_once_only_for_the_first(model, engine):
    engine.refuse = Overloaded("full", retry_after=1.0)
    with pytest.raises(Overloaded):
        streamed(model, request())


@pytest.mark.parametrize("when", [0, 1, 2])
def test_who_leaves_holds_nothing(model, engine, when: int):
    async def run():
        stream = Candidates(request(1, ignore_eos=True), model, FOUR, asyncio.Lock())
        stream.begin()
        engine.delay = 0.001
        deltas = aiter(stream)
        for _ in range(when):
            await anext(deltas)
        reading = asyncio.create_task(anext(deltas))
        await asyncio.sleep(0.002)
        assert engine.active
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        stream.cancel()
        assert not engine.active
        assert [delta async for delta in deltas] == []

    asyncio.run(run())


def test_nothing_to_write_is_written(model, engine):
    (delta,), _ = streamed(model, request(max_tokens=0, ignore_eos=True))
    assert (delta.tokens, delta.finish_reason) == ((), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("asked", "sampling", "best_of", "param"),
    [
        (FOUR, SamplingParams(temperature=0.0), False, "temperature"),
        (FOUR, SamplingParams(), True, "best_of"),
        (dataclasses.replace(FOUR, predicted=True), SamplingParams(), False, "prediction"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, sampling, best_of, param):
    with pytest.raises(InvalidRequest) as raised:
        candidates.check(asked, sampling, best_of=best_of)
    assert raised.value.param == param
    candidates.check(FOUR, SamplingParams(), best_of=False)
    candidates.check(Asked(), SamplingParams(temperature=0.0), best_of=True)
