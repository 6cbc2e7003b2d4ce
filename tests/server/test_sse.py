"""Streams of events, and the watch on the line, on bare ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from jaxserve.errors import EngineError, NumericalError, Overloaded, ShuttingDown
from jaxserve.server.service import Running
from jaxserve.server.sse import EventStream, Named, attended


class Event(msgspec.Struct):
    n: int


class Line:
    """A connection: what was sent over it, and when it is hung up."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    @property
    def body(self) -> str:
        return b"".join(message["body"] for message in self.sent[1:]).decode()


async def stream(events: AsyncGenerator[Event, None], line: Line, running: Running, ping: float = 9.0) -> dict:
    """Runs a stream; returns the scope's state and whether everything was cleaned up."""
    closed = []
    scope = {"type": "http", "state": {}}
    try:
        response = EventStream(events, close=lambda: closed.append(True), ping=ping, running=running)
        await response(scope, line.receive, line.send)
    finally:
        assert closed == [True]
        assert running.tasks == set()
        assert len(asyncio.all_tasks()) == 1
    return scope["state"]


async def numbers(count: int, error: Exception | None = None, delay: float = 0.0) -> AsyncGenerator[Event, None]:
    for n in range(count):
        await asyncio.sleep(delay)
        yield Event(n)
    if error is not None:
        raise error


def test_events_end_with_done():
    async def check() -> None:
        line = Line()
        await stream(numbers(2), line, Running())
        assert line.sent[0]["status"] == 200
        assert dict(line.sent[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert line.body == 'data: {"n":0}\n\ndata: {"n":1}\n\ndata: [DONE]\n\n'
        assert [message["more_body"] for message in line.sent[1:]] == [True, True, False]

    asyncio.run(check())


@pytest.mark.parametrize("error", [Overloaded("Full."), EngineError("Broken."), ValueError("x")])
def test_an_error_before_the_first_event_is_an_ordinary_answer(error):
    async def check() -> None:
        line = Line()
        with pytest.raises(type(error)):
            await stream(numbers(0, error), line, Running())
        assert line.sent == []

    asyncio.run(check())


def test_an_error_later_is_the_last_event():
    async def check() -> None:
        line = Line()
        state = await stream(numbers(1, NumericalError("Not a number.")), line, Running())
        events = line.body.split("\n\n")
        assert events[0] == 'data: {"n":0}'
        assert msgspec.json.decode(events[1].removeprefix("data: "))["error"]["code"] == "numerical_error"
        assert "[DONE]" not in line.body
        assert line.sent[-1]["more_body"] is False
        assert state["error"] == "numerical_error"

    asyncio.run(check())


def test_an_unforeseen_error_says_nothing():
    async def check() -> None:
        line = Line()
        await stream(numbers(1, KeyError("secret")), line, Running())
        assert "secret" not in line.body
        assert "internal_error" in line.body

    asyncio.run(check())


def test_silence_is_broken_by_comments():
    async def check() -> None:
        line = Line()
        await stream(numbers(2, delay=0.12), line, Running(), ping=0.05)
        assert line.body.startswith(": ping\n\n: ping\n\ndata: {")
        assert line.body.count(": ping") == 4

    asyncio.run(check())


def test_an_error_after_a_comment_is_an_event():
    async def check() -> None:
        async def late() -> AsyncGenerator[Event, None]:
            await asyncio.sleep(0.1)
            raise Overloaded("Full.")
            yield

        line = Line()
        await stream(late(), line, Running(), ping=0.04)
        assert "server_is_overloaded" in line.body

    asyncio.run(check())


def test_hanging_up_ends_the_stream():
    async def check() -> None:
        ended = []

        async def endless() -> AsyncGenerator[Event, None]:
            try:
                while True:
                    yield Event(0)
                    await asyncio.sleep(0.01)
            finally:
                ended.append(True)

        line = Line()
        asyncio.get_running_loop().call_later(0.05, line.gone.set)
        with pytest.raises(ClientDisconnect):
            await stream(endless(), line, Running())
        assert ended == [True]
        assert "[DONE]" not in line.body

    asyncio.run(check())


def test_the_end_of_the_server_is_an_event():
    async def check() -> None:
        line, running = Line(), Running()
        asyncio.get_running_loop().call_later(0.05, running.end, ShuttingDown("Over."))
        await stream(numbers(100, delay=0.02), line, running)
        assert '"code":"server_shutdown"' in line.body
        assert "[DONE]" not in line.body

    asyncio.run(check())


# --- the watch on the line --------------------------------------------------------------------------------------------


def test_work_is_done_while_somebody_waits():
    async def work() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def check() -> None:
        assert await attended(Line().receive, work(), Running()) == 7
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


def test_work_stops_when_nobody_waits():
    async def check() -> None:
        line = Line()
        line.gone.set()
        stopped = []

        async def work() -> None:
            try:
                await asyncio.sleep(10)
            finally:
                stopped.append(True)

        with pytest.raises(ClientDisconnect):
            await attended(line.receive, work(), Running())
        assert stopped == [True]

    asyncio.run(check())


def test_errors_come_through():
    async def work() -> None:
        raise EngineError("Broken.")

    async def check() -> None:
        with pytest.raises(EngineError):
            await attended(Line().receive, work(), Running())

    asyncio.run(check())


def test_a_server_at_its_end_takes_no_work():
    async def check() -> None:
        running = Running()
        running.end(ShuttingDown("The server is shutting down."))
        with pytest.raises(ShuttingDown):
            await attended(Line().receive, asyncio.sleep(10), running)

    asyncio.run(check())


def test_being_cancelled_cancels_the_work():
    async def check() -> None:
        running = Running()
        task = asyncio.create_task(attended(Line().receive, asyncio.sleep(10), running))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running.tasks == set()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


def test_an_event_may_have_a_type():
    async def mixed() -> AsyncGenerator[Event | Named, None]:
        yield Event(0)
        yield Named("block.update", Event(1))

    async def check() -> None:
        line = Line()
        await stream(mixed(), line, Running())
        assert line.body == 'data: {"n":0}\n\nevent: block.update\ndata: {"n":1}\n\ndata: [DONE]\n\n'

    asyncio.run(check())
