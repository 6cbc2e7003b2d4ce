"""What is true of the process, told apart from what only looks like it."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import DeviceFault
from jaxserve.server.readiness import Readiness
from jaxserve.server.vitals import LAG_WINDOW_SECONDS, LOOK_SECONDS, Part, Pulse, Stillness, Vitals


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class FakeModel:
    """What a model tells, each a value to set."""

    beat: float = 0.0
    limit: float = 0.75
    fault: DeviceFault | None = None
    bad: bool = False

    def heartbeat(self) -> float:
        return self.beat

    def step_limit(self) -> float:
        return self.limit

    def failure(self) -> DeviceFault | None:
        return self.fault

    def degraded(self) -> bool:
        return self.bad


@dataclasses.dataclass
class FakeProcess:
    """A process that is ready."""

    clock: Clock
    config: ServerConfig = dataclasses.field(
        default_factory=lambda: ServerConfig(heartbeat_limit_s=10, loop_limit_s=5, stall_limit_s=20)
    )
    model: FakeModel | None = dataclasses.field(default_factory=FakeModel)

    def __post_init__(self) -> None:
        self.readiness = Readiness(self.clock)
        self.readiness.ready()
        self.vitals = Vitals(self, self.clock)

    def run(self, seconds: float, *, looping: bool = True, stepping: bool = True) -> None:
        """Lets time pass; the watchdog looks as it does."""
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.clock.now += LOOK_SECONDS
            if looping:
                self.vitals.pulse.beat(0.0)
            if self.model is not None:
                self.model.beat = 0.0 if stepping else self.model.beat + LOOK_SECONDS
            self.vitals.look()


@pytest.fixture
def process() -> FakeProcess:
    return FakeProcess(Clock())


def test_all_is_well(process):
    process.run(3)
    assert process.vitals.ready()
    assert process.vitals.alive()
    assert process.vitals.started()
    assert process.vitals.state() == "ready"
    assert set(process.vitals.checks().values()) == {"ok"}


def test_an_engine_that_makes_no_step_is_not_ready_at_once_and_dead_later(process):
    process.run(0.6, stepping=False)
    assert process.vitals.ready()
    process.run(0.3, stepping=False)
    assert not process.vitals.ready()
    assert process.vitals.checks()["engine"] == "stalled"
    assert process.vitals.state() == "degraded"
    assert process.vitals.alive()
    process.run(9.5, stepping=False)
    assert not process.vitals.alive()
    assert process.vitals.failure() is None
    process.run(10, stepping=False)
    assert "stands still" in process.vitals.failure().message
    process.run(0.2)
    assert process.vitals.ready()
    assert process.vitals.alive()
    assert process.vitals.failure() is None


def test_a_loop_that_stands_still_is_not_ready_at_once_and_dead_later(process):
    process.run(0.6, looping=False)
    assert process.vitals.ready()
    process.run(0.3, looping=False)
    assert not process.vitals.ready()
    assert process.vitals.checks()["event_loop"] == "stalled"
    assert process.vitals.alive()
    process.run(4.5, looping=False)
    assert not process.vitals.alive()
    process.run(0.2)
    assert process.vitals.ready()
    assert process.vitals.alive()


def test_an_engine_that_is_gone_is_dead_at_once(process):
    process.model.fault = DeviceFault("The device is broken.")
    assert not process.vitals.ready()
    assert not process.vitals.alive()
    assert process.vitals.checks()["engine"] == "failed"
    process.model.fault, process.model.beat = None, math.inf
    assert not process.vitals.ready()
    process.vitals.look()
    assert not process.vitals.alive()
    assert process.vitals.failure() is not None


def test_wrong_numbers_are_no_reason_to_restart(process):
    process.model.bad = True
    assert not process.vitals.ready()
    assert process.vitals.alive()
    assert process.vitals.checks()["engine"] == "degraded"


def test_a_start_without_progress_is_dead(process):
    process.readiness = Readiness(process.clock)
    process.model = None
    process.readiness.advance("compiling", 1, 9)
    process.run(19)
    assert process.vitals.alive()
    assert not process.vitals.ready()
    assert not process.vitals.started()
    assert process.vitals.state() == "compiling"
    assert process.vitals.checks()["model"] == "absent"
    process.run(2)
    assert not process.vitals.alive()
    process.readiness.advance("compiling", 2, 9)
    process.run(0.1)
    assert process.vitals.alive()


def test_a_drain_is_alive_and_not_ready(process):
    process.readiness.drain()
    process.run(100)
    assert (process.vitals.alive(), process.vitals.ready(), process.vitals.started()) == (True, False, True)
    assert process.vitals.state() == "draining"


def test_a_failure_is_dead(process):
    process.readiness.fail("The checkpoint is damaged.")
    assert (process.vitals.alive(), process.vitals.ready()) == (False, False)
    assert process.vitals.state() == "failed"


@pytest.mark.parametrize("part", Part)
def test_a_process_that_was_paused_as_a_whole_is_alive(process, part):
    """All ages are as long as the pause when it goes on, whoever looks first."""
    if part is Part.STARTUP:
        process.readiness = Readiness(process.clock)
    process.run(1)
    process.clock.now += 3600
    process.model.beat = 3600.0
    process.vitals.look()
    assert process.vitals.alive()
    assert process.vitals.failure() is None
    assert process.vitals.still(part) < 5
    process.run(1)
    assert process.vitals.alive()


def test_stillness_counts_no_more_than_was_seen():
    still = Stillness()
    still.look(50.0, 100.0)
    assert still.seconds == 0
    still.look(50.1, 100.1)
    assert still.seconds == pytest.approx(0.1)
    still.look(90.0, 140.0)
    assert still.seconds == pytest.approx(0.1 + 3 * LOOK_SECONDS)
    still.look(0.05, 140.1)
    assert still.seconds == 0.05
    still.look(math.inf, 140.2)
    assert still.seconds == math.inf


def test_the_limits_are_those_of_the_settings(process):
    assert [process.vitals.limit(part) for part in Part] == [10, 5, 20]
    process.config = msgspec.structs.replace(process.config, loop_limit_s=7)
    assert process.vitals.limit(Part.EVENT_LOOP) == 7


def test_the_worst_lag_is_shown_for_a_while():
    clock = Clock()
    pulse = Pulse(clock)
    for lag, shown in ((0.1, 0.1), (0.5, 0.5), (0.2, 0.5), (0.3, 0.5)):
        clock.now += 1
        pulse.beat(lag)
        assert pulse.lag() == shown
    clock.now += LAG_WINDOW_SECONDS - 1.5
    pulse.beat(0.0)
    assert pulse.lag() == 0.3
    clock.now += LAG_WINDOW_SECONDS
    pulse.beat(0.0)
    assert pulse.lag() == 0.0
    clock.now += 2
    assert pulse.age() == 2
