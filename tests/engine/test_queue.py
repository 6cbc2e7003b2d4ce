"""Whose turn it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.queue import READ, WRITTEN, Queue
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.work import Running


def waits(tenant: str, number: int = 0, prompt: int = 4, pool: int = 0) -> Running:
    request = Request(f"{tenant}{number}", (1,) * prompt, SamplingParams(), tenant=tenant)
    return Running(request, pool, arrived=float(number), seed=0)


def anybody(running: Running) -> bool:
    return True


def seat(queue: Queue, running: Running) -> None:
    queue.take(running)
    queue.read(running)
    running.slot = 0


def test_first_come_first_served_within_a_tenant():
    queue = Queue()
    line = [waits("a", number) for number in range(3)]
    for running in line:
        queue.push(running)
    for running in line:
        assert queue.next(anybody) is running
        seat(queue, running)
    assert (len(queue), queue.next(anybody)) == (0, None)


def test_only_those_who_would_fit():
    queue = Queue()
    long, short = waits("a", 0, pool=1), waits("a", 1, pool=0)
    queue.push(long)
    queue.push(short)
    assert queue.next(lambda one: one.pool == 0) is short
    assert queue.next(anybody) is long
    assert queue.next(lambda one: False) is None


def test_silence_earns_no_credit():
    queue = Queue()
    busy = waits("busy", 0)
    queue.push(busy)
    seat(queue, busy)
    queue.written(busy, 1000)
    queue.push(waits("busy", 1))
    late = [waits("late", number) for number in range(2, 5)]
    for running in late:
        queue.push(running)
    seat(queue, late[0])
    queue.written(late[0], 1)
    assert queue.next(anybody).request.tenant == "busy"


def test_it_forgets_who_has_left():
    queue = Queue()
    running = waits("a")
    queue.push(running)
    queue.forget(running)
    assert (len(queue), list(queue), queue.next(anybody)) == (0, [], None)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(0, 40)), min_size=60, max_size=120))
def test_two_who_always_want_more_get_the_same(work):
    """While both wait all the time, what they had differs by no more than one request each."""
    queue, served, number = Queue(), {"a": 0, "b": 0}, 0
    for tenant in "ab":
        for _ in range(len(work)):
            number += 1
            queue.push(waits(tenant, number))
    for _, _, written in work:
        running = queue.next(anybody)
        seat(queue, running)
        queue.written(running, written)
        served[running.request.tenant] += READ * len(running.request.prompt) + WRITTEN * written
        assert abs(served["a"] - served["b"]) <= READ * 4 + WRITTEN * 40
        queue.forget(running)
