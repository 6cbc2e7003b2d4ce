"""When tokens travel to their experts' devices: never for nothing, and the sooner the more is saved."""

from __future__ import annotations

from jaxserve.plan.exchange import exchanged_from, places


def test_places_for_other_devices_tokens():
    assert places(64, 8, 8) == 53
    assert places(64, 2, 1) == 64
    assert all(1 <= places(m, c, n) <= m for m in (1, 7, 64) for c in (1, 8) for n in (1, 2, 64))


def test_tokens_are_exchanged_where_that_sends_less():
    assert exchanged_from(2048, 8, 1) is None, "there is one device"
    assert exchanged_from(2048, 0, 8) is None, "there are no experts"
    assert exchanged_from(2048, 8, 4) is None, "nearly every device has one of a token's experts"
    assert exchanged_from(2048, 8, 8) == 1037
    found = [exchanged_from(2048, 8, devices) for devices in (8, 16, 32, 64)]
    assert found == sorted(found, reverse=True)
    assert exchanged_from(2048, 2, 8) < exchanged_from(2048, 8, 8)
    assert exchanged_from(8192, 8, 8) < exchanged_from(2048, 8, 8)
