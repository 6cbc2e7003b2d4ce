"""Answering while somebody may hang up: server-sent events, and a watch on the line for every generating request.

Knows ASGI. Knows no model and no wire shape: events come in as structs to encode. An error before the first event is
an ordinary answer with its status; one after it is a last event ``data: {"error": ...}`` with no ``[DONE]`` behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from jaxserve.server.openai import error_body, error_object
from jaxserve.server.service import Running

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An event of a type of its own; the others are plain messages."""

    name: str
    data: msgspec.Struct


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


async def attended(receive: Receive, work: Coroutine[Any, Any, T], running: Running) -> T:
    """Runs ``work`` while the client is there; the body must have been read.

    Raises:
        ClientDisconnect: the client hung up, and ``work`` was cancelled.
        JaxserveError: what the server gave as its reason when it ended everything, and ``work`` was cancelled.
    """
    if running.cut is not None:
        work.close()
        raise running.why()
    worker: asyncio.Task[Any] = asyncio.create_task(work)
    watcher = asyncio.create_task(_hung_up(receive))
    running.tasks.add(worker)
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        if worker.cancelled():
            raise running.why()
        result: T = worker.result()
        return result
    finally:
        running.tasks.discard(worker)
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events; an ASGI application.

    Args:
        events: what to send, each as one event.
        close: called when it is over, however it ended.
        ping: seconds of silence after which a comment is sent, so that proxies keep the connection. Before the first
            event this also commits to status 200.
    """

    def __init__(
        self,
        events: AsyncGenerator[msgspec.Struct | Named, None],
        *,
        close: Callable[[], None],
        ping: float,
        running: Running,
    ) -> None:
        self._events = events
        self._close = close
        self._ping = ping
        self._running = running
        self._started = False
        self._sent_at = time.monotonic()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends every event, then ``[DONE]``."""
        try:
            await attended(receive, self._write(send), self._running)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not self._started:
                raise
            scope["state"]["error"] = error_object(error).code
            await self._send(send, b"data: " + error_body(error) + b"\n\n", last=True)
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        pinger = asyncio.create_task(self._keep_open(send))
        encode = msgspec.json.Encoder().encode
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    name, data = b"", event
                    if isinstance(event, Named):
                        name, data = b"event: " + event.name.encode() + b"\n", event.data
                    await self._send(send, name + b"data: " + encode(data) + b"\n\n")
            await self._send(send, b"data: [DONE]\n\n", last=True)
        finally:
            pinger.cancel()

    async def _keep_open(self, send: Send) -> None:
        while True:
            due = self._sent_at + self._ping
            await asyncio.sleep(max(due - time.monotonic(), 0.001))
            if time.monotonic() - self._sent_at >= self._ping:
                await self._send(send, b": ping\n\n")

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        async with self._turn:
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._started = True
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            self._sent_at = time.monotonic()
