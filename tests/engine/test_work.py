from __future__ import annotations

from jaxserve.engine.request import Request
from jaxserve.engine.work import Running, Tick


def test_a_request_on_its_way_knows_all_its_tokens():
    running = Running(Request("a", (1, 2)), 0, arrived=5.0, seed=0)
    running.generated += [3, 4, 5]
    assert (running.known, running.tokens, running.began) == (5, (1, 2, 3, 4, 5), 5.0)
    running.started = 0.0
    assert running.began == 0.0


def test_a_tick_without_work_is_false():
    assert not Tick((), (), (), ())
