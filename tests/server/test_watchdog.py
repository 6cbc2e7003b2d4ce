"""The watchdog says what stands still, once, and ends a process that can't go on, and no other."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time

import msgspec
import pytest

from jaxserve.engine.metrics import Metrics
from jaxserve.errors import DeviceFault
from jaxserve.server.vitals import LOOK_SECONDS
from jaxserve.server.watchdog import EX_SOFTWARE, LEAVE_SECONDS, Watchdog, stacks


@dataclasses.dataclass
class Watched:
    """A watchdog on a clock of the test's own, and what it has done."""

    service: object
    model: object
    now: float = 0.0
    age: float = 0.0
    failure: DeviceFault | None = None
    given_up: list = dataclasses.field(default_factory=list)
    left: list = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.service.config = msgspec.structs.replace(self.service.config, heartbeat_limit_s=2.0)
        self.service.vitals = type(self.service.vitals)(self.service, lambda: self.now)
        self.service.metrics = Metrics()
        self.service.model = dataclasses.replace(
            self.model, heartbeat=lambda: self.age, step_limit=lambda: 0.75, failure=lambda: self.failure
        )
        self.watchdog = Watchdog(self.service, self.given_up.append, self.left.append, lambda: self.now)

    def run(self, seconds: float, *, stepping: bool = False, looping: bool = True) -> None:
        """Lets time pass."""
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.now += LOOK_SECONDS
            self.age = 0.0 if stepping else self.age + LOOK_SECONDS
            if looping:
                self.service.vitals.pulse.beat(0.0)
            self.watchdog.look()

    def stalls(self, part: str) -> float:
        """What the metric says."""
        return self.service.metrics.stalls.labels(part)._value.get()


@pytest.fixture
def watched(service, model, caplog):
    caplog.set_level(logging.INFO)
    return Watched(service, model)


def said(caplog, message: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == message]


def test_nothing_is_said_of_a_sound_process(watched, caplog):
    watched.run(60, stepping=True)
    assert caplog.records == []
    assert (watched.given_up, watched.left) == ([], [])


def test_a_pause_is_told_and_counted_once_and_so_is_its_end(watched, caplog):
    watched.run(1.5)
    watched.run(1, stepping=True)
    assert [record.fields["part"] for record in said(caplog, "stalled")] == ["engine"]
    assert [record.fields["part"] for record in said(caplog, "goes on")] == ["engine"]
    assert (watched.stalls("engine"), watched.stalls("event_loop")) == (1, 0)
    watched.run(1.5, stepping=True, looping=False)
    assert watched.stalls("event_loop") == 1
    assert said(caplog, "stands still") == []
    assert watched.left == []


def test_a_hang_is_shown_once_with_every_thread_and_ends_at_twice_the_limit(watched, caplog):
    watched.run(3)
    (record,) = said(caplog, "stands still")
    assert "Thread MainThread" in record.stacks
    assert "test_watchdog.py" in record.stacks
    assert watched.given_up == []
    watched.run(1.5)
    (why,) = watched.given_up
    assert "stands still" in why.message
    assert len(said(caplog, "stands still")) == 1
    assert watched.left == []
    watched.run(LEAVE_SECONDS)
    assert watched.left[0] == EX_SOFTWARE == 70


def test_a_second_hang_is_shown_again(watched, caplog):
    for _ in range(2):
        watched.run(2.5)
        watched.run(0.5, stepping=True)
    assert len(said(caplog, "stands still")) == 2
    assert watched.given_up == []


def test_an_engine_that_has_given_up_ends_it_within_seconds(watched, caplog):
    watched.run(1, stepping=True)
    watched.failure = DeviceFault("The device is broken.")
    watched.run(0.1, stepping=True)
    assert watched.given_up == [watched.failure]
    watched.age = math.inf
    watched.watchdog.look()
    assert said(caplog, "stands still") == []
    watched.age = 0.0
    (record,) = said(caplog, "the engine has failed")
    assert record.fields["error"] == "device_fault"
    watched.run(LEAVE_SECONDS - 0.2, stepping=True)
    assert watched.left == []
    watched.run(0.4, stepping=True)
    assert watched.left
    assert watched.given_up == [watched.failure]


def test_it_does_not_end_a_process_that_was_paused(watched):
    watched.run(1, stepping=True)
    watched.now += 3600
    watched.age += 3600
    watched.watchdog.look()
    watched.run(1, stepping=True)
    assert (watched.given_up, watched.left) == ([], [])


def test_it_looks_on_when_a_look_fails(service, monkeypatch, caplog, wait_for):
    looks = []

    def fail() -> None:
        looks.append(1)
        raise RuntimeError("oops")

    monkeypatch.setattr(service.vitals, "look", fail)
    watchdog = Watchdog(service, lambda error: None, lambda code: None)
    watchdog.start()
    wait_for(lambda: len(looks) >= 3)
    watchdog.stop()
    count = len(looks)
    time.sleep(3 * LOOK_SECONDS)
    assert len(looks) == count
    assert said(caplog, "the watchdog could not look")


def test_it_seeks_relief_for_a_short_memory(service, monkeypatch):
    sought = []
    monkeypatch.setattr(service.memory, "relieve", lambda: sought.append(1))
    Watchdog(service, lambda error: None).look()
    assert sought


def test_stacks_name_the_threads():
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="someone")
    thread.start()
    try:
        assert "Thread someone:" in stacks()
    finally:
        go.set()
        thread.join()
