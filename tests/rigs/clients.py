"""Clients on raw sockets: they ask, read events, read slowly, and hang up when they please.

Knows HTTP/1.1 and server-sent events as far as the service uses them. Knows no model. What an answer said is kept with
its log-probabilities, so that two answers are the same only if every number behind them is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit


@dataclasses.dataclass(slots=True)
class Answer:
    """What came back.

    Attributes:
        status: 0 if the connection ended before a status came.
        body: of an answer that is no stream.
        events: of a stream; ``times`` says when each came, in seconds after the request was sent.
        done: the stream ended in ``[DONE]``.
        left: the client hung up.
        seconds: from sending to the end.
    """

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    done: bool = False
    left: bool = False
    seconds: float = 0.0

    @property
    def error(self) -> str | None:
        """The error's code, in whatever way it was said."""
        for said in (self.events[-1] if self.events else None, self._whole()):
            if isinstance(said, dict) and isinstance(said.get("error"), dict):
                return str(said["error"]["code"])
        return None

    @property
    def complete(self) -> bool:
        """Answered to the end, without an error."""
        return self.status == 200 and self.error is None and (self.done or not self.events)

    @property
    def said(self) -> list[tuple[int, str, float]]:
        """Choice, token and log-probability of each token; for requests with ``logprobs``."""
        found = []
        for part in self.events or [self._whole() or {}]:
            for choice in part.get("choices", ()):
                logprobs = choice.get("logprobs") or {"tokens": (), "token_logprobs": ()}
                pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                found += [(choice["index"], token, logprob) for token, logprob in pairs]
        return sorted(found, key=lambda one: one[0])

    def _whole(self) -> Any:
        with contextlib.suppress(ValueError):
            return json.loads(self.body)
        return None


class Line:
    """One connection with one request on it; an asynchronous context manager."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, buffer: int | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._tls = tls
        self._buffer = buffer
        self.began = 0.0

    async def __aenter__(self) -> Line:
        plug = socket.socket()
        if self._buffer is not None:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        plug.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(plug, (self._host, self._port))
            name = self._host if self._tls else None
            limit = self._buffer or 2**16
            self._reader, self._writer = await asyncio.open_connection(
                sock=plug, ssl=self._tls, server_hostname=name, limit=limit
            )
        except BaseException:
            plug.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await self._writer.wait_closed()

    async def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        """Sends a whole request; the connection ends with its answer."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = {"host": f"{self._host}:{self._port}", "connection": "close"}
        if body is not None:
            lines |= {"content-type": "application/json", "content-length": str(len(content))}
        lines |= headers or {}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.send_bytes(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content)

    async def send_bytes(self, data: bytes) -> None:
        """Sends anything."""
        self.began = time.monotonic()
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, answer: Answer) -> None:
        """Reads status and headers."""
        status = await self._reader.readline()
        if not status:
            return
        answer.status = int(status.split()[1])
        while (line := (await self._reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            answer.headers[name.lower()] = value.strip()

    async def read(self, answer: Answer) -> bytes | None:
        """The next piece of the body, ``None`` at its end."""
        if "chunked" not in answer.headers.get("transfer-encoding", ""):
            return await self._reader.read(2**16) or None
        size = int((await self._reader.readline()).strip() or b"0", 16)
        if size == 0:
            return None
        piece = await self._reader.readexactly(size)
        await self._reader.readexactly(2)
        return piece

    def hang_up(self, *, reset: bool = False) -> None:
        """Leaves without a word, or with a reset."""
        if reset:
            plug = self._writer.get_extra_info("socket")
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


async def ask(
    url: str,
    body: Mapping[str, Any] | None,
    *,
    path: str = "/v1/completions",
    headers: Mapping[str, str] | None = None,
    leave_after: int | None = None,
    leave_in: float | None = None,
    reset: bool = False,
    pace: float = 0.0,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """One request and its answer.

    Args:
        body: a GET if there is none.
        leave_after: hang up after so many events.
        leave_in: hang up after so many seconds, whatever has come.
        reset: hang up with a reset.
        pace: seconds between two reads.
    """
    answer = Answer()
    async with Line(url, tls=tls) as line:
        try:
            async with asyncio.timeout(leave_in):
                await line.send("GET" if body is None else "POST", path, body, headers)
                await line.head(answer)
                async for event in _events(line, answer, pace):
                    answer.times.append(time.monotonic() - line.began)
                    answer.events.append(event)
                    if leave_after is not None and len(answer.events) >= leave_after:
                        raise TimeoutError
        except TimeoutError:
            answer.left = True
            line.hang_up(reset=reset)
        except (OSError, asyncio.IncompleteReadError):
            pass  # cut off: neither done nor with an error
        answer.seconds = time.monotonic() - line.began
    return answer


async def ask_all(url: str, bodies: Sequence[Mapping[str, Any]], **keywords: Any) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(url, body, **keywords) for body in bodies)))


async def _events(line: Line, answer: Answer, pace: float) -> AsyncIterator[dict[str, Any]]:
    stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    pending = b""
    while (piece := await line.read(answer)) is not None:
        if not stream:
            answer.body += piece
            continue
        pending += piece
        while b"\n\n" in pending:
            event, _, pending = pending.partition(b"\n\n")
            if event == b"data: [DONE]":
                answer.done = True
            elif event.startswith(b"data: "):
                yield json.loads(event[6:])
        if pace:
            await asyncio.sleep(pace)
