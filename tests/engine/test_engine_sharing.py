"""Choices of one prompt that is read once: the same bits as if each had read it, whatever the layers keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config import Pool
from jaxserve.engine import sharing
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Delta, FinishReason, Request, SamplingParams
from jaxserve.engine.work import ForkWork
from jaxserve.testing import tiny_engine
from tests.decode.test_fork import FAMILIES
from tests.engine.test_engine import Faults, mixed, same

SOME = [1, 2, 17, 40]
SETTINGS = SamplingParams(
    max_tokens=12, temperature=0.9, presence_penalty=0.7, frequency_penalty=0.3, ignore_eos=True, logprobs=2
)


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request) -> Engine:
    hf: dict[str, Any] = FAMILIES[request.param]
    engine = tiny_engine((Pool(4, 128),), hf=hf)  # as other tests compile it
    engine._scheduler._budget = 32  # a chunk a tick
    return engine


def choices(count: int = 4, prompt: int = 40, group: str = "g", **settings: Any) -> list[Request]:
    ids = tuple(7 * at % 89 for at in range(1, prompt + 1))
    return [
        Request(f"{group}-{seed}", ids, dataclasses.replace(SETTINGS, seed=seed, **settings), group=group)
        for seed in range(count)
    ]


def alone(engine: Engine, requests: list[Request]):
    return [engine.generate([dataclasses.replace(request, group="")])[0] for request in requests]


def others(count: int = 4) -> list[Request]:
    mix = [mixed(seed) for seed in range(count)]
    return [dataclasses.replace(one, prompt=tuple(token % 89 for token in one.prompt)) for one in mix]


def together(engine: Engine, requests: list[Request]):
    """In slots that hold nothing which would do as well."""
    engine.device.reset()
    return engine.generate(requests)


def shared(engine: Engine) -> int:
    return int(engine.metrics.shared_tokens._value.get())


def read(engine: Engine) -> int:
    return int(engine.metrics.prompt_tokens._value.get())


@pytest.mark.parametrize("prompt", SOME)
def test_a_prompt_is_read_once_and_every_choice_is_what_it_is_alone(engine: Engine, prompt: int):
    expected = alone(engine, choices(prompt=prompt))
    assert len({answer.tokens for answer in expected}) == 4
    before, before_read = shared(engine), read(engine)
    company = others()[0]  # four slots: one choice comes later, and reads for itself
    *answers, _ = together(engine, [*choices(prompt=prompt), company])
    assert all(map(same, answers, expected))
    once = engine.plan.pools[0].read(prompt)
    assert shared(engine) - before == 3 * once
    assert read(engine) - before_read == 4 * prompt - 3 * once + len(company.prompt)
    assert engine.recompiles == 0


def test_one_who_has_no_slot_in_time_reads_for_itself(engine: Engine):
    expected = alone(engine, choices(5))
    before = shared(engine)
    assert all(map(same, together(engine, choices(5)), expected))
    assert shared(engine) - before == 3 * engine.plan.pools[0].read(40)


def heard(engine: Engine, requests: list[Request], ticks: int, gone: str) -> dict[str, list[Delta]]:
    """Everything that is said when one goes after so many ticks."""
    said: dict[str, list[Delta]] = {request.id: [] for request in requests}
    engine.device.reset()
    for request in requests:
        engine.submit(request)
    for tick in range(500):
        if tick == ticks:
            engine.cancel(gone)
        for name, delta in engine.tick():
            said[name].append(delta)
        if not engine.has_work:
            break
    return said


@pytest.mark.parametrize("ticks", [1, 2, 3, 4])
def test_the_others_go_on_when_the_reader_goes(engine: Engine, ticks: int):
    requests = choices()
    expected = {answer.request.id: answer.tokens for answer in alone(engine, requests)}
    said = heard(engine, requests, ticks, requests[0].id)
    for request in requests[1:]:
        assert tuple(token for delta in said[request.id] for token in delta.tokens) == expected[request.id]
        assert said[request.id][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("kind", "at"), [("prefill", 1), ("prefill", 2), ("fork", 2), ("run", 1), ("run", 2)])
def test_a_step_that_fails_once_loses_nothing(engine: Engine, monkeypatch, kind: str, at: int):
    expected = alone(engine, choices())
    faults = Faults(engine, monkeypatch, kind=kind)
    faults.at = at
    answers = together(engine, choices())
    assert faults.fired == 1
    assert all(map(same, answers, expected))


def test_what_was_written_counts_as_written(engine: Engine):
    """An answer that is gone on with keeps its penalties; read as a prompt its numbers are nearly the same."""
    (request,) = choices(1, prompt=20, max_tokens=20)
    (whole,) = alone(engine, [request])
    rest = dataclasses.replace(
        request,
        prompt=request.prompt + whole.tokens[:12],
        sampling=dataclasses.replace(request.sampling, max_tokens=8),
        written=12,
    )
    (ended,) = engine.generate([rest])
    (forgot,) = engine.generate([dataclasses.replace(rest, written=0)])
    assert ended.tokens == whole.tokens[12:]
    assert forgot.tokens != ended.tokens


def too_early(held):
    """Copies of which the last chunk is missing."""
    works = [ForkWork(one.source, one) for one in held if one.source is not None and len(one.source.chunks) == 1]
    for work in works:
        work.running.source = None
    return tuple(works)


def too_late(held):
    """Copies of who has begun to write."""
    works = [ForkWork(one.source, one) for one in held if one.source is not None and one.source.generated]
    for work in works:
        work.running.source = None
    return tuple(works)


@pytest.mark.parametrize("when", [too_early, too_late])
def test_a_copy_at_the_wrong_time_would_show(engine: Engine, monkeypatch, when):
    expected = alone(engine, choices())
    monkeypatch.setattr(sharing, "due", when)
    wrong = together(engine, choices())
    kept_by_place = when is too_late and all(type(layer).__name__ == "KV" for layer in layers(engine))
    assert all(map(same, wrong, expected)) == kept_by_place  # where each position has a place, later ones do no harm


def layers(engine: Engine) -> list[object]:
    return [layer for layer in engine.device._states[0].cache.layers if layer is not None]
