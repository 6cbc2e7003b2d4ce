"""Streams that begin when there is room; `test_generation.py` tries them as a request's choices."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import DeadlineExceeded, Overloaded
from jaxserve.server import late
from jaxserve.server.late import LateStream


def request(**changes) -> Request:
    return Request("late", (1, 2, 3), SamplingParams(max_tokens=9, seed=1), **changes)


def test_it_comes_when_there_is_room(engine, monkeypatch):
    monkeypatch.setattr(late, "LOOK_AGAIN", 0.01)

    async def run():
        engine.refuse = Overloaded("full", retry_after=1.0)
        stream = LateStream(request(), engine, asyncio.Lock())
        reading = asyncio.create_task(anext(aiter(stream)))
        await asyncio.sleep(0.03)
        assert not reading.done()
        assert stream.generated == 0
        engine.refuse = None
        await reading
        assert len(engine.submitted) == 1

    asyncio.run(run())


def test_it_gives_up_at_the_deadline_and_when_it_is_cancelled(engine, monkeypatch):
    monkeypatch.setattr(late, "LOOK_AGAIN", 0.01)

    async def run():
        engine.refuse = Overloaded("full", retry_after=1.0)
        with pytest.raises(DeadlineExceeded):
            await anext(aiter(LateStream(request(deadline=0.0), engine, asyncio.Lock())))
        stream = LateStream(request(), engine, asyncio.Lock())
        stream.cancel()
        assert [delta async for delta in stream] == []

    asyncio.run(run())
