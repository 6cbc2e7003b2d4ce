"""The state machine behind the probes: forwards, or failed."""

from __future__ import annotations

import threading

import pytest

from jaxserve.server.readiness import Phase, Readiness


def test_a_start_goes_through_its_phases():
    readiness = Readiness()
    assert str(readiness.status) == "starting"
    readiness.advance("loading", 3, 12)
    assert str(readiness.status) == "loading 3/12"
    readiness.advance("compiling", 5, 9)
    assert str(readiness.status) == "compiling 5/9"
    readiness.advance("selftest", 0, 0)
    assert str(readiness.status) == "selftest"
    assert not readiness.is_ready()
    readiness.ready()
    assert readiness.is_ready()
    assert str(readiness.status) == "ready"


@pytest.mark.parametrize("phase", ["", "sleeping"])
def test_there_are_no_other_phases(phase):
    with pytest.raises(ValueError):
        Readiness().advance(phase, 0, 0)


def test_a_failure_is_final():
    readiness = Readiness()
    readiness.fail("The checkpoint is damaged.")
    readiness.ready()
    readiness.drain()
    assert readiness.status.phase is Phase.FAILED
    assert readiness.status.message == "The checkpoint is damaged."


def test_nothing_but_a_failure_ends_a_drain():
    readiness = Readiness()
    readiness.drain()
    readiness.ready()
    readiness.advance("loading", 1, 2)
    assert readiness.status.phase is Phase.DRAINING
    readiness.fail("x")
    assert readiness.status.phase is Phase.FAILED


def test_progress_within_a_phase_keeps_its_beginning():
    readiness = Readiness()
    readiness.advance("loading", 1, 2)
    since = readiness.status.since
    readiness.advance("loading", 2, 2)
    assert readiness.status.since == since


def test_only_what_comes_further_is_progress():
    now = 0.0
    readiness = Readiness(clock=lambda: now)
    readiness.advance("compiling", 1, 9)
    now = 9.0
    readiness.advance("compiling", 1, 9)
    assert readiness.standstill() == 9.0
    readiness.advance("compiling", 2, 9)
    assert readiness.standstill() == 0.0
    now = 20.0
    assert readiness.standstill() == 11.0
    readiness.ready()
    now = 1e6
    assert readiness.standstill() == 0.0


@pytest.mark.parametrize("end", [Readiness.drain, Readiness.fail])
def test_an_end_is_no_standstill(end):
    now = 0.0
    readiness = Readiness(clock=lambda: now)
    end(*([readiness, "why"] if end is Readiness.fail else [readiness]))
    now = 1e6
    assert readiness.standstill() == 0.0


def test_having_been_ready_is_kept():
    readiness = Readiness()
    readiness.advance("loading", 1, 2)
    assert not readiness.status.started
    readiness.ready()
    readiness.drain()
    assert readiness.status.started
    readiness.fail("x")
    assert readiness.status.started


def test_threads_see_whole_moments():
    readiness = Readiness()
    torn = []

    def write() -> None:
        for i in range(2000):
            readiness.advance("loading" if i % 2 else "compiling", i, 2 * i)

    def read() -> None:
        for _ in range(2000):
            status = readiness.status
            torn.extend([status] if status.total != 2 * status.done else [])

    threads = [threading.Thread(target=work) for work in (write, read, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
