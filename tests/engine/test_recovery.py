"""Who made the step fail?"""

from __future__ import annotations

import math

import pytest

from jaxserve.config import Pool
from jaxserve.engine.recovery import Recovery
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.work import Running
from jaxserve.errors import DeviceFault, EngineError, NumericalError
from jaxserve.testing import HashDevice, hash_plan

PLAN = hash_plan(Pool(16, 64), Pool(4, 128))


class Trials:
    """A device with an opinion, and the trials made on it."""

    def __init__(self, fault=lambda kind, texts: None, finite=lambda text: True) -> None:
        self.made = 0
        self.recovery = Recovery(HashDevice(PLAN, fault, finite), lambda request: (), self.beat)

    def beat(self) -> None:
        self.made += 1


def suspects(count: int, marked: int | None = None) -> list[Running]:
    found = []
    for index in range(count):
        pool, slot = (0, index) if index < 16 else (1, index - 16)
        prompt = (*range(50, 60 + index), 1) if index == marked else tuple(range(50, 60 + index))
        running = Running(Request(f"r{index}", prompt, SamplingParams(max_tokens=20)), pool, 0.0, 0, slot=slot)
        running.generated += range(100, 100 + index % 5)
        found.append(running)
    return found


def poisoned(kind, texts):
    return RuntimeError("poisoned") if any(1 in text for text in texts) else None


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 20])
def test_the_culprit_is_found_by_halves(count):
    for marked in range(count):
        trials = Trials(poisoned)
        found = trials.recovery.culprit(suspects(count, marked))
        assert found is not None
        assert found[0].request.id == f"r{marked}"
        assert isinstance(found[1], EngineError)
        assert trials.made <= math.ceil(math.log2(count)) + 4


def test_a_number_that_is_none_is_called_so():
    found = Trials(finite=lambda text: 1 not in text).recovery.culprit(suspects(5, 3))
    assert found is not None
    assert (found[0].request.id, type(found[1])) == ("r3", NumericalError)


def test_a_fault_that_does_not_come_again_is_nobodys():
    assert Trials().recovery.culprit(suspects(9)) is None
    assert Trials().recovery.culprit([]) is None


@pytest.mark.parametrize("at", range(1, 5))
def test_one_more_fault_by_chance_blames_nobody(at):
    runs = iter(range(1, 99))

    def once(kind, texts):
        return RuntimeError("once") if kind == "run" and next(runs) == at else None

    assert Trials(once).recovery.culprit(suspects(1)) is None


@pytest.mark.parametrize("kind", ["prefill", "run"])
def test_one_program_that_always_fails_is_the_devices_fault(kind):
    with pytest.raises(DeviceFault):
        Trials(lambda what, texts: RuntimeError("gone") if what == kind else None).recovery.culprit(suspects(4))


def test_where_everything_fails_nobody_is_to_blame():
    with pytest.raises(DeviceFault):
        Trials(lambda kind, texts: RuntimeError("gone")).recovery.culprit(suspects(4))


def test_a_broken_pool_is_nobodys_fault(monkeypatch):
    run = HashDevice.run

    def broken(self, pool, slots, steps):
        self.lost = self.lost or (RuntimeError("broken") if pool == 1 else None)
        return run(self, pool, slots, steps)

    monkeypatch.setattr(HashDevice, "run", broken)
    with pytest.raises(DeviceFault):
        Trials().recovery.culprit(suspects(18))
