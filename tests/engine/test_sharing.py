"""Who reads for whom."""

from __future__ import annotations

from collections import deque

from jaxserve.engine.request import Request
from jaxserve.engine.sharing import due, heir, reader
from jaxserve.engine.work import Running
from jaxserve.plan import Chunk


def running(name: str, *, group: str = "g", tenant: str = "", prompt=(1, 2, 3), pool: int = 0, chunks: int = 1):
    one = Running(Request(name, prompt, group=group, tenant=tenant), pool, arrived=float(ord(name)), seed=0)
    one.chunks = deque(Chunk(at, 1, 1) for at in range(chunks))
    return one


def test_only_who_reads_the_same_for_the_same_group_is_a_reader():
    first = running("a")
    assert reader(running("b"), [first]) is first
    for other in (
        running("b", group="h"),
        running("b", group=""),
        running("b", tenant="ann"),
        running("b", prompt=(1, 2, 4)),
        running("b", pool=1),
    ):
        assert reader(other, [first]) is None
    assert reader(running("b", group=""), [running("a", group="")]) is None
    first.decoding = True
    assert reader(running("b"), [first]) is None


def test_copies_are_due_when_all_is_read_and_once():
    first, second, third = running("a"), running("b", chunks=0), running("c", chunks=0)
    second.source = third.source = first
    assert reader(running("d"), [second, third, first]) is first
    assert due([second, first, third]) == ()
    assert not second.ready
    first.chunks.clear()
    assert [(work.source, work.running) for work in due([second, first, third])] == [(first, second), (first, third)]
    assert due([second, first, third]) == ()
    assert second.ready


def test_who_came_first_reads_when_the_reader_has_gone():
    first, second, third = running("a"), running("b", chunks=0), running("c", chunks=0)
    second.source = third.source = first
    assert heir(first, [third, second]) is second
    assert (second.source, third.source) == (None, second)
    assert heir(first, [third, second]) is None
