from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from jaxserve.engine import quarantine
from jaxserve.engine.quarantine import Quarantine
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import Quarantined

BAD = Request("bad", (1, 2, 3), SamplingParams(temperature=0.5, seed=1))


def test_the_like_of_it_is_refused_for_a_while():
    ward = Quarantine(600)
    ward.check(BAD, 0.0)
    ward.add(BAD, 0.0)
    again = dataclasses.replace(BAD, id="again", tenant="other", sampling=dataclasses.replace(BAD.sampling, seed=2))
    with pytest.raises(Quarantined, match="in 100 s"):
        ward.check(again, 500.0)
    ward.check(dataclasses.replace(BAD, prompt=(1, 2)), 500.0)
    ward.check(dataclasses.replace(BAD, sampling=SamplingParams(temperature=0.4)), 500.0)
    ward.check(again, 600.0)


def test_it_can_be_turned_off():
    ward = Quarantine(0)
    ward.add(BAD, 0.0)
    ward.check(BAD, 0.0)


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(quarantine, "CAPACITY", 3)
    ward = Quarantine(600)
    for token in range(5):
        ward.add(dataclasses.replace(BAD, prompt=(token,)), float(token))
    ward.check(dataclasses.replace(BAD, prompt=(1,)), 5.0)
    with pytest.raises(Quarantined):
        ward.check(dataclasses.replace(BAD, prompt=(2,)), 5.0)


class Leaving(dict[bytes, float]):
    """Another thread lets one go in the midst of every walk."""

    def __iter__(self) -> Iterator[bytes]:
        walk = super().__iter__()
        self.popitem()
        return walk


def test_who_adds_is_not_hurt_by_who_checks(monkeypatch):
    monkeypatch.setattr(quarantine, "CAPACITY", 3)
    ward = Quarantine(600)
    for token in range(3):
        ward.add(dataclasses.replace(BAD, prompt=(token,)), 0.0)
    ward._until = Leaving(ward._until)
    ward.add(BAD, 0.0)
    with pytest.raises(Quarantined):
        ward.check(BAD, 1.0)
