"""Who gets which slot."""

from __future__ import annotations

from jaxserve.engine.request import Request
from jaxserve.engine.seats import Seats, Slots
from jaxserve.engine.work import Running


def running(name: str, tenant: str = "", pool: int = 0) -> Running:
    return Running(Request(name, (1, 2), tenant=tenant), pool, arrived=0.0, seed=0)


def test_the_first_free_slot_is_given_and_taken_back():
    slots = Slots(3)
    one, other = running("one"), running("other")
    slots.take(one)
    slots.take(other)
    assert (one.slot, other.slot, slots.free) == (0, 1, [2])
    slots.give_back(one)
    assert (slots.free, slots.running) == ([0, 2], {1: other})


def test_a_seat_needs_a_free_slot_room_and_a_share():
    pools = [Slots(2), Slots(2)]
    seats = Seats(3, lambda slots: max(1, slots // 2), pools)
    mine, yours = running("a", "mine"), running("b", "yours", pool=1)
    assert seats.open(mine)
    seats.take(mine)
    assert not seats.open(running("c", "mine"))
    assert seats.open(yours)
    seats.take(yours)
    assert seats.open(running("d", "hers"))
    seats.take(running("d", "hers"))
    assert not seats.open(running("e", "his", pool=1))
