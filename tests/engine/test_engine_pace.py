"""When a dispatch is made: one ahead while every slot is taken, at the last moment while one is free."""

from __future__ import annotations

import dataclasses

from jaxserve.config import Pool
from jaxserve.engine.engine import MARGIN, Engine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.scheduler import Policy
from jaxserve.testing import HashDevice, HashFlight, hash_plan

STEP = 0.1


@dataclasses.dataclass(frozen=True)
class Arriving:
    """A flight that is there when its device has got to it."""

    flight: HashFlight
    device: Paced
    ready: float

    def read(self):
        self.device.now = max(self.device.now, self.ready)
        return self.flight.read()


class Paced(HashDevice):
    """A device that takes ``STEP`` for a run, one after the other, while the host's time stands still."""

    now = 0.0
    free = 0.0

    def clock(self) -> float:
        return self.now

    def run(self, pool, slots, steps):
        self.free = max(self.now, self.free) + STEP
        return Arriving(super().run(pool, slots, steps), self, self.free)


def engine_on(device: Paced) -> Engine:
    policy = Policy(max_concurrency=2, max_waiting=4, queue_timeout=1e9, request_timeout=1e9, batch_window=0.0)
    return Engine(device, policy, clock=device.clock)


def endless(name: str) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=50, ignore_eos=True))


def test_with_a_free_slot_it_waits_until_the_device_is_nearly_done():
    device = Paced(hash_plan(Pool(2, 64), steps_per_dispatch=1))
    engine = engine_on(device)
    assert engine.spare == 0
    engine.submit(endless("one"))
    for _ in range(12):
        engine.tick()
    assert abs(engine.spare - (STEP - MARGIN)) < 1e-9
    device.now += STEP
    assert engine.spare == 0


def test_with_every_slot_taken_it_never_waits():
    device = Paced(hash_plan(Pool(2, 64), steps_per_dispatch=1))
    engine = engine_on(device)
    engine.submit(endless("one"))
    engine.submit(endless("two"))
    for _ in range(12):
        engine.tick()
        assert engine.spare == 0


def first_token_after(device: Paced, *, patient: bool) -> float:
    """Seconds that a newcomer waits who comes right after a dispatch."""
    engine = engine_on(device)
    engine.submit(endless("one"))
    for _ in range(12):
        engine.tick()
    arrived = device.now
    if patient:
        device.now += engine.spare
    else:
        engine.tick()
    engine.submit(endless("two"))
    while True:
        if any(request_id == "two" and delta.tokens for request_id, delta in engine.tick()):
            return device.now - arrived


def test_who_comes_meanwhile_is_part_of_the_next_dispatch():
    plan = hash_plan(Pool(2, 64), steps_per_dispatch=1)
    patient, eager = (first_token_after(Paced(plan), patient=patient) for patient in (True, False))
    assert round(patient / STEP) == 2
    assert round(eager / STEP) == 3
