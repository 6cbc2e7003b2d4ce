"""Both sides of the crossing, played in turn; the threads are tested in test_async_engine."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from jaxserve.engine.crossing import Crossing
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Account, Delta, FinishReason, Pass, Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.engine.unread import Unread
from jaxserve.errors import EngineError, Forbidden, InvalidRequest, Overloaded, Quarantined, ShuttingDown
from jaxserve.testing import HashDevice, hash_plan

PLAN = hash_plan()


@pytest.fixture
def woken() -> list[int]:
    return []


@pytest.fixture
def crossing(woken) -> Crossing:
    engine = Engine(HashDevice(PLAN), Policy(2, 2, 60, 600, 0), clock=lambda: 0.0)
    return Crossing(engine, lambda: woken.append(1))


def ask(name: str, tenant: str = "", **sampling) -> Request:
    return Request(name, (50, 51), SamplingParams(**{"max_tokens": 6, "seed": 1, **sampling}), tenant=tenant)


def turn(crossing: Crossing, ticks: int = 1) -> None:
    for _ in range(ticks):
        crossing.publish(crossing.deliver_letters() + crossing._engine.tick())


def test_letters_arrive_in_order(crossing: Crossing, woken):
    stream = crossing.submit(ask("a"))
    stream.cancel()
    assert len(woken) == 2
    assert crossing.has_letters
    turn(crossing)
    assert not crossing.has_letters
    assert not crossing._engine._scheduler.has_work
    assert stream.take() is None


def test_what_waits_is_one_delta_and_bounded(crossing: Crossing):
    stream = crossing.submit(ask("a"))
    turn(crossing, 9)
    delta = stream.take()
    assert delta is not None
    assert (len(delta.tokens), delta.finish_reason) == (6, FinishReason.LENGTH)
    assert stream.take() is None
    assert crossing.streams == 0
    stream.cancel()
    assert not crossing.has_letters


def test_a_full_house_is_said_at_once_but_the_quiet_may_try(crossing: Crossing):
    for index in range(4):
        crossing.submit(ask(f"g{index}", "greedy"))
    with pytest.raises(Overloaded) as caught:
        crossing.submit(ask("g4", "greedy"))
    assert caught.value.retry_after > 0
    with pytest.raises(Overloaded):
        crossing.room("greedy")
    crossing.room("quiet")
    quiet = crossing.submit(ask("q0", "quiet"))
    turn(crossing, 20)
    delta = quiet.take()
    assert delta is not None
    assert delta.finish_reason is FinishReason.LENGTH


def test_who_comes_again_is_not_counted_as_refused(crossing: Crossing):
    refused = crossing._engine.metrics.refused
    for index in range(4):
        crossing.submit(ask(f"g{index}", "greedy"))
    with pytest.raises(Overloaded):
        crossing.submit(ask("g4", "greedy"), patient=True)
    assert refused._value.get() == 0
    for request_id in ("g4", "g5"):  # as if there had been room when it was asked
        crossing._letters.append(partial(crossing._submit, ask(request_id, "greedy"), request_id == "g4"))
    turn(crossing)
    assert refused._value.get() == 1


def test_a_tenant_is_ended_by_itself(crossing: Crossing):
    gone, stays = crossing.submit(ask("a", "a")), crossing.submit(ask("b", "b"))
    assert crossing.cancel_tenant("a", Forbidden("the key was revoked")) == 1
    turn(crossing, 9)
    last, other = gone.take(), stays.take()
    assert last is not None
    assert isinstance(last.error, Forbidden)
    assert other is not None
    assert other.finish_reason is FinishReason.LENGTH


def test_who_may_not_come_is_told(crossing: Crossing):
    crossing.submit(ask("a"))
    with pytest.raises(InvalidRequest, match="in use"):
        crossing.submit(ask("a"))
    with pytest.raises(InvalidRequest):
        crossing.submit(dataclasses.replace(ask("b"), prompt=(999,)))
    crossing._engine.quarantine.add(ask("c"), 0.0)
    with pytest.raises(Quarantined):
        crossing.submit(ask("d"))
    crossing.closing = ShuttingDown("no more")
    with pytest.raises(ShuttingDown):
        crossing.submit(ask("e"))
    with pytest.raises(ShuttingDown):
        crossing.room()
    assert crossing.streams == 1


def test_everyone_hears_of_the_end(crossing: Crossing):
    streams = [crossing.submit(ask(name)) for name in "abc"]
    crossing.publish(crossing.everyone(ShuttingDown("over")))
    for stream in streams:
        last = stream.take()
        assert last is not None
        assert isinstance(last.error, ShuttingDown)
    assert crossing.streams == 0


def test_a_mistake_that_one_request_meets_is_its_own(crossing: Crossing, monkeypatch):
    met, unreachable, other = (crossing.submit(ask(name)) for name in "abc")
    submit = crossing._engine.submit

    def stumble(request: Request):
        if request.id == "a":
            raise ZeroDivisionError
        return submit(request)

    def refuse(delta):
        raise ZeroDivisionError

    monkeypatch.setattr(crossing._engine, "submit", stumble)
    monkeypatch.setattr(unreachable, "put", refuse)
    turn(crossing, 20)
    for stream in (met, unreachable):
        last = stream.take()
        assert last is not None
        assert isinstance(last.error, EngineError)
    last = other.take()
    assert last is not None
    assert (len(last.tokens), last.finish_reason) == (6, FinishReason.LENGTH)
    assert crossing.streams == 0
    assert not crossing._engine._scheduler.has_work


def test_what_was_generated_is_counted_read_or_not(crossing: Crossing):
    stream = crossing.submit(ask("a", max_tokens=6, ignore_eos=True))
    turn(crossing, 2)
    made = stream.generated
    stream.cancel()
    turn(crossing, 5)
    assert stream.generated == made > 0
    whole = crossing.submit(ask("b", max_tokens=6, ignore_eos=True))
    turn(crossing, 9)
    assert whole.generated == len(whole.take().tokens) == 6


def test_who_reads_nothing_gives_way_when_too_much_waits(crossing: Crossing):
    """Also when the answer is finished, so that it holds no slot any more; whoever reads is left alone."""
    crossing._unread = Unread(1200)
    quick, lazy = crossing.submit(ask("quick")), crossing.submit(ask("lazy"))
    read: list[int] = []
    for _ in range(12):
        turn(crossing)
        if (delta := quick.take()) is not None:
            read += delta.tokens
    assert len(read) == 6
    late = crossing.submit(ask("late"))
    turn(crossing, 12)
    ends = [stream.take() for stream in (lazy, late)]
    (refused,) = [end for end in ends if end is not None and end.error is not None]
    assert isinstance(refused.error, Overloaded)
    assert refused.tokens == ()
    assert sum(end is not None and len(end.tokens) == 6 for end in ends) == 1
    assert crossing._engine.metrics.shortages.labels("unread")._value.get() == 1
    assert crossing._unread.slowest() is None


def test_of_what_waits_the_account_is_the_latest_and_passes_are_all(crossing: Crossing):
    stream = crossing.submit(ask("a"))
    one, two = (Pass((number,), Account(passes=1), ()) for number in (1, 2))
    stream.put(Delta((1,), account=Account(passes=1), canvas=(5, 6), passes=(one,)))
    stream.put(Delta((2,), account=Account(passes=2), passes=(two,)))
    delta = stream.take()
    assert delta is not None
    assert (delta.account, delta.canvas, delta.passes) == (Account(passes=2), (), (one, two))
